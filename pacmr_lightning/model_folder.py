"""Identity of a model, by folder or Hub id."""

from pathlib import Path

from .files import content_digest
from .hub_access import locate


def model_state(name: str) -> str | None:
    """Return a digest of a model's folder, or the commit of its Hub id.

    Raises:
        UserError: see ``hub_access.locate``.
        OSError: the Hub has no such model.
    """
    from transformers.utils import cached_file, extract_commit_hash

    place = locate(name)
    if Path(place).is_dir():
        return content_digest(place)
    return extract_commit_hash(cached_file(place, "config.json"), None)
