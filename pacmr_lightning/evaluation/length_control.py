"""The win rate that would be seen if both models' responses had the same length."""

from __future__ import annotations

import numpy as np
from sklearn.linear_model import LogisticRegression

SLOPE_C = 100.0
"""Inverse strength of the L2 penalty on the slope, phi^2 / (2 C): next to nothing where there is data, but
finite where length alone decides every verdict."""
TOLERANCE, ITERATIONS = 1e-9, 1000
"""Scikit-learn's own 1e-4 leaves the rate wrong in its third digit where samples are small."""


def length_term(differences: np.ndarray) -> np.ndarray | None:
    """tanh(d / s), with the sample standard deviation s of the (N,) differences in length d, uncentred.

    None where all differences are the same, so that length cannot be told from the rest.
    """
    if len(differences) < 2 or np.ptp(differences) == 0:
        return None
    return np.tanh(differences / differences.std(ddof=1))


def rates_at_equal_length(outcomes: np.ndarray, term: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The length-controlled win rate, in which a tie is half a win, of R samples.

    The logistic regression of length-controlled AlpacaEval (Dubois et al. 2024, arXiv 2404.04475) for two
    models: P(first wins) = sigmoid(theta + phi tanh(d / s)), fitted to the outcomes by maximum likelihood;
    the result is sigmoid(theta), the probability at d = 0. Left out is what needs verdicts on many other
    models: the difficulty of each prompt. AlpacaEval's code also adds verdicts on two variants of its
    baseline, at a weight of 0.2, and penalizes all coefficients by their L1 norm; here phi has the weak L2
    penalty of ``SLOPE_C`` and theta none.

    Args:
        outcomes: (N,) 1 where the first response wins, 0 where the second one does, 0.5 for a tie.
        term: (N,) as ``length_term`` makes it.
        counts: (R, N) how often each sample holds each pair.

    Returns:
        (R,) rates.
    """
    different, which = np.unique(counts, axis=0, return_inverse=True)  # few, where there are few pairs
    return np.array([_rate(outcomes, term, count) for count in different])[which.reshape(-1)]


def _rate(outcomes: np.ndarray, term: np.ndarray, count: np.ndarray) -> float:
    wins, losses = count * outcomes, count * (1 - outcomes)
    # Where all win or all lose, no finite theta has the highest likelihood.
    if not wins.any() or not losses.any():
        return float(wins.any())
    # Of scikit-learn's solvers the one that also ends, and ends exactly, where length decides every verdict.
    model = LogisticRegression(C=SLOPE_C, solver="newton-cg", tol=TOLERANCE, max_iter=ITERATIONS)
    won = np.repeat([True, False], len(term))
    model.fit(np.tile(term, 2)[:, None], won, sample_weight=np.concatenate([wins, losses]))
    return model.predict_proba([[0.0]])[0, 1]
