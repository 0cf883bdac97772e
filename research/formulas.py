"""The paper's sections 3-4 and appendices B-D as functions, of one pair z = (x, y_a, y_b) or of many.

Arguments are numbers or float32 or float64 tensors that broadcast against each other, one entry a pair; each
result has the broadcast shape and the tensors' dtype, float64 where all arguments are numbers. Label 0 says
that y_a is better. Everything is differentiable, in a rate where it is above 0. The names:

    u               implicit reward difference, y_a's less y_b's, in nats
    eta             P(Y = 0 | z) of the clean label, in (0, 1)
    q               P(observed label = 0 | z), in (0, 1)
    s               logit(eta), the clean preference strength in nats, finite
    eps0, eps1      P(observed 1 | Y = 0, z) and P(observed 0 | Y = 1, z), in [0, 1). Their sum may reach 1:
                    the formulas hold, though such labels say nothing (1) or the opposite (above 1)
    g_plus, g_minus weights g+ and g- of a pair whose observed label is 0 and 1, above 0
    rho0            scale of the oracle weights, in (0, min(1 - eps0, 1 - eps1)); their ratio is free of it

A value out of its range raises UserError.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pacmr_lightning.errors import UserError
from pacmr_lightning.weighting.oracle import log_noisy_over_clean

Value = Tensor | float

_FAR = 40.0  # e^40 / (1 - eps) fits float32; beyond, logaddexp takes over


class Coefficients(NamedTuple):
    """Slopes and offsets with h+ = a+ s + b+ and h- = -a- s + b- (appendix D)."""

    a_plus: Tensor
    """In [0, 1)."""
    a_minus: Tensor
    """In [0, 1)."""
    b_plus: Tensor
    """The same for every s."""
    b_minus: Tensor
    """The same for every s."""


def dpo_risk(u: Value, eta: Value) -> Tensor:
    """-eta log sigmoid(u) - (1 - eta) log sigmoid(-u), the risk given z (section 3.2, appendix B).

    With q in place of eta, the risk of unweighted DPO on noisy labels.
    """
    u, eta = _tensors(u, eta)
    _probability("eta", eta)
    return -eta * F.logsigmoid(u) - (1 - eta) * F.logsigmoid(-u)


def weighted_dpo_risk(u: Value, q: Value, g_plus: Value, g_minus: Value) -> Tensor:
    """-q g+ log sigmoid(u) - (1 - q) g- log sigmoid(-u), the risk given z (section 3.3, appendix C)."""
    u, q, g_plus, g_minus = _tensors(u, q, g_plus, g_minus)
    _probability("q", q)
    _weights(g_plus, g_minus)
    return -q * g_plus * F.logsigmoid(u) - (1 - q) * g_minus * F.logsigmoid(-u)


def clean_optimum(eta: Value) -> Tensor:
    """u* = logit(eta), the one minimum of the clean risk; appendix D's s (section 3.2, appendix B)."""
    (eta,) = _tensors(eta)
    _probability("eta", eta)
    return torch.logit(eta)


def noisy_optimum(q: Value) -> Tensor:
    """u* = logit(q), where DPO ends on noisy labels (section 3.2, appendix B)."""
    (q,) = _tensors(q)
    _probability("q", q)
    return torch.logit(q)


def weighted_optimum(q: Value, g_plus: Value, g_minus: Value) -> Tensor:
    """u* = logit(q) + log(g+ / g-), the one minimum of the weighted risk (section 3.3, appendix C)."""
    q, g_plus, g_minus = _tensors(q, g_plus, g_minus)
    _weights(g_plus, g_minus)
    return noisy_optimum(q) + g_plus.log() - g_minus.log()


