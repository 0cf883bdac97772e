"""What a person has decided on pairs, as the report's page saves it, or Label Studio exports it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import UserError
from .label_studio import exported
from .sample_share import SampleShare

WORDS = ("keep", "exchange", "drop", "unsure")
"""Decisions on a label as trained: it is right, it is wrong, nothing should be learned from the pair, or
nothing is decided."""


@dataclass(frozen=True)
class Decisions:
    """Decisions on some pairs of a run, by id."""

    path: str
    """The file that they were read from."""
    words: dict[str, str]
    """One of ``WORDS``."""
    observed: dict[str, str]
    """Which of the row's responses was the chosen one in training, where the file says so."""
    sample: set[str]
    """Ids of pairs that were drawn at random."""

    @property
    def share(self) -> SampleShare:
        """Of wrong labels, by the pairs that were drawn at random alone: others were picked by a score."""
        drawn = pd.Series([self.words[name] for name in self.sample], dtype=object)
        return SampleShare(*(int(drawn.eq(word).sum()) for word in ("exchange", "keep", "drop", "unsure")))

    def named(self, word: str) -> set[str]:
        """Ids of the pairs with a decision."""
        return {name for name, decision in self.words.items() if decision == word}

    def check(self, ids: Sequence[str], swapped: Sequence[bool]) -> None:
        """Looks all decisions up.

        Args:
            ids: of the N training pairs.
            swapped: whether the run's noise has exchanged the responses of each.

        Raises:
            UserError: a pair is not among them, or had the other label when it was decided on.
        """
        trained = {name: "rejected" if swap else "chosen" for name, swap in zip(ids, swapped, strict=True)}
        if unknown := sorted(set(self.words) - set(trained)):
            raise UserError(
                f"{self.path} decides on the pair {unknown[0]!r}, which is no training pair here "
                f"({len(unknown)} of {len(self.words)} are not); give the decisions of this run's report."
            )
        if other := sorted(name for name, side in self.observed.items() if trained[name] != side):
            raise UserError(
                f"{self.path} decides on the pair {other[0]!r} with the other label ({len(other)} of "
                f"{len(self.words)} pairs); give decisions on a run with the same noise."
            )

    def follow(self, table: pd.DataFrame) -> pd.DataFrame:
        """The table with a column ``decision`` (NA where there is none), and ``p_wrong`` 0 or 1 by it.

        Pairs that are dropped or unsure keep their probability.
        """
        word = table["id"].map(self.words)
        wrong = word.map({"keep": 0.0, "exchange": 1.0}).astype(float)
        return table.assign(decision=word.astype("string"), p_wrong=wrong.fillna(table["p_wrong"]))


def read_decisions(path: str) -> Decisions:
    """Reads a file that the report's page has saved (JSON Lines), or Label Studio's JSON export.

    Args:
        path: of lines with ``id`` and ``decision`` (one of ``WORDS``), and perhaps ``observed`` ("chosen",
            or "rejected" where the run's noise had exchanged the responses) and ``sample`` (true where the
            pair was drawn at random); or of a list of tasks.

    Raises:
        UserError: it is no such file, or decides on a pair in two ways.
    """
    words: dict[str, str] = {}
    observed: dict[str, str] = {}
    sample = set()
    for place, row in _rows(Path(path).expanduser()):
        name, word = row.get("id"), row.get("decision")
        if not isinstance(name, str) or "decision" not in row:
            raise UserError(
                f"{place} has no id with a decision, so it is none of those that the report's page saves; "
                "give the file of Save decisions, or Label Studio's JSON export."
            )
        if word not in WORDS:
            raise UserError(f"{place} has the decision {word!r}; it is one of {', '.join(WORDS)}.")
        if words.setdefault(name, word) != word:
            raise UserError(
                f"{place} decides on the pair {name!r} as {word}, and an earlier one as {words[name]}; leave "
                "one of them."
            )
        side, drawn = row.get("observed", "chosen"), row.get("sample", False)
        if side not in ("chosen", "rejected") or not isinstance(drawn, bool):
            raise UserError(
                f"{place} has observed {side!r} and sample {drawn!r}; observed is chosen or rejected, sample "
                "true or false."
            )
        if "observed" in row and observed.setdefault(name, side) != side:
            raise UserError(
                f"{place} decides on the pair {name!r} as labelled {side}, and an earlier one as labelled "
                f"{observed[name]}; give decisions on a run with the same noise."
            )
        if drawn:
            sample.add(name)
    if not words:
        raise UserError(f"{path} has no decision; make some on the report's page, and save them.")
    found = Decisions(path, words, observed, sample)
    if found.share.low >= 0.5:
        raise UserError(
            f"{path} holds {found.share.wrong} of {found.share.read} random labels wrong, but an audit takes "
            "less than half of them to be wrong; exchange all labels of the data first."
        )
    return found


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Decisions, each with the place it stands at."""
    if not path.is_file():
        raise UserError(
            f"There is no file {path} of decisions; pacmr audit writes report.html, on which they are made."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is no UTF-8 text; give the file that the report's page has saved.") from None
    if text.lstrip().startswith("["):
        yield from exported(path, text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, a number of too many digits, or nested without end
            row = None
        # What is no object is no decision, of which the reader says so.
        yield f"{path}, line {number}", row if isinstance(row, dict) else {}
