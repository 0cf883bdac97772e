"""What a label has added to its own pair's u: gradients, decay, and runs with and without a label."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.linalg import expm
from scipy.special import expit

from pacmr_lightning import cli
from pacmr_lightning.analysis.last_pass import last_pass
from pacmr_lightning.audit import own_pull as module_of_own_pull
from pacmr_lightning.audit import scored_pairs
from pacmr_lightning.audit.noise_rate import NoiseRate
from pacmr_lightning.audit.own_pull import own_pull, remaining

from .conftest import audit, loaded


@pytest.fixture(name="loaded")
def loaded_run(run):
    return loaded(run)


def test_gradients_of_u(loaded, monkeypatch):
    """Against autograd, pair by pair, with AdamW's moments of the checkpoint; a sketch keeps products."""
    found, module, data, _ = loaded
    moments = module_of_own_pull._moments(module, found.checkpoint)
    sample = [3, 17, 40, 5]
    u, gradients = module_of_own_pull._gradients(module, data, sample, moments)
    optimizer = torch.load(found.checkpoint, weights_only=True)["optimizer_states"][0]
    parameters = module.policy.adapter()
    for row, index in enumerate(sample):
        batch = data.train_pairs.batch([index])
        with torch.no_grad():
            reference = module.policy.reference_log_probs(batch)
        now = module.policy.log_probs(batch)
        h = now.chosen - now.rejected - reference.chosen + reference.rejected
        value = module.objective.beta * h.squeeze()
        assert u[row] == pytest.approx(value.item(), abs=1e-3)
        expected = []
        for gradient, state in zip(
            torch.autograd.grad(value, list(parameters.values())), optimizer["state"].values(), strict=True
        ):
            v = state["exp_avg_sq"] / (1 - module.betas[1] ** state["step"])
            own = (gradient * torch.sigmoid(-value.detach()) / data.global_batch_size) ** 2
            scale = (v + (1 - module.betas[1]) * own).sqrt() + 1e-8
            expected.append((gradient / scale.sqrt()).flatten())
        kernel = gradients[row] @ gradients[row]
        assert kernel.item() == pytest.approx(torch.cat(expected).square().sum().item(), rel=1e-3)
    monkeypatch.setattr(module_of_own_pull, "WIDTH", gradients.shape[1] - 1)
    _, sketched = module_of_own_pull._gradients(module, data, sample, moments)
    assert sketched.shape[1] == gradients.shape[1] - 1
    exact = gradients @ gradients.T
    torch.testing.assert_close(
        sketched @ sketched.T, exact, rtol=0, atol=5 / gradients.shape[1] ** 0.5 * exact.max().item()
    )


def test_what_other_pairs_leave_of_it():
    """Against the matrix exponential, on average over 2,000 times of the visit."""
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((12, 5))
    kernel, u = directions @ directions.T, rng.standard_normal(12)
    decay = kernel * (expit(u) * expit(-u))
    times = (np.arange(2000) + 0.5) / 2000
    expected = np.mean([np.diag(expm(-decay * time) @ kernel) for time in times], axis=0)
    np.testing.assert_allclose(remaining(kernel, u, 12), expected, rtol=1e-5)


def test_it_is_what_a_label_changes():
    """One pass of gradient descent over 600 noisy pairs of a linear model, with and without a pair."""
    rng = np.random.default_rng(1)
    features = rng.standard_normal((600, 30)) * rng.gamma(4, 0.25, (600, 1))
    features *= np.where(rng.random(600) < expit(2 * features[:, 0]), 1, -1)[:, None]
    rate = 0.06

    def trained(left_out=None):
        theta = np.zeros(30)
        for i, x in enumerate(features):
            if i != left_out:
                theta = theta + rate * expit(-x @ theta) * x
        return features @ theta

    u = trained()
    some = rng.choice(600, 150, replace=False)
    moved = np.mean([u[i] - trained(i)[i] for i in some])
    kernel = rate * features @ features.T
    found = (remaining(kernel, u, 600) * expit(-u))[some].mean()
    first_order = (np.diag(kernel) * expit(-u))[some].mean()
    assert found == pytest.approx(moved, rel=0.15)
    assert first_order > 1.4 * moved  # which is why the answers of the others count


