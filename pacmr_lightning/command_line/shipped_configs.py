"""The configs that come with the package, found by name: ``preference``, ``methods/pacmr``."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from .exceptions import stop

_PACKAGE = Path(__file__).parents[1]
FOLDER = (_PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent) / "configs"
"""In an installed package they lie in it, in a checkout beside it."""


@cache
def names() -> tuple[str, ...]:
    """All of them, without ``.yaml``; those for one's own data first."""
    found = (file.relative_to(FOLDER).with_suffix("").as_posix() for file in FOLDER.rglob("*.yaml"))
    return tuple(sorted(found, key=lambda name: ("/" in name, name)))


def shipped_name(path: str) -> str | None:
    """The config of ``names`` that a name or a path under ``configs/`` means."""
    return name if (name := _bare(path)) in names() else None


def did_you_mean(path: str) -> str:
    """`` (did you mean NAME?)`` for a sentence on a name of nothing; empty where none is near."""
    close = get_close_matches(_bare(path), names(), n=1, cutoff=0.7)
    return f" (did you mean {close[0]}?)" if close else ""


def _bare(path: str) -> str:
    """The name of a config, from its name or its path."""
    return path.removeprefix("configs/").removesuffix(".yaml")


def resolved(path: str) -> str:
    """The file that a path or a name means.

    What is a file where the command runs is that file; else ``methods/pacmr``, ``methods/pacmr.yaml`` and
    ``configs/methods/pacmr.yaml`` are the shipped one. What is neither comes back as it is.
    """
    if Path(path).is_file():
        return path
    name = shipped_name(path)
    return path if name is None else str(FOLDER / f"{name}.yaml")


def with_files(words: list[str]) -> list[str]:
    """A command's words, with the files that names after ``--config`` mean; it says where they are.

    A name of nothing ends in one sentence.
    """
    found = list(words)
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag not in ("--config", "-c") or not (equals or words[place + 1 :]):
            continue
        value = value if equals else words[place + 1]
        file = resolved(value)
        if file == value and re.fullmatch(r"[\w./-]+", value) and not os.path.exists(value):
            stop(f"config: there is no file {value}{did_you_mean(value)}; pacmr configs lists those by name.")
        if file != value:
            found[place : place + (1 if equals else 2)] = [f"{flag}={file}"] if equals else [flag, file]
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"--config {value} is {file}")
    return found


def told(name: str) -> str:
    """The first sentence of a config's comment."""
    words: list[str] = []
    for line in (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or line.startswith("#  "):  # a command
            break
        words += line[2:].split()
        ends = [i for i, word in enumerate(words) if word.endswith((".", "?"))]
        if ends:
            return " ".join(words[: ends[0] + 1])
    return " ".join(words)
