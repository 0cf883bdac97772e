"""Every objective against values derived by hand, defining identities, autograd, and its own options."""

import inspect
import json
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import expit

from pacmr_lightning import objectives
from pacmr_lightning.batch import LogProbs
from pacmr_lightning.errors import UserError
from pacmr_lightning.objectives import CDPO, DPO, IPO, R3M, RDPO, ROPO, RPOEM, DrDPO, HolderDPO, Objective
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import SigmoidPrior

CLASSES = [
    member
    for _, member in inspect.getmembers(objectives, inspect.isclass)
    if issubclass(member, Objective) and not inspect.isabstract(member)
]
NEEDED = {CDPO: {"label_noise": 0.2}, RDPO: {"label_noise": 0.2}}
MAKE = {cls.__name__: partial(cls, **NEEDED.get(cls, {})) for cls in CLASSES}
MAKE["IPO, means"] = partial(IPO, length_normalize=True)


def rewards_of(h, beta=1.0, annotators=None) -> Rewards:
    """Rewards of N pairs with log-ratio difference h, all of it in the policy's chosen log-probability."""
    h = h if isinstance(h, torch.Tensor) else torch.tensor(h, dtype=torch.float64)
    zero, count = torch.zeros_like(h), torch.full_like(h, 4)
    return Rewards(LogProbs(h, zero), LogProbs(zero, zero), beta, count, count, annotators=annotators)


def loss_of(objective: Objective, h: float) -> float:
    return float(objective(rewards_of([h], objective.beta))[0])


# Values by hand. At u = ln 3: sigmoid(u) = 3/4, -ls(u) = ln(4/3), -ls(-u) = ln 4.

LN3 = math.log(3)
BY_HAND = {
    # -log(3/4); -1/4
    "dpo": (DPO(1.0), LN3, math.log(4 / 3), -0.25),
    # beta = 2 and h = ln 3 / 2 make the same u
    "dpo, beta 2": (DPO(2.0), LN3 / 2, math.log(4 / 3), -0.5),
    # 0.8 ln(4/3) + 0.2 ln 4 = ln 4 - 0.8 ln 3; -0.8/4 + 0.2 * 3/4
    "cdpo": (CDPO(1.0, 0.2), LN3, math.log(4) - 0.8 * LN3, -0.05),
    # (0.8 ln(4/3) - 0.2 ln 4) / 0.6 = (0.6 ln 4 - 0.8 ln 3) / 0.6; (-0.2 - 0.15) / 0.6
    "rdpo": (RDPO(1.0, 0.2), LN3, math.log(4) - 4 / 3 * LN3, -0.35 / 0.6),
    # (3 - 1/0.2)^2; 2 (3 - 1/0.2)
    "ipo": (IPO(0.1), 3.0, 4.0, -4.0),
    # per pair it is DPO: -log(1/2)
    "drdpo": (DrDPO(1.0), 0.0, math.log(2), -0.5),
    # a = 3: 12/16 ln(4/3) + 36/16 * 1/4; -3/4 * 1/4 - 9/4 * 3/16
    "ropo": (ROPO(1.0, 3.0), LN3, 0.75 * math.log(4 / 3) + 9 / 16, -3 / 16 - 27 / 64),
    # a = 1 has the factor 1: ln(4/3) + 1/4; -1/4 - 3/16
    "ropo, alpha 1": (ROPO(1.0, 1.0), LN3, math.log(4 / 3) + 1 / 4, -7 / 16),
    # lam = 3/4, t = -ln 3: above t it is DPO
    "r3m above": (R3M(1.0, 0.75), LN3, math.log(4 / 3), -0.25),
    # below t: -log(1/4) + 3/4 (-ln 3 + 2 ln 3); -lam
    "r3m below": (R3M(1.0, 0.75), -2 * LN3, math.log(4) + 0.75 * LN3, -0.75),
    # p = 3/4, gamma = 2: -3 * 9/16 + 2 * 27/64; -6 * 9/16 * 1/16. gamma = 1: -2 * 3/4 + 9/16; 2 * -2 * 3/64
    "holder_dpo": (HolderDPO(1.0), LN3, -27 / 32, -54 / 256),
    # p = 1/4: -3 * 1/16 + 2 * 1/64; -6 * 1/16 * 9/16
    "holder_dpo, contradicted": (HolderDPO(1.0), -LN3, -5 / 32, -54 / 256),
    "holder_dpo, gamma 1": (HolderDPO(2.0, 1.0), LN3 / 2, -15 / 16, -3 / 16),
    # gamma = 1/2: sqrt(3/4) (-3/2 + 3/8); -3/4 sqrt(3/4) 1/16.
    "holder_dpo, gamma 1/2": (HolderDPO(1.0, 0.5), LN3, -9 / 8 * 0.75**0.5, -3 / 64 * 0.75**0.5),
    # eps = 1/4: w = sigmoid(2 ln 3) = 9/10; 0.9 ln(4/3) + 0.1 ln 4 = ln 4 - 0.9 ln 3; -0.9/4 + 0.1 * 3/4
    "rpo_em": (RPOEM(1.0, 0.25), LN3, math.log(4) - 0.9 * LN3, -0.15),
}


