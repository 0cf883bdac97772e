"""Shipped configs, by name: ``preference``, ``methods/pacmr``."""

import os
import re
import sys
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from pathlib import Path

from ..errors import UserError
from ..files import expanded, local_path

_PACKAGE = Path(__file__).parents[1]
FOLDER = (_PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent) / "configs"


@cache
def names() -> tuple[str, ...]:
    """Return all names without ``.yaml``, those for your own data first."""
    configs = (file.relative_to(FOLDER).with_suffix("").as_posix() for file in FOLDER.rglob("*.yaml"))
    return tuple(sorted(configs, key=lambda name: ("/" in name, name)))


def did_you_mean(path: str) -> str:
    """Return `` (did you mean NAME?)``, empty if no name is similar."""
    close = get_close_matches(_bare(path), names(), n=1, cutoff=0.7)
    return f" (did you mean {close[0]}?)" if close else ""


def _bare(path: str) -> str:
    return path.removeprefix("configs/").removesuffix(".yaml")


def resolved(path: str) -> str:
    """Return an existing file, else the shipped file of a name or path, else the path unchanged."""
    if local_path(path).is_file():
        return expanded(path)
    return str(FOLDER / f"{name}.yaml") if (name := _bare(path)) in names() else path


def with_files(words: list[str]) -> list[str]:
    """Return a command's words with names after ``--config`` resolved; UserError for an unknown one."""
    command = list(words)
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag not in ("--config", "-c") or not (equals or words[place + 1 :]):
            continue
        value = value if equals else words[place + 1]
        file = resolved(value)
        if file == value and re.fullmatch(r"[\w./-]+", value) and not os.path.exists(value):
            raise UserError(
                f"config: there is no file {value}{did_you_mean(value)}; pacmr configs lists all."
            )
        if file != value:
            command[place : place + (1 if equals else 2)] = [f"{flag}={file}"] if equals else [flag, file]
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"--config {value} is {file}", file=sys.stderr)
    return command


def told(name: str) -> str:
    """Return the first sentence of a config's comment."""
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = takewhile(re.compile("# (?! )").match, lines)  # up to a command, which begins further right
    words = " ".join(" ".join(line[2:] for line in comment).split())
    return re.split(r"(?<=[.?]) (?=[A-Z])", words, maxsplit=1)[0]
