"""Atomic writes, locks, JSON Lines, and digests of files and texts."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def expanded(value: Any) -> Any:
    """Return texts with ``~`` and ``~user`` as home folders, as in a shell; also those in dicts and lists.

    For names of models and datasets, which are folders or Hub ids; ``local_path`` is for paths.
    """
    if isinstance(value, dict):
        return {key: expanded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [expanded(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str | Path) else value


def local_path(place: str | Path) -> Path:
    """Return the path of a place that a user names, which may begin with ``~``."""
    return Path(expanded(place))


def is_file_of_rows(place: str | Path) -> bool:
    """Return whether a place is a file, by what exists or by its ending, and no dataset on the Hub."""
    return local_path(place).is_file() or str(place).endswith((".jsonl", ".json", ".parquet", ".gz"))


def check_writable(option: str, given: str, folder: Path, replaced: bool = False) -> None:
    """Raise a UserError, before any work, if an option's folder cannot be written to, or ``replaced``."""
    if replaced and (os.path.ismount(folder.resolve()) or folder.resolve() == Path.cwd()):
        raise UserError(f"{option} is {given}, a mount point or the current folder; name a folder below it.")
    nearest = next(path for path in (folder, *folder.resolve().parents)[replaced:] if path.exists())
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError:
        why = "may not be written to" if nearest.is_dir() else "is a file and no folder"
        raise UserError(f"{option} is {given}, but {nearest} {why}; name another place.") from None


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that replaces it if the block ends without an exception.

    The block may make a file or a folder there. The folder above is made if missing. If two processes write
    the same file, the later one wins. A link to a folder stays.
    """
    path = named if (named := local_path(path)).is_file() else named.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The folder {path.parent} cannot be made ({error.strerror}); name another one for {path.name}."
        ) from None
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if temporary.is_dir() and path.is_dir():  # a folder replaces an empty one only
            os.replace(path, old)
        os.replace(temporary, path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock a folder, which is made if missing, against a second process; the end of this one unlocks it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # flock's would stay with forked loaders
        except (ImportError, OSError) as error:  # Windows and some file systems have no such locks
            if isinstance(error, (BlockingIOError, PermissionError)):
                raise UserError(f"Another run works in {folder}; wait, or use another folder.") from None
        yield


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON Lines file (perhaps ``.gz``), each with its place for errors."""
    place = f"{path}, line 1"
    try:
        # utf-8-sig: files from Windows often begin with a byte order mark.
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                place = f"{path}, line {number}"
                if not line.strip():
                    continue
                try:
                    row = json.loads(line, object_pairs_hook=partial(_unique_keys, place))
                except json.JSONDecodeError as error:
                    raise UserError(
                        f"{place} is not JSON ({error.msg} at column {error.colno}); write one object a line."
                    ) from None
                # An integer of more than 4,300 digits, or very deep nesting.
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"{place} cannot be read ({str(error).partition(';')[0]}); write that value as a "
                        "text, or remove it."
                    ) from None
                if not isinstance(row, dict):
                    raise UserError(
                        f"{place} is a JSON {type(row).__name__} and not an object; write one object a line."
                    )
                yield place, row
    except UnicodeDecodeError:
        raise UserError(f"{place} or the one after it is not UTF-8 text; save the file as UTF-8.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise UserError(
            f"{path} is broken as a gzip file after {place}; compress or fetch it again."
        ) from None


def _unique_keys(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise UserError(f"{place} has the key {name!r} twice in one object; keep one of them.")
    return fields


def write_json_lines(path: str | Path, rows: Iterable[dict[str, Any]], **options: Any) -> int:
    """Write a line of ``json.dumps`` per row, atomically, as gzip if the path ends so; return their count."""
    count, opener = 0, gzip.open if str(path).endswith(".gz") else open
    # Half of a surrogate pair becomes its escape in JSON.
    how: dict[str, Any] = {"mode": "wt", "encoding": "utf-8", "errors": "backslashreplace", "newline": "\n"}
    with replacing(path) as temporary, opener(temporary, **how) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, **options) + "\n")
            count += 1
    return count


def write_json(path: str | Path, value: Any, **options: Any) -> None:
    """Write JSON with indents, atomically; ``options`` are of ``json.dumps``."""
    write_text(path, json.dumps(value, indent=2, **options) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_frame(path: str | Path, frame: pd.DataFrame) -> None:
    """Write a table without its index, atomically: as CSV if the path ends so, else as Parquet."""
    with replacing(path) as temporary:
        (frame.to_csv if str(path).endswith(".csv") else frame.to_parquet)(temporary, index=False)


def files_of(path: Path) -> list[Path]:
    """Return a file, or a folder's visible files, also those below links to folders."""
    below = [path] if path.is_file() else sorted(path / f for f in glob("**", root_dir=path, recursive=True))
    return [file for file in below if file.is_file()]


def content_digest(path: str | Path) -> str:
    """Return a hash (XXH3, 128 bits) of a file, or of the names and content of a folder's visible files."""
    import xxhash
    from tqdm import tqdm

    path = local_path(path)
    files = files_of(path)
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


def text_hash(text: str) -> str:
    """Return 16 hexadecimal digits of BLAKE2b."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def unit_hash(text: str, seed: int) -> float:
    """Return a number in [0, 1) that depends only on ``text`` and ``seed``: 53 bits of BLAKE2b."""
    # 64 bits could round up to 1.0; a float holds 53 exactly.
    return (int(text_hash(f"{seed}:{text}"), 16) >> 11) / 2**53


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure as PATH.png and PATH.pdf, with the same layout as in loggers after that."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for ending in ("png", "pdf"):
        with replacing(f"{path}.{ending}") as temporary:
            figure.savefig(temporary, dpi=200, format=ending)