@pytest.mark.parametrize("case", list(BY_HAND))
def test_values_and_slopes_by_hand(case):
    objective, h, value, slope = BY_HAND[case]
    x = torch.tensor([h], dtype=torch.float64, requires_grad=True)
    loss = objective(rewards_of(x, objective.beta))
    loss.backward()
    assert (loss.item(), x.grad.item()) == pytest.approx((value, slope), rel=1e-12)


LOG_PROBS = LogProbs(torch.tensor([-5.0]), torch.tensor([-6.0]))
REFERENCE = LogProbs(torch.tensor([-11.0]), torch.tensor([-2.0]))
COUNTS = torch.tensor([2]), torch.tensor([8])


def test_ipo_by_hand_with_token_means():
    """Log-ratios 6 over 2 tokens and -4 over 8: (3 + 1/2 - 1/(2 * 0.25))^2 = 1.5^2; the sums give 8^2."""
    rewards = Rewards(LOG_PROBS, REFERENCE, 0.25, *COUNTS)
    assert IPO(0.25, length_normalize=True)(rewards).item() == pytest.approx(2.25)
    assert IPO(0.25)(rewards).item() == pytest.approx(64.0)
    with pytest.raises(ValueError, match=r"Rewards\.of"):
        IPO(0.25, length_normalize=True)(Rewards(LOG_PROBS, REFERENCE, 0.25))


def test_sft_term_by_hand():
    """u = 0.5 (6 - -4) = 5; the chosen response has 5 nats over 2 tokens: ln(1 + e^-5) + 0.1 * 5 / 2."""
    rewards = Rewards(LOG_PROBS, REFERENCE, 0.5, *COUNTS)
    assert DPO(0.5, sft_weight=0.1)(rewards).item() == pytest.approx(math.log1p(math.exp(-5)) + 0.25)
    # A soft label's other side has the rejected response's 6 nats over 8 tokens.
    assert DPO(0.5, 0.1)(rewards.exchanged()).item() == pytest.approx(math.log1p(math.exp(5)) + 0.075)
    with pytest.raises(ValueError, match=r"sft_weight needs .*Rewards\.of"):
        DPO(0.5, sft_weight=0.1)(Rewards(LOG_PROBS, REFERENCE, 0.5))


def test_rpo_em_is_two_other_things():
    """Soft labels w, and in its gradient the likelihood of labels that are flipped at rate eps."""
    u = torch.linspace(-12, 12, 49, dtype=torch.float64, requires_grad=True)
    rewards = rewards_of(u)
    losses = RPOEM(1.0, 0.3)(rewards)
    w = SigmoidPrior(1.0, math.log(0.7 / 0.3)).weights(rewards, None).g
    soft = w * DPO(1.0)(rewards) + (1 - w) * DPO(1.0)(rewards.exchanged())
    torch.testing.assert_close(losses, soft, rtol=1e-10, atol=1e-12)
    (found,) = torch.autograd.grad(losses.sum(), u)
    likelihood = -(0.7 * u.sigmoid() + 0.3 * (-u).sigmoid()).log()
    (expected,) = torch.autograd.grad(likelihood.sum(), u)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lam", [0.05, 0.5, 0.75, 0.95])
