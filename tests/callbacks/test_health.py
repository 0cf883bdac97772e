"""Health in real runs from YAML that are resumed or faulty."""

import warnings

import pytest
import torch

from pacmr_lightning import cli
from pacmr_lightning.callbacks import health
from pacmr_lightning.weighting import VNetWeighting

from ..conftest import short_fit, with_callback


@pytest.fixture
def fit(tmp_path, tiny_llama):
    """Fit up to 12 updates of 8 pairs, in a folder ``run``; return what was warned of."""
    model = tiny_llama(tmp_path / "model", num_hidden_layers=2, initializer_range=0.2)

    def fit(*more):
        words = f"""--data.source EmbeddedWorld --data.source.pairs 200
            --data.global_batch_size 8 --data.meta_batch_size 8 --data.noise_rate 0.4
            --model.weighting VNetWeighting --trainer.max_steps 12 --trainer.limit_val_batches 0
            --trainer.default_root_dir {tmp_path / "run"}
            --checkpoint.every_n_train_steps 3 --checkpoint.save_top_k -1 {" ".join(more)}"""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cli.main(short_fit(model, words))
        return [str(w.message) for w in caught if "updates" in str(w.message) and "; try" in str(w.message)]

    return fit


def test_self_confirmation(fit, tmp_path, monkeypatch):
    """VNet's slope grows by a tenth per update, exceeds 1.25 in the third; a resumed run is warned once."""
    update = VNetWeighting.update

    def steeper(self, *arguments, **options):
        found = update(self, *arguments, **options)
        with torch.no_grad():
            self.vnet.layers[-1].bias[0] *= 1.1
        return found

    monkeypatch.setattr(VNetWeighting, "update", steeper)
    slow = """--model.weighting.every 2 --model.weighting.outer SoftPromptConsistency
        --model.weighting.learning_rate 1e-8 --trainer.log_every_n_steps 2"""
    (said,) = fit(slow, with_callback("Health"))
    assert "After 6 updates VNet's slope a is 1.33 times its start" in said
    checkpoints = tmp_path / "run/checkpoints"
    assert not fit(slow, with_callback("Health"), f"--ckpt_path {checkpoints}/step-9.ckpt")
    again = f"--ckpt_path {checkpoints}/step-3.ckpt --trainer.max_steps 8"
    (said,) = fit(slow, with_callback("Health"), again)
    assert "After 6 updates" in said and said.endswith("or an earlier checkpoint.")


def test_other_causes(fit, monkeypatch):
    for name, limit in {"MIN_EFFECTIVE": 0.99, "MAX_SATURATED": 0.01}.items():
        monkeypatch.setattr(health, name, limit)
    words = """--model.objective DPO --model.objective.beta 5 --model.learning_rate 0.5
        --model.weighting.every 1 --model.weighting.outer PromptAugmentationConsistency
        --model.weighting.start_slope 40 --trainer.max_steps 24 --trainer.log_every_n_steps 1"""
    said = fit(words, with_callback("Health", max_slope_ratio="null"))
    assert len(said) == 2
    assert any("effective sample size is" in one and "; try a floor of the weights" in one for one in said)
    assert any("sigmoid(u) above 0.999" in one for one in said)
