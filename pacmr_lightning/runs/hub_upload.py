"""Uploads to the Hugging Face Hub, each in one commit."""

from pathlib import Path
from typing import Literal

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..errors import UserError
from ..hub_access import unreachable

_REFUSED = {
    401: "the token is not valid; log in again with hf auth login, or set HF_TOKEN",
    403: "the token may not write there; make one with write access at the Hub, or name another repository",
    404: "the token can see no such repository; check its name",
}


def is_repository(name: str) -> bool:
    """Return true if the name is valid for a model or dataset on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def check_repository(repository: str, option: str) -> None:
    """Raise a UserError, before any work, if an option's repository cannot be uploaded to."""
    if not (is_repository(repository) and "/" in repository):
        raise UserError(
            f"{option} is {repository!r}, but a repository of the Hub is named OWNER/NAME, of letters, "
            "digits, -, _ and dots."
        )
    if get_token() is None:
        raise UserError(
            f"{option} is {repository}, but there is no token for the Hub; log in with hf auth login, or set "
            "HF_TOKEN."
        )


def push(
    files: dict[str, Path], repository: str, kind: Literal["model", "dataset"], private: bool, kept: str
) -> str:
    """Upload files (by path inside the repository) in one commit, and return the repository's address.

    The repository is created if missing; an existing one must be private if ``private``. A UserError means
    that nothing changed; ``kept`` ends its message with the files that are left on this machine.
    """
    api = HfApi()
    try:
        if problem := unreachable():
            raise UserError(problem)
        url = api.create_repo(repository, repo_type=kind, private=private or None, exist_ok=True)
        if private and not api.repo_info(repository, repo_type=kind).private:
            raise UserError(
                "it is there already, and public; leave --private out, or name another repository"
            )
        # Not upload_folder, which may make several commits and stop between them.
        additions = [CommitOperationAdd(name, file) for name, file in files.items()]
        api.create_commit(repository, additions, commit_message="Upload by pacmr-lightning", repo_type=kind)
    except Exception as error:  # the Hub's, the HTTP client's, Xet's, a RuntimeError for a large file
        raise UserError(f"{repository} cannot be uploaded to: {_reason(error)}. {kept}") from None
    return str(url)


def _reason(error: BaseException) -> str:
    """Return the reason; the Hub's own text is left out, since it may repeat secrets."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return _REFUSED.get(status, f"the Hub answered with status {status}")
    said = (str(error).strip() or type(error).__name__).replace("\n", " ")
    token = get_token()
    return (said.replace(token, "TOKEN") if token else said).rstrip(".")
