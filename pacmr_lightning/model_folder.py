"""A model by folder or Hub id: its place, and its identity."""

from __future__ import annotations

from pathlib import Path

from .files import content_digest


def model_place(name: str) -> str | None:
    """Return a folder or Hub id for ``from_pretrained``; None for a path without a folder."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    return None if name.startswith((".", "/", "~")) or name.count("/") > 1 else name


def model_state(place: str) -> str | None:
    """Return a digest of a model's folder, or the commit of its Hub id (OSError if there is none)."""
    from transformers.utils import cached_file, extract_commit_hash

    if Path(place).is_dir():
        return content_digest(place)
    return extract_commit_hash(cached_file(place, "config.json"), None)
