"""Standard error of a mean over pairs that share prompts."""

import math

import numpy as np


def clustered_standard_error(values: np.ndarray, clusters: np.ndarray) -> float:
    """Return the cluster-robust standard error of a mean of (N,) values; NaN for fewer than two clusters.

    sqrt(G / (G - 1) * sum over G clusters of (sum of deviations from the mean)^2) / N.
    """
    sums = np.bincount(clusters, values - values.mean()) if len(values) else np.zeros(0)
    count = len(np.unique(clusters))
    if count < 2:
        return math.nan
    return math.sqrt(count / (count - 1) * np.square(sums).sum()) / len(values)