def selected_posterior(eta: Value, selected_0: Value, selected_1: Value) -> Tensor:
    """P(Y = 0 | z, selected) by Bayes' rule (section 3.1, proposition 1).

    It is eta where both chances are equal (assumption 1): selection then ignores the label.

    Args:
        eta: P(Y = 0 | z).
        selected_0: P(m = 0 | Y = 0, z), a pair's chance to be selected if its clean label is 0, in (0, 1].
        selected_1: P(m = 0 | Y = 1, z), the same for label 1, in (0, 1].
    """
    eta, selected_0, selected_1 = _tensors(eta, selected_0, selected_1)
    _probability("eta", eta)
    for name, p in (("selected_0", selected_0), ("selected_1", selected_1)):
        _require(name, p, (p > 0) & (p <= 1), "above 0 and at most 1; drop pairs that are never selected")
    zero, one = selected_0 * eta, selected_1 * (1 - eta)
    return zero / (zero + one)


def noisy_posterior(eta: Value, eps0: Value, eps1: Value) -> Tensor:
    """q = (1 - eps0) eta + eps1 (1 - eta), the two-rate flipping model (section 4.2, appendix D)."""
    eta, eps0, eps1 = _tensors(eta, eps0, eps1)
    _probability("eta", eta)
    _rates(eps0, eps1)
    return (1 - eps0) * eta + eps1 * (1 - eta)


def optimal_log_ratio(eta: Value, q: Value) -> Tensor:
    """log(g+ / g-) = logit(eta) - logit(q) of the optimal weights (section 4.1, theorem 1, appendix C)."""
    eta, q = _tensors(eta, q)
    return clean_optimum(eta) - noisy_optimum(q)


def two_rate_log_ratio(s: Value, eps0: Value, eps1: Value) -> Tensor:
    """Theorem 1's log(g+ / g-) under the two-rate model (appendix D).

    It is s + log((eps0 e^s + 1 - eps1) / ((1 - eps0) e^s + eps1)), computed without overflow, and without
    cancellation where it is near 0: at low rates, or near s = 0 under symmetric noise.
    """
    s, eps0, eps1 = _tensors(s, eps0, eps1)
    _finite(s)
    _rates(eps0, eps1)
    plus, minus = log_noisy_over_clean(s, eps0, eps1), log_noisy_over_clean(-s, eps1, eps0)
    # g+ / g- - 1 = [eps0 (1 + e^s) - eps1 (1 + e^-s)] / (1 - eps0 + eps1 e^-s)
    t = s.clamp(-_FAR, _FAR)
    excess = 2 * (eps0 - eps1) + eps0 * torch.expm1(t) - eps1 * torch.expm1(-t)
    return _log1p(excess / (1 - eps0 + eps1 * torch.exp(-t)), s.abs() < _FAR, minus - plus)


def oracle_logits(s: Value, eps0: Value, eps1: Value, rho0: Value) -> tuple[Tensor, Tensor]:
    """h+ and h-, whose sigmoids are weights with theorem 1's ratio (appendix D).

    h+ = s + log rho0 - log(eps1 + k+ e^s) and h- = log rho0 - log(eps0 e^s + k-), where k+ = 1 - eps0 - rho0
    and k- = 1 - eps1 - rho0.
    """
    s, eps0, eps1, rho0, k_plus, k_minus = _construction(s, eps0, eps1, rho0)
    h_plus = rho0.log() - torch.logaddexp(k_plus.log(), eps1.log() - s)
    return h_plus, rho0.log() - torch.logaddexp(k_minus.log(), eps0.log() + s)


def oracle_coefficients(s: Value, eps0: Value, eps1: Value, rho0: Value) -> Coefficients:
    """a+, a-, b+ and b- with h+ = a+ s + b+ and h- = -a- s + b-, also at s = 0 (appendix D).

    The paper's slopes are, with their leading 1 taken into the logarithm,
    a+ = log((k+ + eps1 e^-s) / (k+ + eps1)) / -s and a- = log((k- + eps0 e^s) / (k- + eps0)) / s: the log of
    a mean of e^t over t. At s = 0 they are eps1 / (eps1 + k+) and eps0 / (eps0 + k-), the paper's limits.
    """
    s, eps0, eps1, rho0, k_plus, k_minus = _construction(s, eps0, eps1, rho0)
    return Coefficients(
        _log_mean_exp_slope(-s, eps1, k_plus),
        _log_mean_exp_slope(s, eps0, k_minus),
        rho0.log() - (eps1 + k_plus).log(),
        rho0.log() - (eps0 + k_minus).log(),
    )


