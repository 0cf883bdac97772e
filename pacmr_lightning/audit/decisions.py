"""Manual review: random samples, and files of decisions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from ..errors import UserError
from ..files import local_path, read_json_lines

WORDS = ("keep", "swap", "drop", "unsure")
"""Decisions on a label as trained: right, wrong, exclude the pair, or undecided."""
SEED = 0


@dataclass(frozen=True)
class Texts:
    """Texts of a pair, labels as trained."""

    prompt: str
    chosen: str
    rejected: str


def random_sample(ids: Sequence[str], number: int) -> list[str]:
    """Return ids of a random sample; a larger sample of the same pairs begins with the smaller one."""
    return [ids[i] for i in np.random.default_rng(SEED).permutation(len(ids))[:number]]


@dataclass(frozen=True)
class SampleEstimate:
    """Fraction of wrong labels by manual review of a random sample."""

    wrong: int
    right: int
    dropped: int
    unsure: int

    @property
    def read(self) -> int:
        """Number of labels marked wrong or right."""
        return self.wrong + self.right

    @cached_property
    def interval(self) -> tuple[float, float]:
        """95% interval by Clopper and Pearson; NaN without labels."""
        if not self.read:
            return float("nan"), float("nan")
        found = binomtest(self.wrong, self.read).proportion_ci(0.95, method="exact")
        return float(found.low), float(found.high)

    def sentence(self) -> str:
        """Return the share with its interval; empty if nothing was read."""
        if not self.read:
            return ""
        out = ""
        if self.dropped or self.unsure:
            out = f"; {self.dropped} dropped and {self.unsure} unsure pairs are excluded"
        low, high = self.interval
        return (
            f"Of {self.read:,} randomly sampled labels that were reviewed by hand, {self.wrong:,} are wrong: "
            f"{self.wrong / self.read:.1%} (95% interval {low:.1%} to {high:.1%}){out}."
        )


@dataclass(frozen=True)
class Decisions:
    """Decisions on some pairs of a run, by pair id."""

    path: str
    words: dict[str, str]
    observed: dict[str, str]
    """Column that was the chosen response in training, if the file has it."""
    sample: set[str]
    texts: dict[str, str] = field(default_factory=dict)
    """Hash of the pair's texts (``texts`` in ``pairs.parquet``), if the file has it."""

    @property
    def estimate(self) -> SampleEstimate:
        """Fraction of wrong labels by the random sample only; other pairs were selected by a score."""
        drawn = [self.words[name] for name in self.sample]
        return SampleEstimate(*map(drawn.count, ("swap", "keep", "drop", "unsure")))

    def named(self, word: str) -> set[str]:
        """Return ids of the pairs with a decision."""
        return {name for name, decision in self.words.items() if decision == word}

    def check(self, ids: Sequence[str], swapped: Sequence[bool], texts: Sequence[str]) -> list[str]:
        """Raise a UserError if a pair is not among N training pairs, or has another label or texts there.

        Returns a note if some decisions have no hash of their texts to compare.
        """
        trained = {name: "rejected" if swap else "chosen" for name, swap in zip(ids, swapped, strict=True)}
        if unknown := sorted(set(self.words) - set(trained)):
            raise UserError(
                f"{self.path} has a decision on {unknown[0]!r}, which is no training pair here "
                f"({len(unknown)} of {len(self.words)} are not); give the decisions from this run's report."
            )
        if other := sorted(name for name, side in self.observed.items() if trained[name] != side):
            raise UserError(
                f"{self.path} has a decision on {other[0]!r} with the other label ({len(other)} of "
                f"{len(self.words)} pairs); give decisions on a run with the same label noise."
            )
        here = dict(zip(ids, texts, strict=True))
        if other := sorted(name for name, key in self.texts.items() if here[name] != key):
            raise UserError(
                f"{self.path} has a decision on {other[0]!r}, but that pair has other texts here "
                f"({len(other)} of {len(self.words)} pairs); give decisions from a report on these data."
            )
        bare = len(self.words) - len(self.texts)
        return [
            f"{bare} of {len(self.words)} decisions name no hash of their texts, so their pairs are found by "
            "id alone."
        ] * (bare > 0)

    @property
    def content(self) -> dict[str, Any]:
        """Values of all decisions in JSON's types; they do not depend on the file's name and order."""
        return asdict(self) | {"path": None, "sample": sorted(self.sample)}

    def follow(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the table with ``decision`` (NA for none), by which ``p`` and ``p_majority`` are 1 or 0."""
        word = table["id"].map(self.words)
        right = word.map({"keep": 1.0, "swap": 0.0}).astype(float)
        decided = {name: right.fillna(table[name]) for name in ("p", "p_majority")}
        return table.assign(decision=word.astype("string"), **decided)


def read_decisions(path: str) -> Decisions:
    """Read decisions from a file of JSON Lines, as the report's page saves.

    A line has ``id`` and ``decision`` (one of ``WORDS``), and perhaps ``observed`` ("rejected" if the run's
    noise had swapped the responses), ``sample`` (drawn at random) and ``texts`` (a hash of the pair's texts).
    """
    words: dict[str, str] = {}
    observed: dict[str, str] = {}
    texts: dict[str, str] = {}
    sample = set()
    if not (file := local_path(path)).is_file():
        raise UserError(
            f"There is no file {file}; make decisions on the report.html of pacmr audit, and save them there."
        )
    for place, row in read_json_lines(file):
        name, word = row.get("id"), row.get("decision")
        if not isinstance(name, str) or "decision" not in row:
            raise UserError(
                f"{place} has no id with a decision; give a file from the report's Save decisions."
            )
        if word not in WORDS:
            raise UserError(f"{place} has the decision {word!r}; it is one of {', '.join(WORDS)}.")
        if words.setdefault(name, word) != word:
            raise UserError(
                f"{place} has {word} for the pair {name!r}, and an earlier one {words[name]}; remove one "
                "of them."
            )
        side, drawn = row.get("observed", "chosen"), row.get("sample", False)
        if side not in ("chosen", "rejected") or not isinstance(drawn, bool):
            raise UserError(
                f"{place} has observed {side!r} and sample {drawn!r}; observed is chosen or rejected, sample "
                "true or false."
            )
        if "observed" in row and observed.setdefault(name, side) != side:
            raise UserError(
                f"{place} has observed {side} for the pair {name!r}, and an earlier one {observed[name]}; "
                "give decisions on a run with the same label noise."
            )
        if "texts" in row and texts.setdefault(name, str(row["texts"])) != row["texts"]:
            raise UserError(
                f"{place} has other texts for the pair {name!r} than an earlier decision; give decisions on "
                "one data set."
            )
        if drawn:
            sample.add(name)
    if not words:
        raise UserError(f"{path} has no decisions; make some on the report's page, and save them.")
    return Decisions(path, words, observed, sample, texts)
