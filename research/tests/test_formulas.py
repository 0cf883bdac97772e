"""Theorem 1 and appendix D against numeric minima and against the paper's formulas in 360 digits."""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import pytest
import torch
import torch.nn.functional as F

from research import formulas

DIGITS = 360  # the paper's a- at s = 1e-300 loses 300 of them
ETAS = [0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98]
EPSILONS = [0.0, 0.05, 0.2, 0.45, 0.6]  # 0.6 + 0.45: labels that say the opposite
NAMES = ["log_ratio", "log_g_plus", "log_g_minus"]
CONSTRUCTIONS = [(0.0, 0.0, 0.5), (0.0, 0.3, 0.2), (0.3, 0.0, 0.65), (0.2, 0.2, 0.4), (0.4, 0.1, 0.59)]
CONSTRUCTIONS += [(1e-12, 0.05, 0.9), (0.45, 0.45, 0.001), (0.95, 0.02, 0.04), (0.6, 0.7, 0.1)]
SIZES = [1e-300, 1e-12, 9.9e-7, 4e-3, 0.00999, 0.01001, 0.05, 0.3, 1.0, 5.0, 20.0, 39.9, 40.1, 50.5, 700.0]
STRENGTHS = [0.0, *SIZES, *(-s for s in SIZES)]


