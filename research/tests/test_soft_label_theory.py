"""Soft labels in theory: where the loss p l(u) + (1 - p) l(-u) has its minimum, and its risk."""

import math

import pytest
import torch

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.objectives import DPO, IPO, R3M, ROPO, HolderDPO
from pacmr_lightning.rewards import Rewards


def rewards_of(u: torch.Tensor) -> Rewards:
    zeros = torch.zeros_like(u)
    return Rewards(LogProbs(u / 2, -u / 2), LogProbs(zeros, zeros), 1.0)


def minimum(loss) -> torch.Tensor:
    """u at which the sum of the losses of K problems is smallest, by L-BFGS in float64."""
    u = torch.zeros(len(S), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([u], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-14)

    def closure():
        optimizer.zero_grad()
        value = loss(u).sum()
        value.backward()
        return value

    optimizer.step(closure)
    return u.detach()


S = torch.linspace(-2.5, 2.5, 11, dtype=torch.float64)
"""logit(eta) of the first of two outcomes."""


def two_outcomes(u, q, first, second, objective=None):
    """Section 3 of Qu et al.: the first outcome is observed with probability q, its label has probability
    ``first``; the second with 1 - q, its own has ``second``. The loss over both, with soft labels."""
    objective = objective or DPO(1.0)
    both = (q, rewards_of(u), first), (1 - q, rewards_of(-u), second)
    return sum(share * (p * objective(r) + (1 - p) * objective(r.exchanged())) for share, r, p in both)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.4])
def test_the_posterior_recovers_the_clean_preference(rate):
    """With p = P(the label is right | label) the minimum is u = logit(eta): what clean labels would teach."""
    q = (1 - rate) * S.sigmoid() + rate * (-S).sigmoid()
    first, second = (1 - rate) * S.sigmoid() / q, (1 - rate) * (-S).sigmoid() / (1 - q)
    found = minimum(lambda u: two_outcomes(u, q, first, second))
    torch.testing.assert_close(found, S, rtol=0, atol=1e-6)
    # DPO learns the noisy preference instead.
    ones = torch.ones_like(S)
    torch.testing.assert_close(
        minimum(lambda u: two_outcomes(u, q, ones, ones)), q.logit(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    "objective", [IPO(1.0), R3M(1.0), ROPO(1.0), HolderDPO(1.0)], ids=lambda o: type(o).__name__
)
def test_the_posterior_has_the_risk_of_clean_labels(objective):
    """Whatever the objective, and at any u."""
    rate, eta, u = 0.3, S.sigmoid(), torch.linspace(-4, 4, 11, dtype=torch.float64)
    q = (1 - rate) * eta + rate * (1 - eta)
    p = (1 - rate) * eta / q, (1 - rate) * (1 - eta) / (1 - q)
    clean = eta * objective(rewards_of(u)) + (1 - eta) * objective(rewards_of(-u))
    torch.testing.assert_close(two_outcomes(u, q, *p, objective), clean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("told", [0.2, 0.45])
def test_a_rate_that_is_told_wrongly(told):
    """At the minimum sigmoid(u) = q g+ + (1 - q)(1 - g-) whatever the probabilities are.

    Too low a rate leaves u nearer to what DPO learns, too high a one takes it beyond the truth; the sign
    stays.
    """
    rate = 0.3
    q = (1 - rate) * S.sigmoid() + rate * (-S).sigmoid()
    offset = math.log((1 - told) / told)
    first, second = (S + offset).sigmoid(), (offset - S).sigmoid()
    found = minimum(lambda u: two_outcomes(u, q, first, second))
    expected = (q * first + (1 - q) * (1 - second)).logit()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    ahead = S > 0
    assert (found[ahead] > q.logit()[ahead]).all() and (found.sign() == S.sign()).all()
    assert (found[ahead] < S[ahead]).all() == (told < rate)
