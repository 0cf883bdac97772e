"""What VNet looks at: features of real runs, their scale and history, resumes, surfaces and audits."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from pacmr_lightning.analysis.last_pass import last_pass
from pacmr_lightning.analysis.surface import load_surface
from pacmr_lightning.analysis.surface_page import write_surface_page
from pacmr_lightning.callbacks import VNetSurfaces, WeightGap, WeightRecorder
from pacmr_lightning.callbacks.weight_gap import probe
from pacmr_lightning.datamodules import Files, PreferenceDataModule
from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import CleanPreference
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.runs.folder import read_weights
from pacmr_lightning.weighting import VNet, VNetWeighting
from pacmr_lightning.weighting.vnet import RunningScale, load_vnet, save_vnet

from ...conftest import quiet_trainer, write_lines

BETA = 0.5
ALL = (
    *("delta", "u", "perplexity_difference", "dpo_loss", "entropy"),
    *("margin_evolution", "margin_fluctuation", "reference_deviation"),
)
TRIPLE = ("perplexity_difference", "dpo_loss", "entropy")


class Records(Callback):
    def __init__(self):
        self.steps = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps[trainer.global_step - 1] = outputs["record"]


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("features")
    tiny_llama(folder / "model", initializer_range=0.2)
    for name, pairs, seed in (("pairs", 16, 0), ("clean", 8, 1)):
        write_lines(folder / f"{name}.jsonl", World().preference_rows(pairs, seed))
    return folder


@pytest.fixture(scope="module")
def fit(files):
    """Trains 6 updates, which are 3 epochs, and returns module, datamodule, trainer and records."""

    def run(name, features=ALL, *, callbacks=(), ckpt=None, micro_batch_size=None, epochs=3, history=None):
        seed_everything(0)
        options = {"learning_rate": 0.02, "micro_batch_size": micro_batch_size, "method": "other"}
        module = PreferenceModule(
            PolicyModel(str(files / "model"), rank=4),
            DPO(BETA),
            VNetWeighting(CleanPreference(), every=1, learning_rate=0.05, features=features, history=history),
            **options,
        )
        pairs, clean = str(files / "pairs.jsonl"), str(files / "clean.jsonl")
        sizes = {"global_batch_size": 8, "meta_batch_size": 4, "meta_every": 1, "noise_rate": 0.3}
        clean_meta = Files(clean, clean)
        data = PreferenceDataModule(
            Files(pairs, clean), str(files / "model"), task="tiny", clean_meta=clean_meta, **sizes
        )
        records = Records()
        callbacks = [records, *callbacks]
        trainer = quiet_trainer(files / name, max_epochs=epochs, callbacks=callbacks, limit_val_batches=0)
        if ckpt is None and name == "whole":
            records.on_train_batch_start = lambda trainer, *_: (
                trainer.save_checkpoint(files / "three.ckpt") if trainer.global_step == 3 else None
            )
        trainer.fit(module, data, ckpt_path=ckpt)
        return module, data, trainer, records.steps

    return run


@pytest.fixture(scope="module")
def whole(fit):
    return fit("whole", callbacks=[WeightRecorder(), Probed()])


class Probed(Callback):
    """Asks about all pairs at the end, while policy and data are where they are in training."""

    def on_train_end(self, trainer, pl_module):
        self.frame = probe(trainer, pl_module, range(16))


def test_history_is_the_recursion_over_visits(whole):
    _, _, _, steps = whole
    seen, compared = {}, 0
    for step in range(6):
        record = steps[step]
        for i, name in enumerate(record.ids):
            u = float(record.u[i])
            if name not in seen:
                first, mean, variance = u, u, 0.0
            else:
                first, old, variance = seen[name]
                mean = old / 2 + u / 2
                variance = variance / 2 + (u - old) ** 2 / 4
                compared += 1
            seen[name] = first, mean, variance
            found = dict(zip(ALL, record.features[i].tolist(), strict=True))
            assert found["u"] == u and found["delta"] == float(record.delta[i])
            assert found["dpo_loss"] == pytest.approx(math.log1p(math.exp(-u)), rel=1e-5)
            assert found["reference_deviation"] == pytest.approx(abs(u) / BETA, rel=1e-5)
            assert found["margin_evolution"] == pytest.approx(mean - first, rel=1e-5, abs=1e-7)
            assert found["margin_fluctuation"] == pytest.approx(math.sqrt(variance), rel=1e-5, abs=1e-7)
    assert compared == 32 and len(seen) == 16
    kept = whole[0].weighting.state_dict()["history"]
    assert kept.keys() == seen.keys()
    for name, numbers in seen.items():
        assert kept[name] == pytest.approx(numbers, rel=1e-9)


def test_a_history_may_be_given(whole, fit, files, monkeypatch, tmp_path):
    """One epoch more after three: what was remembered then, and one visit; and a surface over both."""
    kept = whole[0].weighting.state_dict()["history"]
    features = ("margin_evolution", "margin_fluctuation")
    options = {"epochs": 1, "history": str(files / "whole" / "weights")}
    module, _, _, steps = fit("given", features, callbacks=[VNetSurfaces(points=5, window=16)], **options)
    surface = load_surface(files / "given")
    assert surface.axes == features
    at = (torch.tensor([float(axis[1])]).double() for axis in (surface.delta, surface.u))
    with torch.no_grad():
        assert surface.g[1, 1] == pytest.approx(module.vnet.double()(*at)[0].item(), rel=1e-6)
    now = module.weighting.state_dict()["history"]
    assert now.keys() == kept.keys()
    for record in steps.values():
        for name, u, found in zip(record.ids, record.u.tolist(), record.features.tolist(), strict=True):
            first, mean, variance = kept[name]
            expected = [first, mean / 2 + u / 2, variance / 2 + (u - mean) ** 2 / 4]
            assert now[name] == pytest.approx(expected, rel=1e-6)
            assert found == pytest.approx([expected[1] - first, math.sqrt(expected[2])], rel=1e-5, abs=1e-6)
    with pytest.raises(UserError, match="looks at earlier visits; add margin_evolution"):
        VNetWeighting(features=TRIPLE, history="runs/first/weights")
    with pytest.raises(UserError, match="cannot be read as visits"):
        fit("missing", features, history=str(tmp_path / "none"))
    file, found = tmp_path / "part-0.parquet", read_weights(files / "whole")
    for change, message in (
        ({"id": "x"}, "are not of 16 of 16 training pairs"),
        ({"u": math.nan}, "are not finite of 16 pairs"),
        ({"flipped": ~found["flipped"]}, "are of 16 of 16 training pairs with the other label"),
    ):
        found.assign(**change).to_parquet(file)
        with pytest.raises(UserError, match=message):
            fit("others", features, history=str(tmp_path))
    found.assign(flipped=pd.NA).to_parquet(file)  # labels that nobody knows cannot be compared
    fit("unknown", features, epochs=1, history=str(tmp_path))


def test_weights_are_vnets_of_the_steps_before(whole):
    """The last step's weights by hand: the scale of the five steps before it, and not its own."""
    module, _, _, steps = whole
    rows = [steps[step].features[:, 2:].double() for step in range(6)]
    shares = torch.tensor([0.95 ** (4 - k) for k in range(5)], dtype=torch.double).repeat_interleave(8)
    shares /= shares.sum()
    before = torch.cat(rows[:5])
    mean = shares @ before
    deviation = (shares @ (before - mean).square()).sqrt()
    scaled = ((rows[5] - mean) / deviation).clamp(-5, 5)
    x = torch.cat([steps[5].features[:, :2].double(), scaled], 1)
    with torch.no_grad():
        a, b = module.vnet.double().layers(x).unbind(1)
    module.vnet.float()
    assert scaled.std(0).min() > 0.01
    torch.testing.assert_close(steps[5].a.double(), a, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(steps[5].weight.double(), (a * x[:, 1] + b).sigmoid(), rtol=1e-3, atol=1e-4)
    assert steps[5].weight.std() > 1e-3


def test_micro_batches_change_nothing(whole, fit):
    _, _, _, expected = whole
    module, _, _, found = fit("micro", micro_batch_size=2)
    for step, record in found.items():
        places = [expected[step].ids.index(name) for name in record.ids]
        torch.testing.assert_close(record.features, expected[step].features[places], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(record.weight, expected[step].weight[places], rtol=1e-2, atol=1e-2)
    for name, value in whole[0].vnet.state_dict().items():
        torch.testing.assert_close(module.vnet.state_dict()[name], value, rtol=1e-2, atol=1e-2)


def test_a_resume_is_bit_for_bit(whole, fit, files):
    module, _, _, found = fit("resumed", ckpt=str(files / "three.ckpt"))
    assert sorted(found) == [3, 4, 5]
    for step, record in found.items():
        assert torch.equal(record.weight, whole[3][step].weight)
        assert torch.equal(record.features, whole[3][step].features)
    one, other = module.weighting.state_dict(), whole[0].weighting.state_dict()
    assert one["history"] == other["history"]
    assert all(torch.equal(value, other["vnet"][name]) for name, value in one["vnet"].items())
    with pytest.raises(UserError, match=r"weighting\.features \["):
        fit("other", TRIPLE, ckpt=str(files / "three.ckpt"))


def test_audit_and_probe_ask_with_all_features(whole, tmp_path):
    module, data, trainer, _ = whole
    (probed,) = (callback.frame for callback in trainer.callbacks if isinstance(callback, Probed))
    frame = last_pass(module, data.train_pairs)
    again = last_pass(module, data.train_pairs)
    pd.testing.assert_frame_equal(frame, again)
    np.testing.assert_allclose(frame["weight"], probed["weight"], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(frame["a"], probed["a"], rtol=1e-3, atol=1e-4)
    # Earlier visits were those of this order, so nobody knows the exchanged pair's weight.
    assert probed["swapped_weight"].isna().all() and frame["weight"].std() > 1e-3


def test_surfaces_of_two_features(fit, files, monkeypatch, tmp_path):
    drawn = VNetSurfaces(points=5, window=16, features=("perplexity_difference", "entropy"))
    callbacks = [drawn, WeightGap(probe_pairs=8), WeightRecorder()]
    module, _, _, steps = fit("triple", TRIPLE, callbacks=callbacks, epochs=1)
    surface = load_surface(files / "triple")
    assert surface.axes == ("perplexity_difference", "entropy") and (surface.a == 0).all()
    rows = torch.cat([steps[0].features, steps[1].features]).double()
    assert surface.held == f"dpo loss {np.median(rows[:, 1]):.3g}"
    ends, close = np.quantile(rows[:, 0], [0.005, 0.995]), {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(surface.delta[[0, -1]], ends, **close)
    vnet, loss = module.vnet.double(), float(np.median(rows[:, 1]))
    with torch.no_grad():
        for i, x in enumerate(surface.delta):
            for j, y in enumerate(surface.u):
                values = {"perplexity_difference": x, "dpo_loss": loss, "entropy": y}
                g, _, _ = vnet(**{name: torch.tensor([v], dtype=torch.double) for name, v in values.items()})
                assert surface.g[i, j] == pytest.approx(g.item(), rel=1e-6)
    assert surface.g.std() > 0
    weights = read_weights(files / "triple")
    assert weights["a"].isna().all() and weights["b"].isna().all() and weights["weight"].std() > 0
    gaps = pd.read_csv(files / "triple" / "analysis" / "weight-gap.csv")
    assert gaps.loc[gaps["set"] == "probe", "mean_swapped"].notna().all()  # no earlier visits in it

    write_surface_page([str(files / "triple")], str(tmp_path / "one.png"))
    assert (tmp_path / "one.png").read_bytes()[:4] == b"\x89PNG"
    callbacks = [VNetSurfaces(points=5, window=16, features=("u", "delta"))]  # Delta comes first all the same
    *_, steps = fit("default", ("delta", "u"), callbacks=callbacks, epochs=1)
    surface = load_surface(files / "default")
    assert surface.axes == ("delta", "u") and surface.held == ""
    delta = torch.cat([steps[0].delta, steps[1].delta]).double()
    np.testing.assert_allclose(surface.delta[[0, -1]], np.quantile(delta, [0.005, 0.995]), rtol=1e-5)
    with pytest.raises(UserError, match="are over perplexity_difference and entropy, those of"):
        write_surface_page([str(files / "triple"), str(files / "default")], str(tmp_path / "two.png"))


def test_what_a_run_refuses(fit):
    with pytest.raises(UserError, match="margin_evolution, margin_fluctuation, which need earlier visits"):
        fit("short", ALL, epochs=1)
    with pytest.raises(UserError, match="features is u and entropy, but VNetSurfaces needs two different"):
        fit("surfaces", TRIPLE, callbacks=[VNetSurfaces(features=("u", "entropy"))], epochs=1)
    for features in ((), ("u", "u"), ("u", "length")):
        with pytest.raises(UserError, match="VNet needs one or more different ones of delta, u, perplexity"):
            VNetWeighting(features=features)
    with pytest.raises(UserError, match=r"start_slope is 0\.5, but without u"):
        VNetWeighting(features=TRIPLE, start_slope=0.5)


def test_scale():
    scale = RunningScale(2)
    x = torch.tensor([[1.0, 7.0], [3.0, 7.0]])
    assert torch.equal(scale(x), torch.zeros(2, 2))
    scale.observe(x)
    assert torch.equal(scale(x), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    assert torch.equal(scale(torch.tensor([[99.0, 99.0]])), torch.tensor([[5.0, 0.0]]))


def test_folders(tmp_path):
    """An exported VNet of other features takes them as they are; older exports say their inputs too."""
    vnet = VNet((4,), features=["entropy", "u"])
    vnet.observe(torch.tensor([[0.1, 2.0], [0.5, 3.0]]))
    torch.nn.init.normal_(vnet.layers[-1].weight)
    save_vnet(tmp_path, vnet, {})
    config = json.loads((tmp_path / "vnet_config.json").read_text())
    assert config["inputs"] == ["u", "entropy"] and config["weight"] == "sigmoid(a u + b)"
    u, entropy = torch.randn(2, 6)
    for found, expected in zip(load_vnet(tmp_path)(entropy=entropy, u=u), vnet(u, entropy), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(TypeError, match="got delta besides"):
        vnet(u, entropy, delta=u)
