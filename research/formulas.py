"""Sections 3 and 4 and appendices B to D of Qu et al. as functions of pairs z = (x, y_a, y_b).

Arguments are float32 or float64 tensors that broadcast against each other, one entry per pair; rates may be
numbers. Label 0: y_a is better. Everything is differentiable, in a rate where it is above 0. The names:

    u               implicit reward difference, y_a's less y_b's, in nats
    eta             P(Y = 0 | z) of the clean label, in (0, 1)
    q               P(observed label = 0 | z), in (0, 1)
    s               logit(eta), the clean preference strength in nats, finite
    eps0, eps1      P(observed 1 | Y = 0, z) and P(observed 0 | Y = 1, z), in [0, 1). Their sum may reach 1:
                    the formulas hold, though such labels are uninformative (1) or inverted (above 1)
    g_plus, g_minus weights g+ and g- of a pair whose observed label is 0 and 1, above 0
    rho0            scale of the oracle weights, in (0, min(1 - eps0, 1 - eps1)); their ratio is free of it
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pacmr_lightning.weighting.oracle import log_noisy_over_clean

_FAR = 40.0  # e^40 / (1 - eps) fits float32; beyond, logaddexp takes over


def dpo_risk(u: Tensor, eta: Tensor) -> Tensor:
    """-eta log sigmoid(u) - (1 - eta) log sigmoid(-u), the risk given z (section 3.2, appendix B).

    With q in place of eta, the risk of unweighted DPO on noisy labels.
    """
    return -eta * F.logsigmoid(u) - (1 - eta) * F.logsigmoid(-u)


def weighted_dpo_risk(u: Tensor, q: Tensor, g_plus: Tensor, g_minus: Tensor) -> Tensor:
    """-q g+ log sigmoid(u) - (1 - q) g- log sigmoid(-u), the risk given z (section 3.3, appendix C)."""
    return -q * g_plus * F.logsigmoid(u) - (1 - q) * g_minus * F.logsigmoid(-u)


def clean_optimum(eta: Tensor) -> Tensor:
    """u* = logit(eta), the one minimum of the clean risk; appendix D's s (section 3.2, appendix B)."""
    return torch.logit(eta)


def noisy_optimum(q: Tensor) -> Tensor:
    """u* = logit(q), where DPO ends on noisy labels (section 3.2, appendix B)."""
    return torch.logit(q)


def weighted_optimum(q: Tensor, g_plus: Tensor, g_minus: Tensor) -> Tensor:
    """u* = logit(q) + log(g+ / g-), the one minimum of the weighted risk (section 3.3, appendix C)."""
    return noisy_optimum(q) + g_plus.log() - g_minus.log()


def noisy_posterior(eta: Tensor, eps0: Tensor | float, eps1: Tensor | float) -> Tensor:
    """q = (1 - eps0) eta + eps1 (1 - eta), the two-rate flipping model (section 4.2, appendix D)."""
    return (1 - eps0) * eta + eps1 * (1 - eta)


def optimal_log_ratio(eta: Tensor, q: Tensor) -> Tensor:
    """log(g+ / g-) = logit(eta) - logit(q) of the optimal weights (section 4.1, theorem 1, appendix C)."""
    return clean_optimum(eta) - noisy_optimum(q)


def two_rate_log_ratio(s: Tensor, eps0: Tensor | float, eps1: Tensor | float) -> Tensor:
    """Theorem 1's log(g+ / g-) under the two-rate model (appendix D).

    It is s + log((eps0 e^s + 1 - eps1) / ((1 - eps0) e^s + eps1)), computed without overflow, and without
    cancellation where it is near 0: at low rates, or near s = 0 under symmetric noise.
    """
    eps0, eps1 = (torch.as_tensor(rate, dtype=s.dtype) for rate in (eps0, eps1))
    plus, minus = log_noisy_over_clean(s, eps0, eps1), log_noisy_over_clean(-s, eps1, eps0)
    # g+ / g- - 1 = [eps0 (1 + e^s) - eps1 (1 + e^-s)] / (1 - eps0 + eps1 e^-s)
    t = s.clamp(-_FAR, _FAR)
    excess = 2 * (eps0 - eps1) + eps0 * torch.expm1(t) - eps1 * torch.expm1(-t)
    return _log1p(excess / (1 - eps0 + eps1 * torch.exp(-t)), s.abs() < _FAR, minus - plus)


def oracle_log_weights(
    s: Tensor, eps0: Tensor | float, eps1: Tensor | float, rho0: Tensor | float
) -> tuple[Tensor, Tensor]:
    """log g+ and log g-, of theorem 1's ratio (appendix D).

    They are importance weights: g+ = rho0 eta / q, at most rho0 / (1 - eps0), and
    g- = rho0 (1 - eta) / (1 - q), at most rho0 / (1 - eps1). Qu et al. write them as sigmoids of
    h+ = s + log rho0 - log(eps1 + k+ e^s) and h- = log rho0 - log(eps0 e^s + k-), where k+ = 1 - eps0 - rho0
    and k- = 1 - eps1 - rho0.
    """
    eps0, eps1, rho0 = (torch.as_tensor(value, dtype=s.dtype) for value in (eps0, eps1, rho0))
    return rho0.log() - log_noisy_over_clean(s, eps0, eps1), rho0.log() - log_noisy_over_clean(-s, eps1, eps0)


def _log1p(x: Tensor, trusted: Tensor, log: Tensor) -> Tensor:
    """log(1 + x): from x where it is exact and below 1/2 in size, else as given."""
    use = trusted & (x.abs() < 0.5)
    return torch.where(use, torch.log1p(torch.where(use, x, 0.0)), log)
