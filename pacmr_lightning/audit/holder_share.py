"""The share of wrong labels by Hölder-DPO's estimator: a second opinion.

With p = sigmoid(u) of N pairs in the order of their labels it is 1 - mean(p) mean(p^g) / mean(p^(1 + g))
(arXiv 2505.17859, appendix F.3, g = 2). The idea: right labels are a draw from the model p / (N mean(p)) of
the pairs, wrong ones are draws that this model holds for impossible; then the density power divergence is
least at the scale xi = mean(p) mean(p^g) / mean(p^(1 + g)) of the model, the share of right labels.

So it is exact where p is one constant for right labels and 0 for wrong ones. In general it is
cov(p, p^g) / mean(p^(1 + g)): how unequal p is, whatever it comes from. It is 0 for a policy that tells
nothing, however many labels are wrong; it also grows where the margins of right labels differ, and where
labels, drawn from a preference as Bradley and Terry have it, are against the better response by chance. Of a
policy that knows these log-odds, which have a standard deviation of s nats, it makes (10^6 pairs):

=====  =====  =====  =====  =====
flips     0%    20%    30%    40%
=====  =====  =====  =====  =====
s 0.3   3.8%   3.9%   4.0%   4.0%
s 1    15.3%  18.5%  20.0%  21.5%
s 3    13.3%  24.6%  30.2%  35.6%
s 10    5.1%  22.1%  30.7%  39.2%
=====  =====  =====  =====  =====

(Its paper too sees it saturate above 20%, section 5.1.)
"""

from __future__ import annotations

import numpy as np
from scipy.special import log_expit

GAMMA = 2.0
"""The paper's g."""


def holder_share(u: np.ndarray) -> float:
    """The estimate, in [0, 1).

    Args:
        u: (N,) implicit reward differences in the order of the labels, finite; N at least 1.
    """
    logs = log_expit(u)
    p = np.exp(logs - logs.max())  # a factor changes nothing; this one keeps 0 / 0 away
    # Never below 0, but for rounding: of two means of what grows with u (Chebyshev's sum inequality).
    return max(0.0, float(1 - p.mean() * (p**GAMMA).mean() / (p ** (1 + GAMMA)).mean()))
