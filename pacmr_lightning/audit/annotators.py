"""Annotators: their votes on one pair, their reliability, and how often others would contradict a group."""

from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit, logit

from ..datamodules.tokenized_pairs import row_bytes
from ..policy.numerics import clustered_standard_error
from .agreement import RELIABILITIES
from .manual_review import undecided

GROUPINGS = ("category", "annotator")
"""Columns of groups."""
LEAST = 20
"""Pairs of a group for an interval."""
_ROUNDS = 50
"""Rounds of expectation and maximization; each moves a reliability by less than the last."""
_LIKE_OTHERS = 4.0
"""Labels by which an annotator's reliability is drawn to the mean."""


def votes_on_pairs(pairs: Any) -> pd.DataFrame:
    """Return votes on N ``TokenizedPairs`` for and against each label as trained.

    Rows of different annotators with the same prompt and responses, in either order, are votes on one pair,
    and several rows of one annotator share one vote. Rows without an annotator may be copies: their votes are
    their own. Columns: ``votes_for``, ``votes_against``, ``once`` (in a first row with these votes), ``tie``
    (the row itself is one), ``pair`` (number of the prompt with its two responses, annotator or not) and
    ``side`` (1 or -1: the response that the label prefers, the same in all rows of a pair).
    """
    own = pairs.votes
    who = np.array([None] * len(pairs) if pairs.annotators is None else pairs.annotators, dtype=object)
    side, keys = np.where(pairs.swapped, -1, 1), []
    for i, (prompt, *both) in enumerate(row_bytes(pairs.rows, "prompt_ids", "chosen_ids", "rejected_ids")):
        side[i] *= 1 if both[0] < both[1] else -1
        keys.append(hash((prompt, *sorted(both))))  # the bytes of all rows may not fit into memory
    pair, places, named = pd.factorize(np.array(keys))[0], np.arange(len(pairs)), pd.notna(who)
    voted = np.where(named, pair, len(pairs) + places)
    share = 1 / pd.Series(1, places).groupby([voted, np.where(named, who, "")]).transform("sum")
    oriented = np.where(side[:, None] > 0, own, own[:, ::-1]) * share.to_numpy()[:, None]
    total = np.stack([np.bincount(voted, oriented[:, i]) for i in range(2)], axis=1)[voted].round(9)
    total = np.where(side[:, None] > 0, total, total[:, ::-1])
    return pd.DataFrame(
        {
            "votes_for": total[:, 0],
            "votes_against": total[:, 1],
            "once": ~pd.Series(voted).duplicated(),
            "tie": pairs.ties,
            "pair": pair,
            "side": side,
        }
    )


def annotator_reliability(pairs: pd.DataFrame, margin: np.ndarray) -> pd.Series:
    """Return the probability that an annotator's label is right, by annotator (Dawid and Skene, 1979).

    The better response is hidden. A score is evidence for the label of ``margin`` (N,) nats, and a label is
    evidence of logit(reliability) for itself. Errors do not depend on the pair, unlike those that p counts.
    Ties say nothing. ``pairs`` are those of ``ScoredPairs``.
    """
    labels = pairs[~pairs["tie"] & pairs["annotator"].notna()]
    if labels.empty:
        return pd.Series(dtype=float)
    codes, names = pd.factorize(labels["annotator"])
    pair, side = pd.factorize(labels["pair"])[0], labels["side"].to_numpy()
    share = 1 / labels.groupby([pair, codes])["side"].transform("size").to_numpy()  # as in votes_on_pairs
    score = margin[labels.index]
    reliability = np.full(len(names), RELIABILITIES[1])
    for _ in range(_ROUNDS):
        evidence = np.bincount(pair, side * share * logit(reliability)[codes])
        right = expit(score + side * evidence[pair])
        drawn = _LIKE_OTHERS * np.average(right, weights=share)
        estimate = (np.bincount(codes, right * share) + drawn) / (np.bincount(codes, share) + _LIKE_OTHERS)
        reliability = np.clip(estimate, *RELIABILITIES)
    return pd.Series(reliability, names)


def group_reliability(pairs: pd.DataFrame, reliability: pd.Series | None = None) -> pd.DataFrame:
    """Return one row per group of the pairs of ``Findings``, the most contradicted first.

    Columns: ``grouping``, ``group`` (NA for none), ``pairs``, ``suspected`` (``undecided``), ``contradicted``
    (expected fraction of labels that another annotator would contradict, the mean of 1 - p; NaN without p)
    with 95% interval ``low`` to ``high`` over prompts (NaN for small groups), ``flipped`` (fraction of known
    labels that are wrong), and perhaps ``reliability`` (of annotators, as given by name).
    """
    tables = []
    for grouping in (name for name in GROUPINGS if name in pairs):
        rows = []
        for name, part in pairs.groupby(pairs[grouping].astype("string"), dropna=False):
            doubt, prompts = 1 - part["p"].to_numpy(), part["prompt"].to_numpy()
            mean = doubt.mean()
            error = clustered_standard_error(doubt, prompts) if len(part) >= LEAST else np.nan
            rows.append(
                {
                    **{"grouping": grouping, "group": name, "pairs": len(part)},
                    **{"suspected": undecided(part).sum(), "contradicted": mean},
                    **{"low": np.clip(mean - 1.96 * error, 0, 1), "high": np.clip(mean + 1.96 * error, 0, 1)},
                    "flipped": part["flipped"].astype("Float64").mean(),
                }
            )
        table = pd.DataFrame(rows)
        if reliability is not None:
            table["reliability"] = table["group"].map(reliability) if grouping == "annotator" else np.nan
        tables.append(table.sort_values(["contradicted", "pairs"], ascending=False, kind="stable"))
    return pd.concat(tables, ignore_index=True)
