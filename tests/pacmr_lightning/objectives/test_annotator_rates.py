"""RE-PO with annotators: the fixed point of EM, the common rate, who comes late, and what is kept."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import expit

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.errors import UserError
from pacmr_lightning.objectives import RPOEM, AnnotatorRPOEM
from pacmr_lightning.rewards import Rewards


def rewards_of(u, annotators=None) -> Rewards:
    u = torch.as_tensor(u, dtype=torch.float64)
    zero = torch.zeros_like(u)
    return Rewards(LogProbs(u, zero), LogProbs(zero, zero), 1.0, annotators=annotators)


def test_converges_to_the_likeliest_reliabilities():
    """EM's fixed point is where the likelihood of the labels is largest; that lies near the truth."""
    rng = np.random.default_rng(0)
    truth = {"careful": 0.9, "careless": 0.6}
    names = np.array(["careful", "careless"])[rng.integers(2, size=2000)]
    log_odds = 3 * rng.standard_normal(len(names))
    label = (rng.random(len(names)) < expit(log_odds)) == (
        rng.random(len(names)) < np.vectorize(truth.get)(names)
    )
    u = np.where(label, log_odds, -log_odds)
    objective = AnnotatorRPOEM(1.0, momentum=1.0)
    for _ in range(150):
        objective.observe(rewards_of(u, names.tolist()), [])
    for name, reliability in truth.items():
        p = expit(u[names == name])
        best = minimize_scalar(
            lambda eta, p=p: -np.log(eta * p + (1 - eta) * (1 - p)).sum(),
            bounds=(0.01, 0.99),
            method="bounded",
            options={"xatol": 1e-10},
        )
        assert 1 - objective.annotator_rates[name] == pytest.approx(best.x, abs=1e-6)
        assert best.x == pytest.approx(reliability, abs=0.04)
    # The posterior that a label is right, as the paper writes it.
    eta = np.array([1 - objective.annotator_rates[name] for name in names])
    w = eta * expit(u) / (eta * expit(u) + (1 - eta) * expit(-u))
    np.testing.assert_allclose(objective.right(rewards_of(u, names.tolist())), w, rtol=1e-10)
    expected = -w * np.log(expit(u)) - (1 - w) * np.log(expit(-u))
    np.testing.assert_allclose(objective(rewards_of(u, names.tolist())), expected, rtol=1e-10)


def test_by_hand():
    """eps = 1/4, u = ln 3, -ln 3, -ln 3: 1 - w = 0.1, 0.5, 0.5. A half of the way for each, and for all."""
    ln3 = np.log(3)
    objective = AnnotatorRPOEM(1.0, 0.25, 0.5)
    objective.observe(rewards_of([ln3, -ln3, -ln3], ["a", "a", None]), [])
    assert objective.annotator_rates == pytest.approx({"a": (0.25 + 0.3) / 2})
    assert objective.estimated_rate == pytest.approx((0.25 + 1.1 / 3) / 2)
    common = objective.estimated_rate
    assert [objective.rate_of(name) for name in (None, "late")] == [common, common]
    losses = objective(rewards_of([0.5] * 3, [None, "late", "a"]))
    assert losses[0] == losses[1] != losses[2]
    # Who comes late starts there; an annotator without a pair stays.
    before = dict(objective.annotator_rates)
    objective.observe(rewards_of([0.0], ["late"]), [])
    assert objective.annotator_rates == before | {"late": pytest.approx(common)}
    assert objective.learned() == {
        f"reliability/{k}": 1 - v for k, v in sorted(objective.annotator_rates.items())
    }


def test_without_annotators_it_is_rpo_em():
    """In what both compute; held-out pairs, which bring no names, have the common rate too."""
    plain, by_annotator = RPOEM(1.0, 0.2), AnnotatorRPOEM(1.0, 0.2)
    rng = np.random.default_rng(1)
    for _ in range(20):
        rewards = rewards_of(rng.normal(size=16))
        torch.testing.assert_close(by_annotator(rewards), plain(rewards), rtol=1e-12, atol=0)
        for objective in (plain, by_annotator):
            objective.observe(rewards, [])
        assert by_annotator.estimated_rate == pytest.approx(plain.estimated_rate, rel=1e-12)
    assert by_annotator.annotator_rates == {} and RPOEM().learned() == {}


def test_its_state():
    first = AnnotatorRPOEM(1.0)
    kept = copy.deepcopy(first.state_dict())
    first.observe(rewards_of([1.0, -2.0, 0.3], ["a", "b", "a"]), [])
    assert kept == AnnotatorRPOEM(1.0).state_dict() and kept.keys() == first.state_dict().keys()
    second = AnnotatorRPOEM(1.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for objective in (first, second):
        objective.observe(rewards_of([0.1, 0.2], ["b", "c"]), [])
    assert first.state_dict() == second.state_dict() != kept
    with pytest.raises(UserError, match="but AnnotatorRPOEM keeps"):
        AnnotatorRPOEM().load_state_dict(RPOEM().state_dict())


def test_pairs_without_the_column_are_refused():
    with pytest.raises(UserError, match="no training pair names one; give the rows a column annotator"):
        AnnotatorRPOEM().check_pairs(SimpleNamespace(annotators=None))
    AnnotatorRPOEM().check_pairs(SimpleNamespace(annotators=[None, "a"]))
    RPOEM().check_pairs(SimpleNamespace(annotators=None))


def test_names_stay_with_their_pairs(make_batch):
    batch = make_batch(5)
    batch.annotators = ["a", None, "b", "c", "d"]
    names = dict(zip(batch.ids, batch.annotators, strict=True))
    for part in (batch.longest_first(), *batch.micro_batches(2), batch[torch.tensor([3, 1])]):
        assert part.annotators == [names[name] for name in part.ids]
    log_probs = LogProbs(torch.zeros(5), torch.zeros(5))
    rewards = [
        Rewards.of(log_probs[: len(part)], part.with_reference(log_probs[: len(part)]), 1.0)
        for part in batch.micro_batches(2)
    ]
    assert Rewards.cat(rewards).annotators == batch.annotators
    assert rewards[1].exchanged().annotators == rewards[1].detach().annotators == ["b", "c"]
