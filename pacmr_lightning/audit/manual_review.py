"""Manual review: random samples, and files of decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from ..errors import UserError
from ..files import local_path, read_json_lines

SETTLING = ("keep", "swap", "drop")
WORDS = (*SETTLING, "unsure")
"""Decisions on a label as trained: right, wrong, exclude the pair, or undecided."""
_ALLOWED = {"decision": WORDS, "observed": ("chosen", "rejected"), "sample": (True, False)}
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


def sample_estimate(words: Sequence[str]) -> str:
    """Return the fraction of wrong labels by decisions on a random sample, in a sentence.

    The 95% interval is Clopper and Pearson's. Empty if no label was decided to be right or wrong.
    """
    wrong, right, dropped, unsure = map(words.count, ("swap", "keep", "drop", "unsure"))
    if not (read := wrong + right):
        return ""
    out = f"; {dropped} dropped and {unsure} unsure pairs are excluded" if dropped or unsure else ""
    interval = binomtest(wrong, read).proportion_ci(0.95, method="exact")
    return (
        f"Of {read:,} randomly sampled labels that were reviewed by hand, {wrong:,} are wrong: "
        f"{wrong / read:.1%} (95% interval {interval.low:.1%} to {interval.high:.1%}){out}."
    )


@dataclass(frozen=True)
class Decisions:
    """Decisions on some pairs of a run."""

    path: str
    rows: dict[str, dict[str, Any]]
    """By pair id: ``decision``, ``sample`` (true if the pair was drawn at random) and, if the file has them,
    ``observed`` (the column that was chosen in training) and ``texts`` (``texts`` in ``pairs.parquet``).
    """

    @property
    def words(self) -> dict[str, str]:
        """Decisions by pair id."""
        return {name: row["decision"] for name, row in self.rows.items()}

    @property
    def estimate(self) -> str:
        """``sample_estimate`` of the random sample only; other pairs were selected by a score."""
        return sample_estimate([row["decision"] for row in self.rows.values() if row["sample"]])

    def named(self, word: str) -> set[str]:
        """Return ids of the pairs with a decision."""
        return {name for name, decision in self.words.items() if decision == word}

    def check(self, ids: Sequence[str], swapped: Sequence[bool], texts: Sequence[str]) -> list[str]:
        """Raise a UserError if a pair is not among N training pairs, or has another label or texts there.

        Returns a note if some decisions have no hash of their texts to compare.
        """
        sides = ["rejected" if swap else "chosen" for swap in swapped]
        here = {"observed": dict(zip(ids, sides, strict=True)), "texts": dict(zip(ids, texts, strict=True))}
        if unknown := sorted(self.rows.keys() - here["texts"].keys()):
            raise UserError(
                f"{self.path} has a decision on {unknown[0]!r}, which is no training pair here "
                f"({len(unknown)} of {len(self.rows)} are not); give the decisions from this run's report."
            )
        for column, what in (("observed", "noise on its label"), ("texts", "texts")):
            known = {name: row[column] for name, row in self.rows.items() if column in row}
            if other := sorted(name for name, value in known.items() if here[column][name] != value):
                raise UserError(
                    f"{self.path} has a decision on {other[0]!r}, but that pair has other {what} here "
                    f"({len(other)} of {len(self.rows)} pairs); give decisions from a report on these data."
                )
        bare = sum("texts" not in row for row in self.rows.values())
        return [
            f"{bare} of {len(self.rows)} decisions name no hash of their texts, so their pairs are found by "
            "id alone."
        ] * (bare > 0)

    def spread(self, pairs: pd.DataFrame) -> Decisions:
        """Return the decisions with those on other rows of a decided pair, each seen from its own label.

        Ties neither give nor get one. ``pairs`` have columns of ``votes_on_pairs``.
        """
        words, other, rows = self.words, {"keep": "swap", "swap": "keep"}, dict(self.rows)
        votes = pairs.loc[~pairs["tie"], ["id", "pair", "side"]].to_numpy().tolist()
        read = [(pair, (words[name], side)) for name, pair, side in votes if name in words]
        by_pair = dict(one for one in reversed(read) if one[1][0] != "unsure")
        for name, pair, side in votes:
            if name not in rows and pair in by_pair:
                word, of = by_pair[pair]
                rows[name] = {"decision": word if side == of else other.get(word, word), "sample": False}
        return Decisions(self.path, rows)

    def follow(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the table with ``decision`` (NA for none), by which ``p`` and ``p_majority`` are 1 or 0."""
        word = table["id"].map(self.words)
        right = word.map({"keep": 1.0, "swap": 0.0}).astype(float)
        decided = {name: right.fillna(table[name]) for name in ("p", "p_majority")}
        return table.assign(decision=word.astype("string"), **decided)


def settled(table: pd.DataFrame) -> pd.Series:
    """Return a mask of the labels that a decision has settled, if there is the column."""
    return table.filter(["decision"]).isin(SETTLING).any(axis=1)


def undecided(table: pd.DataFrame) -> pd.Series:
    """Return a mask of the suspected labels that no decision has settled."""
    return table["suggested"].eq("swap") & ~settled(table)


def decided_wrong(table: pd.DataFrame) -> pd.Series:
    """Return a mask of the labels that a decision calls wrong, of which p is 0; a tie is neither."""
    return table["p"].eq(0) & ~table["tie"]


def read_decisions(path: str) -> Decisions:
    """Read decisions from a file of JSON Lines, as the report's page saves.

    A line has ``id`` and ``decision`` (one of ``WORDS``), and perhaps ``observed`` ("rejected" if the run's
    noise had swapped the responses), ``sample`` (drawn at random) and ``texts`` (a hash of the pair's texts).
    """
    rows: dict[str, dict[str, Any]] = {}
    if not (file := local_path(path)).is_file():
        raise UserError(
            f"There is no file {file}; make decisions on the report.html of pacmr audit, and save them there."
        )
    for place, row in read_json_lines(file):
        row = {column: value for column, value in row.items() if value is not None}  # as pandas writes NA
        name = str(row["id"]) if type(row.get("id")) is int else row.get("id")
        if not isinstance(name, str) or "decision" not in row:
            raise UserError(
                f"{place} has no id with a decision; give a file from the report's Save decisions."
            )
        for column, allowed in _ALLOWED.items():
            if column in row and row[column] not in allowed:
                raise UserError(
                    f"{place} has the {column} {row[column]!r}; it is one of {', '.join(map(str, allowed))}."
                )
        known = rows.setdefault(name, {"sample": False})
        known["sample"] |= row.get("sample", False)
        for column in ("decision", "observed", "texts"):
            if column in row and known.setdefault(column, row[column]) != row[column]:
                raise UserError(
                    f"{place} has the {column} {row[column]!r} for the pair {name!r}, and an earlier line "
                    f"{known[column]!r}; remove one of them."
                )
    if not rows:
        raise UserError(f"{path} has no decisions; make some on the report's page, and save them.")
    return Decisions(path, rows)
