"""Health in real runs from YAML that are resumed, stopped or faulty."""

import warnings

import pytest
import torch
import yaml

from pacmr_lightning import cli
from pacmr_lightning.callbacks import health
from pacmr_lightning.embedded_world import World
from pacmr_lightning.weighting import VNetWeighting


@pytest.fixture
def fit(tmp_path, tiny_llama, write_rows, preference_config):
    """Fit up to 12 updates of 8 pairs, in a folder ``run``; return what was warned of."""
    model = tiny_llama(tmp_path / "model", num_hidden_layers=2, initializer_range=0.2)
    pairs = write_rows(World().preference_rows(200, 0))

    def fit(*arguments, log=2, module=None, outer="SoftPromptConsistency", weighting=None, **options):
        vnet = {"every": log, "outer": {"class_path": outer}, **(weighting or {})}
        content = preference_config(
            model,
            pairs,
            {"weighting": {"class_path": "VNetWeighting", "init_args": vnet}, **(module or {})},
            {"meta_batch_size": 8, "noise_rate": 0.4},
            [{"class_path": "Health", "init_args": options}],
            **{"max_steps": 12, "log_every_n_steps": log, "limit_val_batches": 0},
        )
        content["checkpoint"] = {"every_n_train_steps": 3, "save_top_k": -1}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        words = ["fit", "--config", str(path), "--trainer.default_root_dir", str(tmp_path / "run")]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cli.main([*words, *arguments])
        return [str(w.message) for w in caught if "updates" in str(w.message) and "; try" in str(w.message)]

    return fit


def test_an_alarm_stops_and_a_resume_goes_on(fit, tmp_path, monkeypatch):
    """VNet's slope grows by a tenth per update and exceeds 1.25 in the third."""
    update = VNetWeighting.update

    def steeper(self, *arguments, **options):
        found = update(self, *arguments, **options)
        with torch.no_grad():
            self.vnet.layers[-1].bias[0] *= 1.1
        return found

    monkeypatch.setattr(VNetWeighting, "update", steeper)
    slow = {"learning_rate": 1e-8}
    (said,) = fit(weighting=slow, on_alarm="stop")
    assert "after 6 updates VNet's slope a is 1.33 times that of its start" in said
    assert "training stops here" in said and "alarm-6.ckpt has its state." in said
    checkpoints = tmp_path / "run/checkpoints"
    assert torch.load(checkpoints / "alarm-6.ckpt", weights_only=True)["global_step"] == 6
    assert not fit("--ckpt_path", str(checkpoints / "alarm-6.ckpt"), weighting=slow, on_alarm="stop")
    assert torch.load(checkpoints / "last.ckpt", weights_only=True)["global_step"] == 12
    (said,) = fit("--ckpt_path", str(checkpoints / "step-3.ckpt"), "--trainer.max_steps", "8", weighting=slow)
    assert "after 6 updates" in said and said.endswith("or an earlier checkpoint.")


def test_causes_that_are_no_alarm(fit, monkeypatch):
    """One warning each: no confident pair at first, then concentrated weights and a saturated loss."""
    for name, limit in {"MIN_EFFECTIVE": 0.99, "MAX_SATURATED": 0.01, "IDLE": 1}.items():
        monkeypatch.setattr(health, name, limit)
    objective = {"class_path": "DPO", "init_args": {"beta": 5.0}}
    said = fit(
        *("--trainer.max_steps", "24"),
        log=1,
        outer="PromptAugmentationConsistency",
        module={"learning_rate": 0.5, "objective": objective},
        weighting={"start_slope": 40.0},
        max_slope_ratio=None,
    )
    assert len(said) == 3
    assert said[0].startswith("After 1 updates VNet has learned nothing: none of its 1 meta-batches had a")
    assert any("effective sample size is" in one and "; try a floor of the weights" in one for one in said)
    assert any("sigmoid(u) above 0.999" in one for one in said)
