"""Traits that suspected label errors have in common: length and single words.

A policy that has learned a shortcut of the labellers ranks the pairs that break it first, which u alone
cannot show. Real quality looks the same, but nearly all labels follow a shortcut.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import sparse
from scipy.stats import false_discovery_control, norm, t
from sklearn.feature_extraction.text import CountVectorizer

from .agreement import Agreement

LEVEL = 0.05
"""False discovery rate of the traits that are reported."""
LEAST = 10
"""Suspected and other pairs that must differ in a trait for its test; twice that for its listing."""
FOLLOWED = 0.75
"""Fraction of labels that follow a shortcut; clean ones of the synthetic benchmark stay below it."""
COLUMNS = [
    *("kind", "trait", "suspected", "others", "in_suspected", "in_others", "p", "p_adjusted"),
    *("in_all", "in_all_low", "in_all_high"),
]


def suspect_traits(
    pairs: pd.DataFrame, suspect: np.ndarray, chosen: Sequence[str], rejected: Sequence[str]
) -> pd.DataFrame:
    """Compare (N,) suspected with other pairs, trait by trait: one row per trait, the clearest first.

    Pairs differ in a word if only one response has it, and in length if one response is longer. Prompts are
    the independent units, and p is adjusted by Benjamini and Hochberg.

    Columns: ``kind`` ("length" or "word"), ``trait``, ``suspected`` and ``others`` (pairs that differ in it),
    ``in_suspected`` and ``in_others`` (fractions whose chosen response has it), ``p``, ``p_adjusted`` (NaN
    below ``LEAST``), and ``in_all`` with 95% interval ``in_all_low`` to ``in_all_high``.
    """
    clusters = pd.factorize(pairs["prompt"])[0]
    blocks = [_lengths(chosen, rejected), _words(chosen, rejected)]
    parts = [
        _compared(decides, has, suspect, clusters).assign(kind=kind, trait=names)
        for kind, names, decides, has in blocks
    ]
    table = pd.concat(parts, ignore_index=True)
    table = table[table["suspected"] + table["others"] >= 2 * LEAST]
    tested = table[["suspected", "others"]].min(axis=1) >= LEAST
    table["p"] = table["p"].where(tested)
    table["p_adjusted"] = np.nan
    if tested.any():
        table.loc[tested, "p_adjusted"] = false_discovery_control(table.loc[tested, "p"])
    return table.sort_values("p", kind="stable", ignore_index=True)[COLUMNS]


def label_rules(traits: pd.DataFrame, found: Agreement) -> pd.Series:
    """Return a mask of the traits that most labels follow.

    With independent label errors at most 1 - eps of the labels follow a trait; a given eps may be too high on
    purpose, so it is not used.
    """
    estimated = found.identified and not found.known
    bound = min(FOLLOWED, 1 - found.low) if estimated else FOLLOWED
    return at_least(traits) > bound


def at_least(traits: pd.DataFrame) -> pd.Series:
    """Return the lower bound of the fraction of labels that follow a trait or its opposite."""
    return traits["in_all_low"].clip(lower=1 - traits["in_all_high"])


_Block = tuple[str, Sequence[str], sparse.csr_matrix, sparse.csr_matrix]
"""Kind, V names, and two (N, V) 0/1 matrices: pairs that differ in a trait, and chosen ones with it."""


def _lengths(chosen: Sequence[str], rejected: Sequence[str]) -> _Block:
    more = np.array([len(a.strip()) - len(b.strip()) for a, b in zip(chosen, rejected, strict=True)])
    return "length", ["longer"], _column(more != 0), _column(more > 0)


def _words(chosen: Sequence[str], rejected: Sequence[str]) -> _Block:
    counter = CountVectorizer(binary=True, token_pattern=r"(?u)\b\w+\b", min_df=2 * LEAST, dtype=np.int32)
    try:
        there = counter.fit_transform([*chosen, *rejected])
    except ValueError:
        empty = sparse.csr_matrix((len(chosen), 0))
        return "word", [], empty, empty
    first, second = there[: len(chosen)].tocsr(), there[len(chosen) :].tocsr()
    both = first.multiply(second)
    return "word", list(counter.get_feature_names_out()), first + second - 2 * both, first - both


def _column(values: np.ndarray) -> sparse.csr_matrix:
    return sparse.csr_matrix(values.astype(np.int32)[:, None])


def _compared(
    decides: sparse.csr_matrix, has: sparse.csr_matrix, suspect: np.ndarray, clusters: np.ndarray
) -> pd.DataFrame:
    """Fractions and p of V traits, and intervals over all pairs.

    Scores (z - mean z)(y - mean y), z = 1 for suspected and y = 1 for pairs with the trait, are summed over
    prompts. Their variance is the sum of squares, at least that of independent pairs, since rare traits have
    few squares.
    """
    by_prompt = sparse.csr_matrix((np.ones(len(clusters)), (clusters, np.arange(len(clusters)))))
    only = sparse.diags(suspect.astype(float))
    n, y = by_prompt @ decides, by_prompt @ has
    z, zy = by_prompt @ only @ decides, by_prompt @ only @ has
    total, suspected, with_trait, both = (np.asarray(m.sum(0)).ravel() for m in (n, z, y, zy))
    others, prompts = total - suspected, np.asarray((n > 0).sum(0)).ravel()
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_z, mean_y = suspected / total, with_trait / total
        scores = zy - y.multiply(mean_z) - z.multiply(mean_y) + n.multiply(mean_z * mean_y)
        independent = total * mean_z * (1 - mean_z) * mean_y * (1 - mean_y)
        statistic = np.asarray(scores.sum(0)).ravel() / np.sqrt(np.maximum(_squares(scores), independent))
        p = 2 * t.sf(np.abs(statistic), np.maximum(prompts - 1, 1))
        low, high = _wilson(mean_y, total, _squares(y - n.multiply(mean_y)), prompts)
        return pd.DataFrame(
            {
                "suspected": suspected.astype(int),
                "others": others.astype(int),
                "in_suspected": both / suspected,
                "in_others": (with_trait - both) / others,
                "p": np.where(np.isfinite(p), p, 1.0),
                "in_all": mean_y,
                "in_all_low": low,
                "in_all_high": high,
            }
        )


def _squares(sums: sparse.spmatrix) -> np.ndarray:
    return np.asarray(sums.multiply(sums).sum(0)).ravel()


def _wilson(
    share: np.ndarray, size: np.ndarray, squares: np.ndarray, prompts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's 95% interval of a fraction, for the effective number of pairs over prompts."""
    ratio = squares / (size * share * (1 - share)) * prompts / (prompts - 1)
    # Without variance each prompt counts once.
    n = np.where((share > 0) & (share < 1), size / np.fmax(ratio, 1.0), np.minimum(size, prompts))
    z = norm.ppf(0.975)
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return middle - half, middle + half
