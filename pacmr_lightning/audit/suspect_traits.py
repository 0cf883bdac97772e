"""What the suspects have in common and other pairs have not: length, single words, category, annotator.

A policy that has learned a rule of thumb of whoever labelled suspects the pairs that break the rule. u alone
cannot show that: the rule's followers look right and its breakers wrong. But what the suspects' chosen
responses have or lack names the rule. So does whatever makes responses good, which a policy learns as well;
a rule differs in that nearly all labels follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from scipy import sparse
from scipy.stats import false_discovery_control, norm, t
from sklearn.feature_extraction.text import CountVectorizer

from .group_reliability import GROUPINGS
from .noise_rate import NoiseRate

LEVEL = 0.05
"""Share of false alarms among the traits that are reported; the chance of any where nothing is there."""
LEAST = 10
"""Suspects, and other pairs, that a trait has to decide before it is tested; twice that to be listed."""
FOLLOWED = 0.75
"""Share of the labels from which on they are said to follow a trait.

In the embedded world right labels follow no word in more than 69% (lower end of the interval); under a
favourite word, or a preference for the longer response, they follow one in 78% and more.
"""
_BLOCK = 50
"""Groups that are tested at a time."""
COLUMNS = [
    *("kind", "trait", "suspects", "others", "in_suspects", "in_others", "difference", "low", "high"),
    *("p", "p_adjusted", "in_all", "in_all_low", "in_all_high"),
]


def suspect_traits(
    pairs: pd.DataFrame, suspect: np.ndarray, chosen: Sequence[str], rejected: Sequence[str]
) -> pd.DataFrame:
    """Compare (N,) suspects with the other pairs, trait by trait.

    A word decides a pair where one response alone has it, length where one response has more characters, and
    the pair has the trait where that response is the chosen one. A category or an annotator decides all pairs
    that have one, and those of the group have the trait. Each trait is tested among the pairs that it
    decides; sums over prompts are taken as independent, not pairs. Benjamini and Hochberg's correction is
    over all traits that are tested.

    Returns:
        One row a trait: ``kind`` ("length", "word", "category" or "annotator"), ``trait``, ``suspects`` and
        ``others`` (pairs that it decides), ``in_suspects`` and ``in_others`` (share of them that has it),
        ``difference`` of the two with its 95% interval ``low`` to ``high``, ``p`` and ``p_adjusted`` (NaN
        where suspects or others are fewer than ``LEAST``), and ``in_all`` (share of both together) with
        ``in_all_low`` and ``in_all_high``. First come those with ``p_adjusted`` under ``LEVEL``, the largest
        differences in front, by the end of the interval that is next to zero.
    """
    clusters = pd.factorize(pairs["prompt"])[0]
    blocks = [_lengths(chosen, rejected), _words(chosen, rejected), *_groups(pairs)]
    parts = [
        _compared(decides, has, suspect, clusters).assign(kind=kind, trait=names)
        for kind, names, decides, has in blocks
    ]
    table = pd.concat(parts, ignore_index=True)
    table = table[table["suspects"] + table["others"] >= 2 * LEAST]
    tested = table[["suspects", "others"]].min(axis=1) >= LEAST
    table["p"] = table["p"].where(tested)
    table["p_adjusted"] = np.nan
    if tested.any():
        table.loc[tested, "p_adjusted"] = false_discovery_control(table.loc[tested, "p"])
    nearest = np.maximum(np.maximum(table["low"], -table["high"]), 0)
    order = table.assign(other=~(table["p_adjusted"] < LEVEL), nearest=-nearest)
    return table.loc[order.sort_values(["other", "nearest", "p"], kind="stable").index, COLUMNS].reset_index(
        drop=True
    )


def rules(traits: pd.DataFrame, rate: NoiseRate) -> pd.Series:
    """Which traits are a rule that most labels follow.

    Flips at a rate eps that are independent of the pair leave at most 1 - eps of the labels to any trait. An
    eps that was estimated lowers the line from ``FOLLOWED``; one that was given may be too high on purpose.
    """
    estimated = rate.identified and not rate.known
    bound = min(FOLLOWED, 1 - rate.low) if estimated else FOLLOWED
    return traits["kind"].isin(["length", "word"]) & (at_least(traits) > bound)


def at_least(traits: pd.DataFrame) -> pd.Series:
    """Share of the labels that go with a trait, or against it, at least."""
    return traits["in_all_low"].clip(lower=1 - traits["in_all_high"])


_Block = tuple[str, Sequence[str], sparse.csr_matrix, sparse.csr_matrix]
"""Kind, V names, and two (N, V) matrices of 0 and 1: pairs that a trait decides, and those that have it."""


def _lengths(chosen: Sequence[str], rejected: Sequence[str]) -> _Block:
    more = np.array([len(a.strip()) - len(b.strip()) for a, b in zip(chosen, rejected, strict=True)])
    return "length", ["longer"], _column(more != 0), _column(more > 0)


def _words(chosen: Sequence[str], rejected: Sequence[str]) -> _Block:
    # Whatever decides enough pairs is in as many responses.
    counter = CountVectorizer(binary=True, token_pattern=r"(?u)\b\w+\b", min_df=2 * LEAST, dtype=np.int32)
    try:
        there = counter.fit_transform([*chosen, *rejected])
    except ValueError:  # no word is left
        empty = sparse.csr_matrix((len(chosen), 0))
        return "word", [], empty, empty
    first, second = there[: len(chosen)].tocsr(), there[len(chosen) :].tocsr()
    both = first.multiply(second)
    return "word", list(counter.get_feature_names_out()), first + second - 2 * both, first - both


def _groups(pairs: pd.DataFrame) -> Iterator[_Block]:
    for grouping in (name for name in GROUPINGS if name in pairs):
        values = pairs[grouping].astype("string")
        sizes = values.value_counts()
        known = _column(values.notna().to_numpy())
        names = sizes.index[(sizes >= LEAST) & (sizes < sizes.sum())]
        # A group decides all pairs, so a matrix of all groups would be dense.
        for start in range(0, len(names), _BLOCK):
            block = list(names[start : start + _BLOCK])
            has = values.to_numpy()[:, None] == np.array(block, dtype=object)
            decides = sparse.hstack([known] * len(block), "csr")
            yield grouping, block, decides, sparse.csr_matrix(has, dtype=int)


def _column(values: np.ndarray) -> sparse.csr_matrix:
    return sparse.csr_matrix(values.astype(np.int32)[:, None])


def _compared(
    decides: sparse.csr_matrix, has: sparse.csr_matrix, suspect: np.ndarray, clusters: np.ndarray
) -> pd.DataFrame:
    """Shares, interval and p of V traits.

    With z = 1 for suspects and y = 1 for pairs that have the trait, the score (z - mean z)(y - mean y) of
    pairs of one prompt is summed; where the trait is independent of suspicion these sums have mean 0. Their
    variance is the sum of their squares, and no less than that of independent pairs: of rare traits the
    squares tell too little.
    """
    by_prompt = sparse.csr_matrix((np.ones(len(clusters)), (clusters, np.arange(len(clusters)))))
    only = sparse.diags(suspect.astype(float))
    n, y = by_prompt @ decides, by_prompt @ has
    z, zy = by_prompt @ only @ decides, by_prompt @ only @ has
    total, suspects, with_trait, both = (np.asarray(m.sum(0)).ravel() for m in (n, z, y, zy))
    others = total - suspects
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_z, mean_y = suspects / total, with_trait / total
        shares = both / suspects, (with_trait - both) / others
        scores = zy - y.multiply(mean_z) - z.multiply(mean_y) + n.multiply(mean_z * mean_y)
        independent = total * mean_z * (1 - mean_z) * mean_y * (1 - mean_y)
        variance = np.maximum(_squares(scores), independent)
        statistic = np.asarray(scores.sum(0)).ravel() / np.sqrt(variance)
        prompts = np.asarray((n > 0).sum(0)).ravel()
        p = 2 * t.sf(np.abs(statistic), np.maximum(prompts - 1, 1))
        residuals = [
            zy - z.multiply(shares[0]),
            (y - zy) - (n - z).multiply(shares[1]),
            y - n.multiply(mean_y),
        ]
        squares = [_squares(residual) for residual in residuals]
        (low_1, high_1), (low_2, high_2), (low_all, high_all) = (
            _wilson(share, size, square, prompts)
            for share, size, square in zip((*shares, mean_y), (suspects, others, total), squares, strict=True)
        )
        # Suspects and others of one prompt go together where all of its pairs are of one group.
        together = np.asarray(residuals[0].multiply(residuals[1]).sum(0)).ravel()
        correlation = np.nan_to_num(together / np.sqrt(squares[0] * squares[1]))
    difference = shares[0] - shares[1]
    # Newcombe's interval of a difference, out of those of both shares and their correlation.
    low = difference - _hypotenuse(shares[0] - low_1, high_2 - shares[1], correlation)
    high = difference + _hypotenuse(high_1 - shares[0], shares[1] - low_2, correlation)
    return pd.DataFrame(
        {
            "suspects": suspects.astype(int),
            "others": others.astype(int),
            "in_suspects": shares[0],
            "in_others": shares[1],
            "difference": difference,
            "low": np.clip(low, -1, 1),
            "high": np.clip(high, -1, 1),
            "p": np.where(np.isfinite(p), p, 1.0),
            "in_all": mean_y,
            "in_all_low": low_all,
            "in_all_high": high_all,
        }
    )


def _hypotenuse(a: np.ndarray, b: np.ndarray, correlation: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(a**2 + b**2 - 2 * correlation * a * b, 0))


def _squares(sums: sparse.spmatrix) -> np.ndarray:
    return np.asarray(sums.multiply(sums).sum(0)).ravel()


def _wilson(
    share: np.ndarray, size: np.ndarray, squares: np.ndarray, prompts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's 95% interval of a share, with as many pairs as would have the variance over prompts."""
    ratio = squares / (size * share * (1 - share)) * prompts / (prompts - 1)
    # Where all pairs agree there is no variance, and each prompt counts once.
    n = np.where((share > 0) & (share < 1), size / np.fmax(ratio, 1.0), np.minimum(size, prompts))
    z = norm.ppf(0.975)
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return middle - half, middle + half