def test_r3m_is_the_minimum_over_outliers(lam):
    """min over d in [0, 20] of -ls(u + d) + lam d on a grid of step 1e-4; also where d = 0 is the minimum."""
    d = torch.arange(0, 20, 1e-4, dtype=torch.float64)
    u = torch.linspace(-8, 8, 33, dtype=torch.float64)
    grid = torch.stack([(-F.logsigmoid(x + d) + lam * d).min() for x in u])
    torch.testing.assert_close(R3M(1.0, lam)(rewards_of(u)), grid, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", list(MAKE))
def test_finite(name):
    """In fp32, value and gradient; it vanishes where the label is contradicted only if that is the idea."""
    far = torch.logspace(-3, 4, 60)
    h = torch.cat([-far.flip(0), torch.zeros(1), far]).requires_grad_()
    objective = MAKE[name](1.0)
    losses = objective(rewards_of(h))
    (gradient,) = torch.autograd.grad(losses.sum(), h)
    assert losses.dtype == torch.float32 and torch.isfinite(losses).all() and torch.isfinite(gradient).all()
    if name not in {"RPOEM", "AnnotatorRPOEM", "HolderDPO"}:  # which take such a label for wrong
        assert (gradient[h < 0] < 0).all()
    if name == "HolderDPO":  # neither end pulls
        assert losses[[0, -1]].tolist() == [0, -1] and not gradient[[0, -1]].any()
    if objective.grouped:
        pair = losses.detach()[0] + torch.tensor([0.0, 1.0])
        assert torch.isfinite(objective.group_value(pair))
        weights = torch.tensor([0.7311, 0.2689])
        torch.testing.assert_close(objective.group_weights(pair), weights, atol=1e-3, rtol=0)


NAN, INF = math.nan, math.inf
OPTIONS = {
    (CDPO, "label_noise"): (0.5, -0.1, NAN),
    (RDPO, "label_noise"): (0.5, 0.7, NAN),
    (DPO, "sft_weight"): (-0.1, NAN, INF),
    (IPO, "length_normalize"): (),
    (DrDPO, "beta_prime"): (0.0, NAN),
    (ROPO, "alpha"): (0.0, NAN),
    (R3M, "lam"): (0.0, 1.0, NAN),
    (RPOEM, "initial_rate"): (0.0, 0.5, NAN),
    (RPOEM, "momentum"): (0.0, NAN),
    (objectives.AnnotatorRPOEM, "initial_rate"): (0.5,),
    (objectives.AnnotatorRPOEM, "momentum"): (0.0,),
    (HolderDPO, "gamma"): (0.0, NAN, INF),
}
"""Values that are refused."""
OPTIONS |= {(member, "beta"): (0.0, -1.0, NAN, INF) for member in CLASSES}


@pytest.mark.parametrize(("cls", "option"), list(OPTIONS), ids=lambda x: getattr(x, "__name__", x))
def test_every_option_has_a_range(cls, option):
    assert {(cls, name) for name in inspect.signature(cls).parameters} <= OPTIONS.keys()
    for value in OPTIONS[cls, option]:
        with pytest.raises(UserError, match=rf"\b{option}( is)? {re.escape(str(value))}\b"):
            cls(**{**NEEDED.get(cls, {}), option: value})


# Label noise that the data knows.


@pytest.mark.parametrize("cls", [CDPO, RDPO])
def test_label_noise_auto(cls):
    objective = cls(1.0)
    with pytest.raises(UserError, match=f"{cls.__name__}'s label_noise is auto"):
        loss_of(objective, 1.0)
    with pytest.raises(UserError, match=r"label_noise is 0\.5"):
        objective.resolve_label_noise(0.5)
    objective.resolve_label_noise(0.3)
    assert loss_of(objective, 1.0) == loss_of(cls(1.0, 0.3), 1.0)
    restored, fixed = cls(1.0), cls(1.0, 0.1)
    for other in (restored, fixed):
        other.load_state_dict(objective.state_dict())
    assert restored.label_noise == 0.3 and fixed.label_noise == 0.1


# Dr.DPO's group.


def test_group_weights_by_hand():
    """beta' = 1/2, losses ln 2 and 0: exp(-2 ln 2) = 1/4 against 1, so 1/5 and 4/5; -1/2 log(5/8).

    The gradient: test_combinations.py.
    In fp32 the exp(-l / beta') of large losses are 0, but their differences still decide.
    """
    objective = DrDPO(1.0, beta_prime=0.5)
    losses = torch.tensor([math.log(2), 0.0])
    torch.testing.assert_close(objective.group_weights(losses), torch.tensor([0.2, 0.8]))
    assert objective.group_value(losses).item() == pytest.approx(-0.5 * math.log(5 / 8))
    losses = torch.tensor([500.0, 501.0, 502.0])
    torch.testing.assert_close(DrDPO().group_weights(losses), (-losses).softmax(0))
    expected = 500 - math.log((1 + math.exp(-1) + math.exp(-2)) / 3)
    assert DrDPO().group_value(losses).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("cls", [RPOEM, objectives.AnnotatorRPOEM])
def test_estimated_rates_stay_inside(cls):
    objective = cls(1.0, momentum=1.0)
    for u in (1e4, -1e4, 1e4):
        rewards = rewards_of([u], annotators=["a"])
        objective.observe(rewards, ["x"])
        rates = [objective.estimated_rate, *getattr(objective, "annotator_rates", {}).values()]
        assert all(0 < rate < 1 for rate in rates) and math.isfinite(loss_of(objective, 3.0))
        assert torch.isfinite(objective(rewards)).all()


# RPO-EM with annotators.


def test_annotators_by_hand():
    """eps = 1/4, u = ln 3, -ln 3, -ln 3: 1 - w = 0.1, 0.5, 0.5. A half of the way for each, and for all."""
    objective = objectives.AnnotatorRPOEM(1.0, 0.25, 0.5)
    objective.observe(rewards_of([LN3, -LN3, -LN3], annotators=["a", "a", None]), [])
    assert objective.annotator_rates == pytest.approx({"a": (0.25 + 0.3) / 2})
    assert objective.estimated_rate == pytest.approx((0.25 + 1.1 / 3) / 2)
    plain = RPOEM(1.0, 0.25, 0.5)
    plain.observe(rewards_of([LN3, -LN3, -LN3]), [])
    common = objective.estimated_rate
    assert plain.estimated_rate == pytest.approx(common)
    assert [objective.rate_of(name) for name in (None, "late")] == [common, common]
    losses = objective(rewards_of([0.5] * 3, annotators=[None, "late", "a"]))
    assert losses[0] == losses[1]
    # The posterior that a label is right, as its paper writes it.
    eta, p = 1 - objective.annotator_rates["a"], expit(0.5)
    w = eta * p / (eta * p + (1 - eta) * (1 - p))
    assert losses[2].item() == pytest.approx(-w * np.log(p) - (1 - w) * np.log(1 - p))
    # Who comes late starts there; an annotator without a pair stays.
    before = dict(objective.annotator_rates)
    objective.observe(rewards_of([0.0], annotators=["late"]), [])
    assert objective.annotator_rates == before | {"late": pytest.approx(common)}
    assert objective.learned() == {f"reliability/{k}": 1 - v for k, v in objective.annotator_rates.items()}


# Two processes.

TWO_RANKS = """
import json, sys, torch
import torch.distributed as dist
from pacmr_lightning.batch import LogProbs
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.objectives import RPOEM, AnnotatorRPOEM, DrDPO

rank, store = int(sys.argv[1]), sys.argv[2]
if rank >= 0:
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
mine = {0: slice(0, 4), 1: slice(4, 7)}.get(rank, slice(0, 7))
u = torch.tensor([3.0, -2.0, 0.5, -0.1, 4.0, -6.0, 1.0], dtype=torch.float64)[mine]
who = ["p", None, "q", "p", "q", "p", "r"][mine]
zero = torch.zeros_like(u)
rewards = Rewards(LogProbs(u, zero), LogProbs(zero, zero), 1.0, annotators=who)
drdpo = DrDPO(1.0, 0.7)
losses = drdpo(rewards)
some = losses[:0] if rank == 1 else losses  # a rank without pairs takes part
found = {"weights": [drdpo.group_weights(each).tolist() for each in (losses, some)]}
found["value"] = drdpo.group_value(losses).item()
for objective in (RPOEM(1.0, 0.25, 0.5), AnnotatorRPOEM(1.0, 0.25, 0.5)):
    for _ in range(2):
        objective.observe(rewards, list("abcdefg")[mine])
    found[type(objective).__name__] = objective.state_dict()
found["plain"] = objective.group_value(losses).item()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path, forked):
    running = [forked(TWO_RANKS, rank, tmp_path / "store") for rank in (0, 1, -1)]
    *both, one = (json.loads(process.communicate()[0].splitlines()[-1]) for process in running)
    (first, some), (second, none) = (rank["weights"] for rank in both)
    assert first + second == pytest.approx(one["weights"][0], rel=1e-12)
    assert sum(first + second) == pytest.approx(1) == sum(some) and none == []
    for rank in both:
        assert rank["AnnotatorRPOEM"] == one["AnnotatorRPOEM"], "bit for bit"
        assert rank["RPOEM"] == pytest.approx(one["RPOEM"])
        for value in ("plain", "value"):
            assert rank[value] == pytest.approx(one[value], rel=1e-12)
    assert one["AnnotatorRPOEM"]["annotator_rates"].keys() == {"p", "q", "r"}
