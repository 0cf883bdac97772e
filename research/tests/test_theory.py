"""``research.theory``: weights that fulfil Theorem 1, calibrated policies, and a real run of a tiny model."""

import json
import shutil
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy.special import expit, logit
from scipy.stats import linregress, pearsonr, spearmanr
from sklearn.calibration import calibration_curve

from pacmr_lightning import cli
from pacmr_lightning.batch import PairBatch
from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.weighting import DropFlipped, OracleWeights, SigmoidPrior, Unweighted, VNetWeighting
from research import theory
from research.theory import agreement, calibration_error, reliability, weight_log_ratio, with_intervals

RNG = np.random.default_rng(0)
ETA = RNG.uniform(0.001, 0.999, 400)


def optimum(eta, rate):
    """Theorem 1 as it is written."""
    return logit(eta) - logit((1 - rate) * eta + rate * (1 - eta))


def pairs_with(eta):
    empty = [[1]] * len(eta)
    batch = PairBatch.collate([str(i) for i in range(len(eta))], empty, empty, empty)
    batch.eta = torch.from_numpy(eta)
    return batch


def vnet(slope, offset, floor=0.0):
    return VNetWeighting(start_slope=slope, start_offset=offset, floor=floor)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.45])
def test_weights_that_fulfil_theorem_1(rate):
    """sigma(u + logit(1 - eps)) does where u is the clean preference strength; the oracle does for any u."""
    s, delta = torch.from_numpy(logit(ETA)), torch.from_numpy(RNG.normal(size=len(ETA)))
    offset = float(logit(1 - rate))
    for weighting, u, tolerance in (
        (vnet(1.0, offset), s, 1e-6),  # it computes in float32
        (SigmoidPrior(1.0, offset), s, 1e-12),
        (OracleWeights(rate), torch.zeros_like(s), 1e-12),
    ):
        found = weight_log_ratio(weighting, u, delta, pairs_with(ETA)).numpy()
        np.testing.assert_allclose(found, optimum(ETA, rate), atol=tolerance)
    # The paper's start, a = 1 and b = 0, has log g+/g- = u.
    np.testing.assert_allclose(weight_log_ratio(vnet(1.0, 0.0), s, delta, pairs_with(ETA)), s, atol=1e-6)
    for floored in (vnet(1.0, 0.0, floor=0.3), SigmoidPrior(floor=0.3)):
        expected = (0.3 + 0.7 * s.sigmoid()).log() - (0.3 + 0.7 * (-s).sigmoid()).log()
        found = weight_log_ratio(floored, s, delta, pairs_with(ETA))
        np.testing.assert_allclose(found, expected, atol=1e-6)
    for weighting in (Unweighted(), DropFlipped(), theory.AuditedWeights()):
        assert weight_log_ratio(weighting, s, delta, pairs_with(ETA)).isnan().all()


def test_a_vnet_that_looks_at_delta():
    """g of the pair over g of the pair with its responses exchanged: -u, and the same Delta."""
    weighting = vnet(1.0, 0.0)
    torch.manual_seed(0)
    torch.nn.init.normal_(weighting.vnet.layers[-1].weight)
    u, delta = torch.randn(2, 50, dtype=torch.float64)
    found = weight_log_ratio(weighting, u, delta, pairs_with(ETA[:50]))
    with torch.no_grad():
        expected = weighting.vnet(delta, u)[0].log() - weighting.vnet(delta, -u)[0].log()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert (found + weight_log_ratio(weighting, -u, delta, pairs_with(ETA[:50]))).abs().max() < 1e-12


def test_agreement_is_that_of_both_orders():
    x = optimum(ETA, 0.3)
    y = (0.4 * x + RNG.normal(size=len(x))).round(1)  # with ties
    both = np.concatenate([x, -x]), np.concatenate([y, -y])
    found = agreement(x, y)
    line = linregress(*both)
    assert found["pearson"] == pytest.approx(pearsonr(*both).statistic)
    assert found["spearman"] == pytest.approx(spearmanr(*both).statistic)
    assert found["slope"] == pytest.approx(line.slope) and line.intercept == pytest.approx(0, abs=1e-12)
    turned = RNG.choice([-1, 1], len(x))
    assert agreement(turned * x, turned * y) == pytest.approx(found), "the way it is written does not matter"


