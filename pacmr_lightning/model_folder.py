"""A model by the name that a user gives, a folder or a Hub id: where it is, and what identifies it."""

from __future__ import annotations

from pathlib import Path

from .files import content_digest


def model_place(name: str) -> str | None:
    """Return a folder or Hub id as ``from_pretrained`` takes it; None for a path without a folder."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    return None if name.startswith((".", "/", "~")) or name.count("/") > 1 else name


def model_state(place: str) -> str | None:
    """Return what identifies a model's weights: a digest of its folder, or the commit of its Hub id.

    Raises:
        OSError: the Hub has no such model.
    """
    from transformers.utils import cached_file, extract_commit_hash

    if Path(place).is_dir():
        return content_digest(place)
    return extract_commit_hash(cached_file(place, "config.json"), None)


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, without its period."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