def double(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def grid() -> tuple[torch.Tensor, ...]:
    """eta, eps0, eps1 and rho0 (three shares of its bound) of all combinations."""
    points = torch.cartesian_prod(
        double(*ETAS), double(*EPSILONS), double(*EPSILONS), double(0.05, 0.5, 0.95)
    )
    eta, eps0, eps1, share = points.unbind(1)
    return eta, eps0, eps1, share * torch.minimum(1 - eps0, 1 - eps1)


def minimum(risk: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Bisects the derivative, by autograd, of a function convex in each entry, from -60 to 60."""
    low, high = torch.full_like(like, -60.0), torch.full_like(like, 60.0)
    for _ in range(70):
        middle = ((low + high) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(risk(middle).sum(), middle)
        middle = middle.detach()
        low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
    return (low + high) / 2


def paper(s: Decimal, eps0: float, eps1: float, rho0: float) -> dict[str, Decimal]:
    """Appendix D as printed: weights as sigmoids of h+ and h-."""
    e0, e1, rho, exp = Decimal(eps0), Decimal(eps1), Decimal(rho0), s.exp()
    k_plus, k_minus = 1 - e0 - rho, 1 - e1 - rho
    h_plus = s + rho.ln() - (e1 + k_plus * exp).ln()
    h_minus = rho.ln() - (e0 * exp + k_minus).ln()
    log_ratio = (exp * (e0 * exp + 1 - e1) / ((1 - e0) * exp + e1)).ln()
    return dict(zip(NAMES, [log_ratio, *(-(1 + (-h).exp()).ln() for h in (h_plus, h_minus))], strict=True))


def found(s, eps0, eps1, rho0) -> dict[str, torch.Tensor]:
    """What the module says of the same."""
    log_ratio = formulas.two_rate_log_ratio(s, eps0, eps1)
    return dict(zip(NAMES, [log_ratio, *formulas.oracle_log_weights(s, eps0, eps1, rho0)], strict=True))


# --- Sections 3 and 4.1 ---------------------------------------------------------------------------


def test_clean_and_noisy_optima():
    """DPO's risk is smallest at logit(eta), on noisy labels at logit(q).

    At eta = 0.9 and two rates of 0.2, q is 0.74: log 9 = 2.20 becomes log(0.74 / 0.26) = 1.05.
    """
    eta, eps0, eps1, _ = grid()
    q = formulas.noisy_posterior(eta, eps0, eps1)
    clean, noisy = formulas.clean_optimum(eta), formulas.noisy_optimum(q)
    assert (minimum(lambda u: formulas.dpo_risk(u, eta), eta) - clean).abs().max() < 1e-9
    assert (minimum(lambda u: formulas.dpo_risk(u, q), eta) - noisy).abs().max() < 1e-9
    at = (eps0 == 0.2) & (eps1 == 0.2) & (eta == 0.9)
    assert (noisy - clean)[at].tolist() == pytest.approx([math.log(0.74 / 0.26) - math.log(9)] * 3)


def test_risks_by_hand():
    """At u = log 3, sigmoid(u) is 3/4 and sigmoid(-u) is 1/4: 0.6 log(4/3) + 0.4 log 4.

    At u = -800, where sigmoid(u) is 0 in floating point, the losses of the two labels are 800 and 0.
    """
    log_3 = math.log(3)
    first, second = 0.6 * math.log(4 / 3), 0.4 * math.log(4)
    assert float(formulas.dpo_risk(double(log_3), 0.6)) == pytest.approx(first + second, rel=1e-14)
    weighted = formulas.weighted_dpo_risk(double(log_3), 0.6, 0.5, 0.25)
    assert float(weighted) == pytest.approx(0.5 * first + 0.25 * second, rel=1e-14)
    assert float(formulas.dpo_risk(double(-800.0), 0.6)) == pytest.approx(480, rel=1e-14)
    assert float(formulas.weighted_dpo_risk(double(-800.0), 0.6, 0.5, 0.25)) == pytest.approx(240, rel=1e-14)


def test_noisy_posterior_counts_labels():
    """Of 1000 pairs with eta = 0.7 and rates 0.1 and 0.4, 630 zeros kept and 120 ones flipped read 0."""
    assert float(formulas.noisy_posterior(0.7, 0.1, 0.4)) == pytest.approx(0.75, rel=1e-14)


def test_weighted_optimum():
    """For weights of any ratio, not only the optimal one."""
    q, g_plus, g_minus = torch.cartesian_prod(
        double(0.1, 0.5, 0.8), double(1e-3, 0.3, 2.0), double(1e-3, 0.7, 5.0)
    ).unbind(1)
    expected = minimum(lambda u: formulas.weighted_dpo_risk(u, q, g_plus, g_minus), q)
    assert (formulas.weighted_optimum(q, g_plus, g_minus) - expected).abs().max() < 1e-9


def test_theorem_1():
    """Appendix D's weights move the minimum on noisy labels to logit(eta), whatever rho0 and the rates."""
    eta, eps0, eps1, rho0 = grid()
    q = formulas.noisy_posterior(eta, eps0, eps1)
    s = formulas.clean_optimum(eta)
    g_plus, g_minus = (log_g.exp() for log_g in formulas.oracle_log_weights(s, eps0, eps1, rho0))
    u = minimum(lambda u: formulas.weighted_dpo_risk(u, q, g_plus, g_minus), eta)
    assert (u - s).abs().max() < 1e-9
    torch.testing.assert_close(formulas.weighted_optimum(q, g_plus, g_minus), s, rtol=0, atol=1e-12)
    for ratio in (formulas.optimal_log_ratio(eta, q), formulas.two_rate_log_ratio(s, eps0, eps1)):
        torch.testing.assert_close(ratio, g_plus.log() - g_minus.log(), rtol=0, atol=1e-12)


def test_the_outer_level_chooses_the_optimal_ratio():
    """Numeric minimum, over log(g+ / g-), of the clean risk at the inner optimum: the bilevel problem itself.

    The inner optimum is differentiated through its closed form, which test_weighted_optimum checks.
    """
    eta, eps0, eps1, _ = grid()
    q = formulas.noisy_posterior(eta, eps0, eps1)
    one = torch.ones_like(q)
    ratio = minimum(lambda r: formulas.dpo_risk(formulas.weighted_optimum(q, r.exp(), one), eta), eta)
    assert (ratio - formulas.optimal_log_ratio(eta, q)).abs().max() < 1e-9


# --- Appendix D -----------------------------------------------------------------------------------


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_values(construction):
    """Each against the formula as printed in the paper."""
    values = found(double(*STRENGTHS), *construction)
    with localcontext() as context:
        context.prec = DIGITS
        exact = [paper(Decimal(s), *construction) for s in STRENGTHS]
    for name in NAMES:
        expected = double(*(float(e[name]) for e in exact))
        torch.testing.assert_close(
            values[name], expected, rtol=1e-14, atol=3e-15, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_derivatives_in_s(construction):
    """Also at 0, beside it and far out, against central differences of the paper's formulas.

    The step is 1e-30 and its square the error; of 130 digits, the difference and the slopes' division by s,
    which is 1e-30 next to s = 0, cost 30 each.
    """
    strengths = [s for s in STRENGTHS if s == 0 or abs(s) > 1e-100]
    s = double(*strengths).requires_grad_()
    values = found(s, *construction)
    step = Decimal("1e-30")
    with localcontext() as context:
        context.prec = 130
        points = [[paper(Decimal(x) + d, *construction) for d in (step, -step)] for x in strengths]
        exact = {n: [float((up[n] - down[n]) / (2 * step)) for up, down in points] for n in NAMES}
    for name in NAMES:
        (slope,) = torch.autograd.grad(values[name].sum(), s, retain_graph=True)
        torch.testing.assert_close(
            slope, double(*exact[name]), rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "rates", [(0.0, 0.0), (0.2, 0.2), (0.0, 0.3), (0.4, 0.0), (1e-10, 3e-10), (1e-25, 1e-24), (0.3, 0.999)]
)
def test_log_ratio_keeps_its_digits(rates):
    """Relative accuracy, also where the ratio is nearly 1, and no overflow up to |s| = 1000."""
    strengths = [*STRENGTHS, 1000.0, -1000.0, 2.5, -2.5, 1e-5]
    with localcontext() as context:
        context.prec = DIGITS
        expected = double(*(float(paper(Decimal(s), *rates, 1e-4)["log_ratio"]) for s in strengths))
    torch.testing.assert_close(
        formulas.two_rate_log_ratio(double(*strengths), *rates), expected, rtol=1e-13, atol=0
    )


# --- A sigmoid of u as the weight -----------------------------------------------------------------


def weighted_step(u, q, offset):
    """The weighted optimum with weights sigmoid(u + offset) and sigmoid(-u + offset), at the current u."""
    return formulas.noisy_optimum(q) + F.logsigmoid(u + offset) - F.logsigmoid(-u + offset)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.2, 0.3, 0.4, 0.49])
def test_shifted_sigmoid_is_optimal_under_symmetric_noise(rate):
    """sigmoid(s + logit(1 - e)) = (1 - e) e^s / (e + (1 - e) e^s) = (1 - e) eta / q.

    With -s for s it is (1 - e)(1 - eta) / (1 - q). These are appendix D's g+ and g- with rho0 at its bound
    1 - e, approached here to a share of 1e-12; the ratio is theorem 1's.
    """
    s = double(*STRENGTHS)
    offset = math.log((1 - rate) / rate)
    log_g = F.logsigmoid(s + offset), F.logsigmoid(-s + offset)
    expected = formulas.two_rate_log_ratio(s, rate, rate)
    torch.testing.assert_close(log_g[0] - log_g[1], expected, rtol=1e-13, atol=1e-13)
    for log, oracle in zip(
        log_g, formulas.oracle_log_weights(s, rate, rate, (1 - rate) * (1 - 1e-12)), strict=True
    ):
        torch.testing.assert_close(log, oracle, rtol=1e-11, atol=2e-12)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.4])
