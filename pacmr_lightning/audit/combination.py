"""A score learned from decisions by hand: u combined with two differences that no label has changed.

On the decided pairs

    logit P(the label is right) = b + w . z,   b = logit(1 - eps),

z being u, the reference's log-probability of chosen minus rejected, and the difference of their lengths, each
divided by its root mean square. w and b are the maximum a posteriori under Gaussian priors around u alone. b
does not change the ranking, but without it w would be wrong for pairs that were selected by their score.
"""

from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import expit, log_expit, logit

from ..datamodules.tokenized_pairs import as_trained, part_lengths

VIEWS = ("reference_difference", "length_difference")
"""Columns that join u: nats and tokens, chosen minus rejected as trained."""
ENOUGH = 30
"""Decided pairs below which the priors would decide."""
_PRIOR = np.array([1.0, 0.0, 0.0, logit(0.75)])
"""Means of w and b."""
_SPREAD = np.array([0.3, 0.3, 0.3, 1.0])
"""Standard deviations; larger ones gain more if the differences know something, and lose more if not."""


def views(pairs: Any, reference: np.ndarray) -> pd.DataFrame:
    """Return ``VIEWS`` of N ``TokenizedPairs`` from their (N, 2) reference log-probabilities."""
    chosen, rejected = part_lengths(pairs.rows, "chosen_ids", "rejected_ids")
    lengths = as_trained({"chosen": chosen, "rejected": rejected}, pairs.swapped)
    longer = np.subtract(lengths["chosen"], lengths["rejected"])
    differences = np.stack([reference[:, 0] - reference[:, 1], longer], axis=1, dtype=np.float64)
    return pd.DataFrame(differences, columns=list(VIEWS))


def combined_score(u: np.ndarray, others: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (N,) log-odds w . z of (N,) u and (N, 2) ``others``, and w.

    ``truth`` is (N,): 1 for labels that were decided to be right, -1 for wrong, 0 for neither.
    """
    z = np.column_stack([u, others])
    z = z / np.maximum(np.sqrt(np.mean(z**2, axis=0)), np.finfo(float).tiny)
    decided = truth != 0
    sides = truth[decided]
    rows = np.column_stack([z[decided], np.ones(decided.sum())])

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        margins, away = sides * (rows @ parameters), (parameters - _PRIOR) / _SPREAD
        gradient = -rows.T @ (sides * expit(-margins)) + away / _SPREAD
        return away @ away / 2 - log_expit(margins).sum(), gradient

    w = minimize(loss, _PRIOR, jac=True, method="L-BFGS-B").x[:-1]
    return z @ w, w
