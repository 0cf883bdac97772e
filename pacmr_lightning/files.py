"""Files that are on disk whole or not at all, and digests of their content."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def obstacle(folder: Path) -> tuple[Path, OSError] | None:
    """Where and why nothing could be written to a folder, which need not be there yet; None where it could.

    Returns:
        The nearest folder that is there (or a file in its place), and the system's error.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return nearest, error


def check_writable(option: str, given: str, folder: Path) -> None:
    """Looks, before any work is done, whether a folder is there to be written to, or could be made.

    Args:
        option: by which it was asked for.
        given: what was asked for.
        folder: the folder, or that of the file.

    Raises:
        UserError: it is below a file, or may not be written to.
    """
    if found := obstacle(folder):
        why = "may not be written to" if found[0].is_dir() else "is a file and no folder"
        raise UserError(f"{option} is {given}, but {found[0]} {why}; name another place.")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path`` that takes its place when the block ends.

    Readers see the old file or the new one, never a part of it; an exception leaves the old one in place.
    The folder is made where it does not exist. Two processes may write the same file at once: the later
    one's stays.

    Raises:
        UserError: the folder cannot be made.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The folder {path.parent} cannot be made ({error.strerror}); name another one for {path.name}."
        ) from None
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json_lines(path: str | Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a JSON object a line, whole or not at all."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def content_digest(path: str | Path) -> str:
    """Return a hash (XXH3, 128 bits) of a file, or of the names and content of a folder's files.

    Hidden files of a folder are left out. A bar is shown where reading takes longer than two seconds.
    """
    import xxhash
    from tqdm import tqdm

    path = Path(path)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in files if file == path or "/." not in f"/{file.relative_to(path).as_posix()}"]
    total = sum(file.stat().st_size for file in files)
    digest = xxhash.xxh3_128()
    with tqdm(total=total, desc=f"Reading {path.name}", unit="B", unit_scale=True, delay=2) as progress:
        for file in files:
            if file != path:
                digest.update(f"{file.relative_to(path)}:{file.stat().st_size}:".encode())
            with file.open("rb") as content:
                while block := content.read(1 << 22):
                    digest.update(block)
                    progress.update(len(block))
    return digest.hexdigest()


def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes a figure as PATH.png and PATH.pdf; ``path`` has no ending.

    The figure is laid out once: both files, and loggers that draw it after that, show the same layout.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for ending in ("png", "pdf"):
        with replacing(f"{path}.{ending}") as temporary:
            figure.savefig(temporary, dpi=200, format=ending)