def test_shifted_sigmoid_has_a_stable_fixed_point(rate):
    """Weights at the current u, not at the unknown s, still lead to s, from anywhere.

    Theorem 1's ratio at u is u - logit(Q(u)), where Q(u) = (1 - e) sigmoid(u) + e (1 - sigmoid(u)). So a step
    takes u to F(u) = u + logit(q) - logit(Q(u)), and F(u) = u only at u = s. There
    F' = 1 - (1 - 2 e) eta (1 - eta) / (q (1 - q)). Above 0, as logit(Q)' is the difference of the posteriors
    P(Y = 0 | observed 0) - P(Y = 0 | observed 1); below 1, as e < 1/2.
    """
    eta, start = torch.cartesian_prod(double(*ETAS), double(-30.0, -3.0, 0.0, 3.0, 30.0)).unbind(1)
    s, q = formulas.clean_optimum(eta), formulas.noisy_posterior(eta, rate, rate)
    offset = math.log((1 - rate) / rate)
    at_s = s.clone().requires_grad_()
    step = weighted_step(at_s, q, offset)
    torch.testing.assert_close(step, s, rtol=0, atol=1e-13)
    (slope,) = torch.autograd.grad(step.sum(), at_s)
    torch.testing.assert_close(slope, 1 - (1 - 2 * rate) * eta * (1 - eta) / (q * (1 - q)))
    assert (slope > 0).all() and (slope < 1).all()
    u, distance = start, (start - s).abs()
    for _ in range(5000):
        u = weighted_step(u, q, offset)
        assert ((u - s).abs() <= distance + 1e-12).all()  # nearer at every step
        distance = (u - s).abs()
    assert distance.max() < 1e-9


def test_plain_sigmoid_has_no_fixed_point():
    """Slope 1 and offset 0: log(sigmoid(u) / sigmoid(-u)) = u, so a step adds logit(q) to u, for ever.

    Only q = 1/2 adds nothing; then every u is a fixed point, and the start decides.
    """
    q, start = torch.cartesian_prod(double(0.2, 0.5, 0.7), double(-3.0, 0.0, 1.5)).unbind(1)
    u = start
    for _ in range(100):
        u = formulas.weighted_optimum(q, torch.sigmoid(u), torch.sigmoid(-u))
    torch.testing.assert_close(u, start + 100 * formulas.noisy_optimum(q), rtol=1e-12, atol=1e-12)
    assert (u - start).abs()[q != 0.5].min() > 80 and (u - start).abs()[q == 0.5].max() < 1e-12


def test_oracle_weights_at_u_are_stable_where_labels_say_something():
    """The two-rate form of the same: slope 1 - (1 - eps0 - eps1) eta (1 - eta) / (q (1 - q)) at s.

    It is 1 at eps0 + eps1 = 1, where q no longer depends on eta, and above 1 beyond.
    """
    eta, eps0, eps1, rho0 = grid()
    q = formulas.noisy_posterior(eta, eps0, eps1)
    u = formulas.clean_optimum(eta).requires_grad_()
    log_g = formulas.oracle_log_weights(u, eps0, eps1, rho0)
    (slope,) = torch.autograd.grad((formulas.noisy_optimum(q) + log_g[0] - log_g[1]).sum(), u)
    torch.testing.assert_close(
        slope, 1 - (1 - eps0 - eps1) * eta * (1 - eta) / (q * (1 - q)), rtol=0, atol=1e-12
    )
    informative = eps0 + eps1 < 1
    assert (slope[informative] < 1).all() and (slope > -1e-12).all()
    assert (slope[~informative] > 1).all() and (~informative).any()