def test_calibration():
    u = logit(ETA)
    assert calibration_error(u, eta=ETA)["ece_eta"] == pytest.approx(0, abs=1e-12)
    assert calibration_error(np.zeros(100), eta=ETA[:100])["ece_eta"] == pytest.approx(0, abs=1e-12)
    # A policy that is sure of the right side is off by the chance that the label is wrong.
    assert calibration_error(np.full(100, 40.0), eta=np.full(100, 0.7))["ece_eta"] == pytest.approx(0.3)
    labels = (RNG.random(len(u)) < expit(u / 2)).astype(float)
    table = reliability(u, label=labels)
    both = np.concatenate([labels, 1 - labels]), expit(np.concatenate([u, -u]))
    truth, predicted = calibration_curve(*both, n_bins=10, strategy="quantile")
    np.testing.assert_allclose(table["label"], truth)
    np.testing.assert_allclose(table["predicted"], predicted)
    error = calibration_error(u, label=labels)["ece_label"]
    assert error == pytest.approx((table["share"] * np.abs(truth - predicted)).sum()) and error > 0.05
    assert table["share"].sum() == pytest.approx(1)


def test_intervals_resample_prompts():
    """Of a mean over prompts of one size, the bootstrap's interval is that of the prompts' means."""
    prompts = np.repeat(np.arange(60), 5)
    values = RNG.normal(size=60)[prompts]
    found = with_intervals(lambda v: {"mean": v.mean()}, prompts, values, resamples=4000)
    side = 1.96 * values[::5].std() / np.sqrt(60)
    assert found["mean"] == values.mean()
    assert found["mean_low"] == pytest.approx(values.mean() - side, abs=0.1 * side)
    assert found["mean_high"] == pytest.approx(values.mean() + side, abs=0.1 * side)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """How wide the intervals are is looked at above."""
    monkeypatch.setattr(theory, "with_intervals", partial(with_intervals, resamples=20))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_llama):
    """DPO and VNet runs of three updates under 30% noise in the embedded world."""
    folder = tmp_path_factory.mktemp("theory")
    tiny_llama(folder / "model", initializer_range=0.3)
    for method, weighting in (("dpo", "Unweighted"), ("pacmr", "VNetWeighting")):
        words = f"fit --model PreferenceModule --model.policy PolicyModel --model.policy.model {folder}/model"
        words += f" --model.method {method} --model.objective DPO --model.objective.beta 1.0"
        words += f" --model.learning_rate 0.02 --model.weighting {weighting} --data PreferenceDataModule"
        words += " --data.source EmbeddedWorld --data.source.pairs 96 --data.source.validation_pairs 60"
        words += " --data.global_batch_size 32 --data.meta_batch_size 16 --data.noise_rate 0.3"
        words += " --trainer.max_steps 3 --trainer.accelerator cpu --trainer.enable_progress_bar false"
        words += f" --trainer.default_root_dir {folder}/{method}"
        cli.main(words.split())
    return folder


