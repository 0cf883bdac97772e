"""Rewards of responses, from which preferences can be drawn and by which policies can be scored."""

import math
import re
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path

from ..errors import UserError
from ..files import local_path

_SHIPPED = {"vader": ("vaderSentiment", "vader_lexicon.txt"), "afinn": ("afinn", "data/AFINN-en-165.txt")}
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


class RewardFunction(ABC):
    """Base of rewards: r(prompt, response) is higher for better responses."""

    name: str

    @abstractmethod
    def __call__(self, prompt: str, response: str) -> float:
        """Return the reward of one response."""


class LexiconReward(RewardFunction):
    """Sum of the valences of a response's distinct words, in small letters and without punctuation.

    Each word counts once, so that repeating it gains nothing. Words outside the lexicon count 0; its entries
    of several words or of signs are ignored.

    Args:
        lexicon: "vader" (Hutto and Gilbert 2014; -4 to 4 per word), "afinn" (Nielsen, arXiv 1103.2903; -5 to
            5), both of extra ``sentiment``, or a file with a word, a tab and its valence in each line.

    Raises:
        UserError: the package or file is missing, or a line is no word with its valence.
    """

    def __init__(self, lexicon: str = "vader"):
        self.name = f"lexicon {lexicon}"
        self.valences = _read(_path(lexicon))

    def __call__(self, prompt: str, response: str) -> float:
        """Return the response's reward; the prompt does not count."""
        words = {word.casefold().replace("’", "'") for word in _WORD.findall(response)}
        return math.fsum(self.valences.get(word, 0.0) for word in words)


def _path(lexicon: str) -> Path:
    if lexicon not in _SHIPPED:
        return local_path(lexicon)
    package, file = _SHIPPED[lexicon]
    found = find_spec(package)  # only its word list is read
    if found is None or not found.submodule_search_locations:
        raise UserError(
            f"lexicon {lexicon} comes with the package {package}, which is missing; install "
            '"pacmr-lightning[sentiment]".'
        )
    return Path(found.submodule_search_locations[0]) / file


def _read(path: Path) -> dict[str, float]:
    if not path.is_file():
        raise UserError(f"lexicon is {path}, which is no file; name one, or vader or afinn.")
    valences = {}
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if line.strip():
            word, _, rest = line.partition("\t")
            try:
                valences[word.strip().casefold()] = float(rest.split("\t")[0])
            except ValueError:
                raise UserError(
                    f"{path}, line {number}: {line[:60]!r} is no word with its valence; put a tab between."
                ) from None
    return valences
