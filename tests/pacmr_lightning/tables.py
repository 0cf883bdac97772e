"""Tables of commands and of what they print, as text."""

import re
import shlex


def cases(table: str) -> list[tuple[list[str], str]]:
    """The words of each command, and below it, indented and on any number of lines, what is expected."""
    found = re.findall(r"^(\S.*)((?:\n    .*)+)", table, flags=re.M)
    return [(shlex.split(words), " ".join(expected.split())) for words, expected in found]
