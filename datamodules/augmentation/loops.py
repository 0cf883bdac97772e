"""Detection of a generated text that repeats itself."""

import re

import numpy as np

_THRICE = re.compile(r"(.+?)\1\1", re.DOTALL)


def loops(text: str, source: str) -> bool:
    """Return true if a phrase of any length follows itself more often than in the ``source`` of the text.

    Six times are too many, or three times if they have 24 characters or more, wherever the phrase stands. But
    up to twice as many as in the source are honest: "ha ha ha", lists and code have repetitions of their own.
    Digits of a number, and signs alone, do not count.
    """
    times = max((n for n, length in _repetitions(text) if n >= 6 or n * length >= 24), default=0)
    return times > 0 and times > 2 * max((n for n, _ in _repetitions(source)), default=1)


def _repetitions(text: str) -> list[tuple[int, int]]:
    """Return how often, three times or more, and of how many characters phrases follow themselves."""
    text = f"{text.strip()} "  # so that the last one is whole
    if not _THRICE.search(text):
        return []
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    found = []
    for length in range(1, len(text) // 3 + 1):
        # Runs of characters that equal those one phrase later lie between those that do not.
        ends = np.array([-1, *np.flatnonzero(codes[:-length] != codes[length:]), len(text) - length])
        same = np.diff(ends) - 1
        start = int(ends[same.argmax()]) + 1
        phrase, times = text[start : start + length], 1 + int(same.max()) // length
        if times >= 3 and any(map(str.isalnum, phrase)) and not phrase.isdigit():
            found.append((times, length))
    return found
