"""A learning rate far above that of a model's size (test_docs.py), and the points of short runs' curves."""

from types import SimpleNamespace

import pytest

from pacmr_lightning.modules.schedule import learning_rate_by_size, log_short_run
from pacmr_lightning.policy.base_model import parameter_count


@pytest.mark.parametrize(
    ("asked", "used", "said"),
    [
        (None, 6e-5, "6e-05 is chosen for 500,000,000 parameters"),
        (5e-4, 5e-4, "0.0005 is 8.3 times the 6e-05 for 500,000,000 parameters"),  # degenerated on HH
        (1.8e-4, 1.8e-4, "0.00018 is 3 times"),
        (1.7e-4, 1.7e-4, ""),
    ],
)
def test_a_rate_far_above_that_of_the_size_is_told(caplog, asked, used, said):
    assert learning_rate_by_size(asked, 500_000_000, updates=30) == used
    assert said in caplog.text and bool(caplog.text) == bool(said)


def test_a_long_run_of_a_large_model_is_told(caplog):
    for parameters, updates, far in (
        (500_000_000, 277, False),
        (500_000_000, 300, True),
        (135_000_000, 2000, False),
    ):
        caplog.clear()
        learning_rate_by_size(None, parameters, updates)
        assert ("learning_rate 6e-05 times the root of 300 updates is 0.001; above" in caplog.text) == far


def test_parameters_are_counted_without_weights(tiny_llama, tmp_path):
    folder = tiny_llama(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    assert parameter_count(folder) == 512 * 16 * 2 + 4 * 16 * 16 + 3 * 16 * 16 + 3 * 16


@pytest.mark.parametrize(("updates", "every", "used"), [(1, 10, 1), (19, 10, 1), (20, 10, 10), (5, 0, 0)])
def test_a_short_run_logs_each_update(monkeypatch, caplog, updates, every, used):
    monkeypatch.setattr("pacmr_lightning.modules.schedule.planned_updates", lambda trainer: updates)
    trainer = SimpleNamespace(log_every_n_steps=every, loggers=["one"])
    log_short_run(trainer)
    assert trainer.log_every_n_steps == used
    assert (f"each of the run's {updates} updates" in caplog.text) == (used != every)
    silent = SimpleNamespace(log_every_n_steps=every, loggers=[])
    log_short_run(silent)
    assert silent.log_every_n_steps == every
