"""The standard error of a mean over pairs that share prompts."""

from __future__ import annotations

import math

import numpy as np


def clustered_standard_error(values: np.ndarray, clusters: np.ndarray) -> float:
    """Standard error of a mean of values that may depend on each other within clusters: pairs of a prompt.

    sqrt(G / (G - 1) * sum over clusters of (sum of the cluster's deviations from the mean)^2) / N. Where each
    of N values of 0 or 1 is a cluster, that is the binomial sqrt(p (1 - p) / (N - 1)).

    Args:
        values: (N,) floats.
        clusters: (N,) numbers of the G clusters that they belong to, from 0 on; numbers may be missing.

    Returns:
        NaN for fewer than two clusters.
    """
    sums = np.bincount(clusters, values - values.mean()) if len(values) else np.zeros(0)
    count = len(np.unique(clusters))
    if count < 2:
        return math.nan
    return math.sqrt(count / (count - 1) * np.square(sums).sum()) / len(values)
