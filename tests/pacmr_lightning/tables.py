"""Tables of commands and of what they print, as text."""

import re
import shlex


def texts(table: str) -> list[tuple[str, str]]:
    """Lines, and what is expected of each, which stands below it, indented and on any number of lines."""
    found = re.findall(r"^(\S.*)((?:\n    .*)+)", table, flags=re.M)
    return [(line, " ".join(expected.split())) for line, expected in found]


def cases(table: str) -> list[tuple[list[str], str]]:
    """The words of each command, and what is expected of it."""
    return [(shlex.split(line), expected) for line, expected in texts(table)]
