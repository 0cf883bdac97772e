"""Shortcuts: length and single words that nearly all labels follow.

A policy that has learned a shortcut of the labellers ranks the pairs that break it first, which u alone
cannot show. Real quality looks the same.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import sparse
from scipy.stats import norm
from sklearn.feature_extraction.text import CountVectorizer

LEAST = 20
"""Pairs that must differ in a trait."""
FOLLOWED = 0.75
"""Fraction of labels that follow a shortcut; clean ones of the synthetic benchmark stay below it."""


def shortcuts(prompts: np.ndarray, chosen: Sequence[str], rejected: Sequence[str]) -> pd.DataFrame:
    """Return one row per length or word that more than ``FOLLOWED`` of N labels follow, the surest first.

    Pairs differ in a word if only one response has it, and in length if one response is longer. A label
    follows a trait if the chosen response has it, or in all pairs lacks it; ``FOLLOWED`` is compared with the
    lower end of the 95% interval, for which ``prompts``, (N,) numbers from 0, are the independent units.

    Columns: ``kind`` ("length" or "word"), ``trait`` ("longer" or the word), ``chosen`` ("with" or "without"
    it), ``pairs`` that differ in it, ``share`` of the labels that follow it, and its interval ``low`` to
    ``high``.
    """
    longer = np.array([len(a.strip()) - len(b.strip()) for a, b in zip(chosen, rejected, strict=True)])
    words, there = _words(chosen, rejected)
    first, second = there[: len(chosen)], there[len(chosen) :]
    both = first.multiply(second)
    differ = sparse.hstack([_column(longer != 0), first + second - 2 * both]).tocsr()
    has = sparse.hstack([_column(longer > 0), first - both]).tocsr()
    by_prompt = sparse.csr_matrix((np.ones(len(prompts)), (prompts, np.arange(len(prompts)))))
    n, y = by_prompt @ differ, by_prompt @ has
    pairs, with_it, clusters = (np.asarray(m.sum(0)).ravel() for m in (n, y, n > 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = with_it / pairs
        deviations = y - n.multiply(share)
        squares = np.asarray(deviations.multiply(deviations).sum(0)).ravel()
        low, high = _wilson(share, pairs, squares, clusters)
    turned = share < 0.5
    table = pd.DataFrame(
        {
            "kind": ["length", *["word"] * len(words)],
            "trait": ["longer", *words],
            "chosen": np.where(turned, "without", "with"),
            "pairs": pairs.astype(int),
            "share": np.where(turned, 1 - share, share),
            "low": np.where(turned, 1 - high, low),
            "high": np.where(turned, 1 - low, high),
        }
    )
    followed = table[(table["pairs"] >= LEAST) & (table["low"] > FOLLOWED)]
    return followed.sort_values("low", ascending=False, kind="stable", ignore_index=True)


def _words(chosen: Sequence[str], rejected: Sequence[str]) -> tuple[list[str], sparse.csr_matrix]:
    """Return V words, and (2 N, V) 0/1 of chosen, then of rejected responses with them."""
    counter = CountVectorizer(binary=True, token_pattern=r"(?u)\b\w+\b", min_df=LEAST, dtype=np.int32)
    try:
        there = counter.fit_transform([*chosen, *rejected])
    except ValueError:  # no word is frequent enough
        return [], sparse.csr_matrix((2 * len(chosen), 0), dtype=np.int32)
    return list(counter.get_feature_names_out()), there.tocsr()


def _column(values: np.ndarray) -> sparse.csr_matrix:
    return sparse.csr_matrix(values.astype(np.int32)[:, None])


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
