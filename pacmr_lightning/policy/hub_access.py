"""The Hugging Face Hub: whether it can be reached, and folders or Hub ids of models and datasets."""

import sys
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line
from ..files import content_digest, local_path
from ..waiting import waiting

NO_CONNECTION = ("ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError", "UnsupportedProtocol")
"""Errors of the HTTP clients of huggingface_hub's versions, by name."""


@cache
def unreachable(endpoint: str) -> str | None:
    """Return why the Hub at an address cannot be reached, else None; a slow answer counts as reached.

    Asked once, and without huggingface_hub's retries, which take half a minute per file. Without a connection
    huggingface_hub is in its offline mode from then on.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:
        if type(error).__name__ in NO_CONNECTION:
            constants.HF_HUB_OFFLINE = True
            if "datasets" in sys.modules:  # it has a copy
                sys.modules["datasets"].config.HF_HUB_OFFLINE = True
            problem = f"{endpoint} cannot be reached ({first_line(error)})"
            print(f"{problem}; copies in its cache are used.", file=sys.stderr)
            return problem
    return None


def similar_folder(path: Path) -> Path | None:
    """Return the folder beside a path that has the most similar name, if any."""
    folders = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, folders, 1, 0.7)
    return path.parent / near[0] if near else None


def locate(name: str, kind: str = "model", cached: Path | None = None) -> str:
    """Return the folder or Hub id of a model or dataset (``kind``).

    Without a connection a copy in the cache is used; ``cached`` is its folder, by default huggingface_hub's,
    whose snapshot is returned where there is none.

    Raises:
        UserError: a path without a folder, or a Hub id that is not cached while the Hub cannot be reached.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import HFValidationError, LocalEntryNotFoundError, validate_repo_id

    path = local_path(name)
    if path.is_dir():
        return str(path)
    near = similar_folder(path)
    hint = f"did you mean {near}?" if near else "check the spelling, or name a folder."
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise UserError(f"The {kind} folder {name} does not exist; {hint}") from None
    if problem := "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT):
        cached = cached or Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind))
        try:
            return name if cached.is_dir() else snapshot_download(name, repo_type=kind, local_files_only=True)
        except LocalEntryNotFoundError:
            raise UserError(
                f"The {kind} {name} cannot be loaded: there is no such folder, no copy in the Hub's cache, "
                f"and {problem}; {hint}"
            ) from None
    return name


def pretrained(factory: Any, name: str, option: str, **options: Any) -> Any:
    """Return ``factory.from_pretrained`` of a folder or Hub id, the value of ``option``; else a UserError."""
    try:
        with waiting(f"Loading {name}"):
            return factory.from_pretrained(locate(name), **options)
    except (ImportError, OSError, ValueError) as error:
        missing = isinstance(error, ImportError)
        fix = "install pacmr-lightning[augment]" if missing else "give another folder or Hub id of a model"
        raise UserError(
            f"{option} is {name!r}, which {factory.__name__} cannot load ({first_line(error)}); {fix}."
        ) from None


def model_state(name: str) -> str | None:
    """Return a digest of a model's folder, or the commit of its Hub id.

    Raises:
        UserError: see ``locate``.
        OSError: the Hub has no such model.
    """
    from transformers.utils import cached_file, extract_commit_hash

    place = locate(name)
    if Path(place).is_dir():
        return content_digest(place)
    return extract_commit_hash(cached_file(place, "config.json"), None)
