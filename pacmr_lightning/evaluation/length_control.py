"""The win rate that would be seen if both models' responses had the same length."""

from __future__ import annotations

import numpy as np
from scipy.special import expit

SLOPE_C = 100.0
"""Inverse strength of the L2 penalty on the slope, phi^2 / (2 C): next to nothing where there is data, but
finite where length alone decides every verdict."""
TOLERANCE, ITERATIONS = 1e-9, 200
"""A fit is done when no coefficient moves further than the first, or after so many Newton steps."""
AT_A_TIME = 1_000_000
"""Numbers in one array of a fit."""


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
    parts = np.array_split(counts, -(-counts.size // AT_A_TIME))
    return np.concatenate([_rates(outcomes, term, part.astype(float)) for part in parts])


def _rates(outcomes: np.ndarray, term: np.ndarray, counts: np.ndarray) -> np.ndarray:
    # Where all win or all lose, no finite theta has the highest likelihood.
    means = counts @ outcomes / counts.sum(1)
    mixed = (means > 0) & (means < 1)
    means[mixed] = expit(_intercepts(outcomes, term, counts[mixed]))
    return means


def _intercepts(outcomes: np.ndarray, term: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """theta of each of R samples, by Newton's method with steps that are halved until the loss falls."""
    theta, phi = np.zeros((2, len(counts)))

    def loss_at(theta: np.ndarray, phi: np.ndarray) -> np.ndarray:
        score = theta[:, None] + phi[:, None] * term
        return (counts * (np.logaddexp(0, score) - outcomes * score)).sum(1) + phi**2 / (2 * SLOPE_C)

    loss = loss_at(theta, phi)
    for _ in range(ITERATIONS):
        p = expit(theta[:, None] + phi[:, None] * term)
        residual, curvature = counts * (p - outcomes), counts * p * (1 - p)
        g, h = residual.sum(1), residual @ term + phi / SLOPE_C
        a, b, c = curvature.sum(1), curvature @ term, curvature @ term**2 + 1 / SLOPE_C
        step = np.stack([c * g - b * h, a * h - b * g]) / (a * c - b * b)
        for _ in range(60):
            new = loss_at(theta - step[0], phi - step[1])
            # Up to rounding, of which there is nothing else at the end.
            worse = new > loss + 1e-12 * np.abs(loss)
            if not worse.any():
                break
            step[:, worse] /= 2
        theta, phi, loss = theta - step[0], phi - step[1], new
        if np.abs(step).max(initial=0) < TOLERANCE:
            break
    return theta