def oracle_log_weights(s: Value, eps0: Value, eps1: Value, rho0: Value) -> tuple[Tensor, Tensor]:
    """log g+ and log g-, where g+ = sigmoid(h+) and g- = sigmoid(h-) (appendix D).

    They are importance weights: g+ = rho0 eta / q, at most rho0 / (1 - eps0), and
    g- = rho0 (1 - eta) / (1 - q), at most rho0 / (1 - eps1).
    """
    s, eps0, eps1, rho0, _, _ = _construction(s, eps0, eps1, rho0)
    return rho0.log() - log_noisy_over_clean(s, eps0, eps1), rho0.log() - log_noisy_over_clean(-s, eps1, eps0)


def _log_mean_exp_slope(t: Tensor, eps: Tensor, k: Tensor) -> Tensor:
    """log((k + eps e^t) / (k + eps)) / t, for eps >= 0 and k > 0."""
    w = eps / (k + eps)
    v, d = w * k / (k + eps), 1 - 2 * w
    # Near 0 by the cumulants of a coin, 1 to 6; at |t| = 0.01 the seventh adds less than 1e-16.
    terms = (w, v / 2, v * d / 6, v * (1 - 6 * v) / 24, v * d * (1 - 12 * v) / 120)
    series = v * (1 + v * (120 * v - 30)) / 720
    for term in reversed(terms):
        series = term + t * series
    near = t.abs() < 0.01
    t = torch.where(near, 1.0, t)
    log = torch.logaddexp(k.log(), eps.log() + t) - (k + eps).log()
    return torch.where(near, series, _log1p(w * torch.expm1(t.clamp(max=_FAR)), t < _FAR, log) / t)


def _log1p(x: Tensor, trusted: Tensor, log: Tensor) -> Tensor:
    """log(1 + x): from x where it is trusted and below 1/2 in size, else as given."""
    use = trusted & (x.abs() < 0.5)
    return torch.where(use, torch.log1p(torch.where(use, x, 0.0)), log)


def _tensors(*values: Value) -> tuple[Tensor, ...]:
    """Broadcast tensors of one floating dtype, on the device of the first tensor."""
    given = [v for v in values if isinstance(v, Tensor)]
    dtypes = [v.dtype for v in given if v.is_floating_point()]
    dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float64
    device = given[0].device if given else None
    return torch.broadcast_tensors(*(torch.as_tensor(v, dtype=dtype, device=device) for v in values))


def _construction(*values: Value) -> tuple[Tensor, ...]:
    """s, eps0, eps1, rho0, k+ and k-."""
    s, eps0, eps1, rho0 = _tensors(*values)
    _finite(s)
    _rates(eps0, eps1)
    ok = (rho0 > 0) & (rho0 < 1 - eps0) & (rho0 < 1 - eps1)
    _require("rho0", rho0, ok, "above 0 and below both 1 - eps0 and 1 - eps1")
    return s, eps0, eps1, rho0, 1 - eps0 - rho0, 1 - eps1 - rho0


def _probability(name: str, p: Tensor) -> None:
    _require(name, p, (p > 0) & (p < 1), "above 0 and below 1; clip estimates away from both")


def _rates(eps0: Tensor, eps1: Tensor) -> None:
    for name, rate in (("eps0", eps0), ("eps1", eps1)):
        _require(name, rate, (rate >= 0) & (rate < 1), "at least 0 and below 1; give a share, not per cent")


def _weights(g_plus: Tensor, g_minus: Tensor) -> None:
    for name, g in (("g_plus", g_plus), ("g_minus", g_minus)):
        _require(name, g, (g > 0) & g.isfinite(), "above 0 and finite; floor weights that vanish")


def _finite(s: Tensor) -> None:
    _require("s", s, s.isfinite(), "finite; clip the posterior away from 0 and 1 before taking its logit")


def _require(name: str, value: Tensor, ok: Tensor, needs: str) -> None:
    if not ok.all():
        raise UserError(f"{name} is {value[~ok].flatten()[0].item()}, but it must be {needs}.")