@pytest.mark.parametrize("split", ["validation", "train"])
def test_real_runs(split, runs, tmp_path, capsys):
    output = tmp_path / "out"
    names = [str(runs / name) for name in ("dpo", "pacmr")]
    theory.main([*names, "--output", str(output), "--split", split])
    printed = " ".join(capsys.readouterr().out.split())
    assert "dpo, 30% noise: left out of the weights, Unweighted has none to compare." in printed
    pairs = pd.read_parquet(output / "pairs.parquet").groupby("label").get_group("pacmr, 30% noise")
    pairs = pairs.reset_index(drop=True)
    count, seed = (96, 0) if split == "train" else (60, 1)
    rows = {row["id"]: row for row in World().preference_rows(count, seed)}
    eta = np.array([rows[name]["eta"] for name in pairs["id"]])
    if split == "train":
        mask = pd.read_parquet(runs / "pacmr" / "noise_mask.parquet").set_index("id")["flipped"]
        eta = np.where(mask[pairs["id"]], 1 - eta, eta)
        assert (pairs["noisy"] == 1).all() and mask.any()
    else:
        assert (pairs["noisy"] == pairs["q"]).all()
    np.testing.assert_allclose(pairs["eta"], eta)
    np.testing.assert_allclose(pairs["q"], 0.7 * eta + 0.3 * (1 - eta))
    np.testing.assert_allclose(pairs["optimum"], optimum(eta, 0.3), atol=1e-6)
    np.testing.assert_allclose(pairs["optimum_at_u"], optimum(expit(pairs["u"]), 0.3), rtol=1e-5, atol=1e-6)
    net = PreferenceModule.load_from_checkpoint(runs / "pacmr" / "checkpoints" / "last.ckpt").vnet
    u, delta = (torch.tensor(pairs[name].to_numpy()).float() for name in ("u", "delta"))
    with torch.no_grad():
        ratio = net(delta, u)[0].log() - net(delta, -u)[0].log()
    np.testing.assert_allclose(pairs["log_ratio"], ratio, atol=1e-4)
    assert pairs["u"].std() > 0.01

    ratios = pd.read_csv(output / "weight-ratios.csv")
    errors = pd.read_csv(output / "calibration.csv")
    assert ratios["method"].tolist() == ["pacmr"] and errors["method"].tolist() == ["dpo", "pacmr"]
    assert set(errors["step"]) == {3} and set(errors["pairs"]) == {count}
    expected = agreement(pairs["optimum"].to_numpy(), pairs["log_ratio"].to_numpy())
    assert ratios[list(expected)].iloc[0].to_dict() == pytest.approx(expected)
    error = calibration_error(pairs["u"].to_numpy(), eta=eta)["ece_eta"]
    assert errors["ece_eta"][1] == pytest.approx(error) and f"{error:.3f}" in printed
    for table, columns in ((ratios, [*expected, "slope_at_u"]), (errors, ["ece_eta", "ece_noisy"])):
        for name in columns:
            assert (table[f"{name}_low"] < table[f"{name}_high"]).all()
    assert pd.read_csv(output / "reliability.csv").groupby("label")["share"].sum().tolist() == pytest.approx(
        [1, 1]
    )
    for name in ("weight-ratios", "calibration"):
        assert (output / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert (output / f"{name}.pdf").read_bytes()[:5] == b"%PDF-"


def change(run, **options):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["init_args"] |= options
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


def test_without_noise_there_is_nothing_to_weigh(runs, tmp_path, capsys):
    clean = change(shutil.copytree(runs / "pacmr", tmp_path / "clean"), noise_rate=0.0)
    ratios, errors = theory.theory_check([str(clean)], output=str(tmp_path / "out"))
    assert ratios.empty and errors["ece_eta"][0] == errors["ece_noisy"][0] > 0
    assert "without noise every optimal log-ratio is 0" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "out" / "weight-ratios.png").exists()


def test_bad_input(runs, tmp_path, capsys):
    output = tmp_path / "out"

    def stops(run, *options):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            theory.main([str(run), "--output", str(output), *options])
        assert stop.value.code == 2 and not output.exists()
        (told,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("pacmr: error: "))
        return told

    lines = [
        json.dumps({"prompt": f"p{i}", "chosen": f" calm {i}", "rejected": " rain"}) + "\n" for i in range(60)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    source = {"class_path": "Files", "init_args": {"train": str(tmp_path / "rows.jsonl")}}
    run = change(shutil.copytree(runs / "dpo", tmp_path / "files"), source=source)
    assert "eta, the probability that the chosen response is better, is unknown for" in stops(run)
    noise = {"class_path": "TwoRateNoise", "init_args": {"rates": [0.1, 0.2]}}
    rates = change(shutil.copytree(runs / "dpo", tmp_path / "rates"), noise_rate=0.0, noise=noise)
    assert "were not flipped at one rate (TwoRateNoise {'rates': [0.1, 0.2]})" in stops(rates)
    assert "nowhere/config.yaml does not exist" in stops("nowhere")
    with pytest.raises(UserError, match="which is a file"):
        theory.theory_check([str(runs / "dpo")], output=str(tmp_path / "rows.jsonl"))