def test_a_checkpoint_of_the_middle(loaded, monkeypatch):
    """Its updates had the learning rates of the whole run's plan, not of a plan that ended with it."""
    found, module, data, updates = loaded
    monkeypatch.setattr(module_of_own_pull, "LARGEST", np.inf)
    monkeypatch.setattr(module_of_own_pull, "remaining", lambda kernel, u, pairs: np.diag(kernel))
    monkeypatch.setattr(module_of_own_pull, "_clipped", lambda *_: 1.0)
    whole, part = (own_pull(module, data, found, done) for done in (updates, 3))
    turns = np.arange(updates) / updates  # a cosine to a tenth, without warm-up
    rates = 0.1 + 0.9 * (1 + np.cos(np.pi * turns)) / 2
    assert module.warmup_ratio * updates < 0.5 and module.min_lr_ratio == 0.1
    assert part / whole == pytest.approx(rates[:3].sum() / rates.sum(), rel=1e-6)


def test_memorised_labels(run, loaded):
    found, module, data, updates = loaded
    assert own_pull(module, data, found, updates) is None
    table = audit(run, "policy", fallback_noise_rate=0.45)
    assert (table["unpulled_u"] == table["u"]).all() and table["p_wrong"].notna().all()
    page = (run / "audit/report.html").read_text()
    assert "0.45 is assumed" in page and "so the noise rate is likely to be higher" in page
    assert "45.0%, assumed" in page and "45.0%, as given" not in page


def test_the_surest_pairs_bound_the_fallback(run, monkeypatch):
    """Where what labels have added is known, and no share can be told."""
    monkeypatch.setattr(scored_pairs, "own_pull", lambda *_: 0.0)
    monkeypatch.setattr(NoiseRate, "identified", property(lambda self: self.known))
    monkeypatch.setattr(NoiseRate, "at_most", property(lambda self: 0.2))
    table = audit(run, "policy", fallback_noise_rate=0.45)
    page = (run / "audit/report.html").read_text()
    assert "0.2 is assumed, the upper bound from the pairs with the largest |u| (fallback: 0.45" in page
    assert table["p_wrong"].mean() < 0.25
    monkeypatch.setattr(NoiseRate, "at_most", property(lambda self: 0.5))
    audit(run, "policy", fallback_noise_rate=0.45)
    assert "0.45 is assumed." in (run / "audit/report.html").read_text()


def test_a_known_share_falls_back_to_u(run, monkeypatch):
    """Where nothing is left of u without what labels add, what they have added is all there is."""
    monkeypatch.setattr(scored_pairs, "own_pull", lambda *_: 1e3)
    table = audit(run, "policy", noise_rate=0.1)
    assert (table["unpulled_u"] == table["u"]).all() and table["p_wrong"].notna().all()


def test_without_the_optimizer(run, loaded):
    found, module, data, updates = loaded
    checkpoint = torch.load(found.checkpoint, weights_only=True)
    del checkpoint["optimizer_states"]
    torch.save(checkpoint, found.checkpoint)
    assert own_pull(module, data, found, updates) is None


@pytest.mark.parametrize("soft", [False, True])
def test_pull(loaded, soft, monkeypatch):
    """By how much the weighted loss of DPO falls per nat of u."""
    _, module, data, _ = loaded
    monkeypatch.setattr(module.weighting, "soft_labels", soft)
    frame = last_pass(module, data.train_pairs)
    g, u = frame["weight"], frame["u"]
    expected = g * expit(-u) - (soft * (1 - g)) * expit(u)
    np.testing.assert_allclose(frame["pull"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_finds_the_share_of_its_own_wrong_labels(tmp_path, monkeypatch):
    root = Path(__file__).parents[3]
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(root / "configs")
    cli.main(["fit", "--config", "quickstart/sft", "--data.source.rows", "20000"])
    words = "fit --config quickstart/preference --config configs/sweeps/world_base.yaml"
    cli.main([*words.split(), "--config", "methods/dpo", "--trainer.default_root_dir", "dpo"])
    table = audit("dpo", "policy")
    flipped = table["flipped"].astype(bool)
    added = (table["u"][flipped].mean() + table["u"][~flipped].mean()) / 2
    assert (table["u"] - table["unpulled_u"]).mean() == pytest.approx(added, rel=0.35)
    methods = pd.read_csv("dpo/audit/methods.csv")
    summary = json.loads(Path("dpo/summary.json").read_text())
    truth = summary["counts"]["train"]["flipped"] / 6400
    assert methods["expected"][0] == pytest.approx(truth, abs=3 * methods["expected_stderr"][0])
    table = audit("dpo", "policy", noise_rate=truth)  # an error of the share is an error of every probability
    flipped, p = table["flipped"].astype(bool), table["p_wrong"]
    for part in np.array_split(np.argsort(p), 8):
        assert flipped.iloc[part].mean() == pytest.approx(p.iloc[part].mean(), abs=0.05)
