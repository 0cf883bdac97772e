"""Options of callbacks that are out of range, and modules or data that do not fit them."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from pacmr_lightning import callbacks
from pacmr_lightning.callbacks.recurring import Recurring
from pacmr_lightning.errors import UserError

from .conftest import Module, fit


@pytest.mark.parametrize(
    ("callback", "options"),
    [
        ("GoldReward", {"samples": 1, "max_new_tokens": 0, "batch_size": 0, "every": 0}),
        ("Health", {"max_slope_ratio": 1.0}),
        ("KLGuard", {"pairs": 0, "every": 0.0, "warn": 0, "stop": 0}),
        ("RunSummary", {"window": 0}),
        ("SampleResponses", {"prompts": 0, "every": 0, "max_new_tokens": 0}),
        ("Throughput", {"window_size": 1}),
        ("VNetSurfaces", {"steps": [500, 0], "points": 1, "window": 0, "every": 1.5}),
        ("WeightDistributions", {"steps": [-1], "window": 0, "every": 0.0}),
        ("WeightGap", {"probe_pairs": 0, "every": 0}),
        ("WeightRecorder", {"rows_per_part": 0}),
    ],
)
def test_bad_options(callback, options):
    for name, value in options.items():
        with pytest.raises(UserError) as caught:
            getattr(callbacks, callback)(**{name: value})
        assert f"{name} is {value}, but " in str(caught.value)


OF_PREFERENCES = (callbacks.Health, callbacks.KLGuard, callbacks.SampleResponses, callbacks.SequenceKL)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (callbacks.WeightRecorder, "no 'record' of its pairs"),
        (callbacks.WeightGap, "this run's data has no train_pairs"),
        *((kind, f"{kind.__name__} is for PreferenceModule; remove it") for kind in OF_PREFERENCES),
    ],
)
def test_another_module_or_data(callback, message, tmp_path, monkeypatch):
    monkeypatch.setattr(Module, "training_step", lambda self, batch, batch_idx: None)
    with pytest.raises(UserError, match=message):
        fit(tmp_path, [callback()])


@pytest.mark.parametrize("updates", [1, 7, 10, 95, 2901])
def test_an_interval_may_be_a_share_of_the_run(updates):
    """A tenth is due ten times in a run of any length, and at its end."""

    def steps_of(every):
        interval, trainer, steps = Recurring(every), SimpleNamespace(estimated_stepping_batches=updates), []
        for trainer.global_step in range(1, updates + 1):
            steps += [trainer.global_step] * interval.is_due(trainer)
        return steps

    steps = steps_of(0.1)
    assert len(steps) == min(10, updates) and steps[-1] == updates
    assert all(abs(b - a - updates / 10) < 1 for a, b in pairwise(steps) if updates >= 10)
    assert steps_of(10) == list(range(10, updates + 1, 10)) and steps_of(1.0) == [updates]
    endless = SimpleNamespace(estimated_stepping_batches=float("inf"), global_step=3)
    with pytest.raises(UserError, match=r"every is 0\.1, a share of the run, but the run has no end"):
        Recurring(0.1).is_due(endless)
