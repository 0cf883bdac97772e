"""Health: computed signs, and real runs from YAML that are resumed, stopped or faulty."""

import warnings
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch.strategies import SingleDeviceStrategy

from pacmr_lightning import cli
from pacmr_lightning.callbacks.health import SATURATED_U, Health
from pacmr_lightning.embedded_world import World
from pacmr_lightning.runs.folder import read_weights
from pacmr_lightning.weighting import VNetWeighting


@pytest.fixture
def config(tmp_path, tiny_llama, write_rows, preference_config):
    """Write a config file of 24 updates of 8 pairs, with a VNet update in every second."""
    model = tiny_llama(tmp_path / "model", num_hidden_layers=2, initializer_range=0.2)
    pairs = write_rows(World().preference_rows(200, 0))

    def write(every=2, log=2, lr=0.01, outer=None, slope=1.0, vnet_lr=0.05, floor=0.0, **health):
        weighting = {"every": every, "learning_rate": vnet_lr, "start_slope": slope, "floor": floor}
        weighting["outer"] = outer or {"class_path": "SoftPromptConsistency"}
        content = preference_config(
            model,
            pairs,
            {"weighting": {"class_path": "VNetWeighting", "init_args": weighting}, "learning_rate": lr},
            {"meta_batch_size": 8, "noise_rate": 0.4},
            [
                {"class_path": "WeightRecorder"},
                {"class_path": "Health", "init_args": health},
            ],
            **{"max_steps": 24, "log_every_n_steps": log, "limit_val_batches": 0},
        )
        content["checkpoint"] = {"every_n_train_steps": 1, "save_top_k": -1}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write


def fit(config, folder, *arguments):
    """Fit, and return the logged ``warnings/...`` by updates done, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cli.main(["fit", "--config", config, "--trainer.default_root_dir", str(folder), *arguments])
    curves = pd.read_csv(folder / "metrics.csv")
    curves = curves[curves["warnings/alarm"].notna()].set_index("step")
    curves.index += 1
    said = [str(w.message) for w in caught if "updates" in str(w.message) and "; try" in str(w.message)]
    return curves, said


def test_the_numbers_of_a_run_and_its_resume(config, tmp_path):
    """Each check equals the recorded weights and logged values, also after a resume."""
    path = config(max_slope_ratio=1.0001, floor=0.3)
    curves, said = fit(path, tmp_path / "run")
    assert curves.index.tolist() == list(range(2, 25, 2))
    visits = read_weights(tmp_path / "run")
    for step, row in curves.iterrows():
        part = visits[visits["step"].between(step - 2, step - 1)]
        g, u = part["weight"].astype(float), part["u"]
        assert row["warnings/effective_sample_size"] == pytest.approx(g.sum() ** 2 / (len(g) * (g**2).sum()))
        assert row["warnings/saturated_share"] == pytest.approx((u > SATURATED_U).mean())
        assert row["warnings/slope_ratio"] == pytest.approx(part["a"].mean(), rel=1e-5)
        a, b = (torch.tensor(part[name].to_numpy(), dtype=torch.double) for name in "ab")
        log_g = (0.3 + 0.7 * (a * (zero := torch.zeros_like(a, requires_grad=True)) + b).sigmoid()).log()
        (slope,) = torch.autograd.grad(log_g.sum(), zero)
        assert row["warnings/restraint"] == pytest.approx(float(1 - 2 * slope.mean()), rel=1e-4)
    assert len(said) == 1 and "times that of its start" in said[0]
    alarms = curves["warnings/alarm"]
    assert 0 < alarms.sum() < len(alarms) and alarms.is_monotonic_increasing

    health = [name for name in curves if name.startswith("warnings/")]
    for step in (3, 23):
        checkpoint = tmp_path / "run" / "checkpoints" / f"step-{step}.ckpt"
        again, said_again = fit(path, tmp_path / "run", "--ckpt_path", str(checkpoint))
        pd.testing.assert_frame_equal(again[health], curves[health])
        assert said_again == (said if step == 3 else []), "it warns again, or not at all"


def test_an_alarm_stops_and_a_resume_goes_on(config, tmp_path, monkeypatch):
    """VNet's slope grows by a tenth per update and exceeds 1.25 in the third."""
    update = VNetWeighting.update

    def steeper(self, *arguments, **options):
        found = update(self, *arguments, **options)
        with torch.no_grad():
            self.vnet.layers[-1].bias[0] *= 1.1
        return found

    monkeypatch.setattr(VNetWeighting, "update", steeper)
    path = config(vnet_lr=1e-8, on_alarm="stop")
    curves, said = fit(path, tmp_path / "run")
    assert curves["warnings/alarm"].to_dict() == {2: 0.0, 4: 0.0, 6: 1.0}
    assert curves["warnings/slope_ratio"].tolist() == pytest.approx([1.1, 1.21, 1.331], rel=1e-4)
    assert len(said) == 1
    assert "after 6 updates VNet's slope a is 1.33 times that of its start" in said[0]
    assert "alarm-6.ckpt" in said[0]
    checkpoint = tmp_path / "run" / "checkpoints" / "alarm-6.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 6
    curves, said = fit(path, tmp_path / "run", "--ckpt_path", str(checkpoint))
    assert curves.index[-1] == 24 and not said and curves["warnings/alarm"].iloc[-1] == 1.0


def test_causes_that_are_no_alarm(config, tmp_path):
    """One warning each: no confident pair, concentrated weights, a policy that does not move."""
    strict = {"class_path": "PromptAugmentationConsistency", "init_args": {"tau": 0.999999}}
    # Slope 40 makes weights of 0 and 1; VNet updates are skipped, so it stays.
    limits = {"min_effective_sample_size": 0.99, "max_idle_updates": 15, "lora_after": 20}
    path = config(every=1, log=1, outer=strict, slope=40.0, **limits)
    curves, said = fit(path, tmp_path / "run")
    assert curves["warnings/idle_vnet_updates"].tolist() == list(range(1, 25))
    assert len(said) == 2
    assert any("effective sample size" in sentence for sentence in said)
    assert any("was confident enough in 15 VNet updates" in sentence for sentence in said)
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert set(checkpoint["Health"]["warned"]) == {"effective_sample_size", "idle_vnet_updates"}


def test_dead_adapters_and_saturated_pairs(config, tmp_path, monkeypatch):
    """The optimizer lacks the adapters of q_proj, and the others learn too fast."""
    from pacmr_lightning.modules import PreferenceModule

    optimizers = PreferenceModule.configure_optimizers

    def frozen(self):
        found = optimizers(self)
        groups = found["optimizer"].param_groups
        names = list(self.policy.adapter())
        groups[0]["params"] = [
            p for n, p in zip(names, groups[0]["params"], strict=True) if "q_proj" not in n
        ]
        return found

    monkeypatch.setattr(PreferenceModule, "configure_optimizers", frozen)
    path = config(lr=0.5, max_saturated_share=0.01, max_slope_ratio=None)
    curves, said = fit(path, tmp_path / "run", "--model.objective", "DPO", "--model.objective.beta", "5")
    (dead,) = [sentence for sentence in said if "B is 0" in sentence]
    assert "in 2 of 14 LoRA layers" in dead and "q_proj.lora_B" in dead and "After 20 updates" in dead
    assert curves["warnings/saturated_share"].max() > 0.01
    assert sum("sigmoid(u) above 0.999" in sentence for sentence in said) == 1


def test_sums_are_added_up_on_the_strategys_device():
    """Also before the first step, on the device, since NCCL cannot reduce on the CPU."""
    trainer = SimpleNamespace(strategy=SingleDeviceStrategy("meta"), is_global_zero=True)
    health = Health()
    assert health._total(trainer).device.type == "meta"
    health._sums = torch.ones(5, dtype=torch.double)
    trainer.strategy = SingleDeviceStrategy("cpu")
    health._total(trainer).zero_()
    assert health._total(trainer).tolist() == [1.0] * 5
