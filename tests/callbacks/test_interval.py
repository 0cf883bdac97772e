"""Interval: regular actions, and fewer pictures where they take too much of the training time."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from pacmr_lightning.callbacks import SuspectedPairs, VNetSurfaces, WeightDistributions, WeightGap
from pacmr_lightning.callbacks import interval as module
from pacmr_lightning.callbacks.interval import Interval
from pacmr_lightning.errors import UserError


@pytest.mark.parametrize("updates", [1, 7, 10, 95, 200, 2901])
def test_ten_times_in_a_run_of_any_length(updates):
    def steps_of(every):
        interval = Interval(every)
        trainer = SimpleNamespace(estimated_stepping_batches=updates)
        steps = []
        for trainer.global_step in range(1, updates + 1):
            steps += [trainer.global_step] * interval.is_due(trainer)
        return steps

    steps = steps_of(0.1)
    assert len(steps) == min(10, updates) and steps[-1] == updates
    assert all(abs(b - a - updates / 10) < 1 for a, b in pairwise(steps) if updates >= 10)
    assert steps_of(10) == list(range(10, updates + 1, 10)) and steps_of(None) == []
    assert steps_of(1.0) == [updates]


def test_a_share_of_a_run_without_an_end():
    trainer = SimpleNamespace(estimated_stepping_batches=float("inf"), global_step=3)
    assert Interval(3).is_due(trainer)
    with pytest.raises(UserError, match=r"every is 0\.1, a share of the run, but the run has no end"):
        Interval(0.1).is_due(trainer)


UPDATES = 100


@pytest.fixture
def drawn(monkeypatch, capsys):
    """Return a function: when callbacks draw in a run of 100 updates, by a clock that only it moves."""

    def run(intervals, update=1.0, picture=1.0, slower=0.0):
        clock = SimpleNamespace(now=0.0)
        monkeypatch.setattr(module, "perf_counter", lambda: clock.now)
        said = []
        monkeypatch.setattr(module, "rank_zero_info", said.append)
        callbacks = [type(name, (), {"interval": each})() for name, each in intervals.items()]
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        trainer = SimpleNamespace(
            estimated_stepping_batches=UPDATES, callbacks=[object(), *callbacks], strategy=strategy
        )
        steps = {name: [] for name in intervals}
        for trainer.global_step in range(1, UPDATES + 1):
            clock.now += update
            for name, interval in intervals.items():
                if interval.is_due(trainer):
                    steps[name].append(trainer.global_step)
                    with interval.acting(trainer):
                        clock.now += picture + slower * (len(steps[name]) == 1)
        seconds = sum(each.seconds for each in intervals.values())
        assert seconds == pytest.approx(picture * sum(len(each) - 1 for each in steps.values()))
        return steps, said, seconds / clock.now

    return run


def limited(every=0.1):
    return Interval(every, limited=True)


TENTHS = list(range(10, UPDATES + 1, 10))


def test_cheap_pictures_are_all_drawn(drawn):
    steps, said, share = drawn({"One": limited(), "Two": limited()}, picture=0.09)
    assert steps == {"One": TENTHS, "Two": TENTHS} and not said and share < module.SHARE


@pytest.mark.parametrize("picture", [0.15, 0.5, 3.0])
def test_expensive_pictures_are_rarer_after_the_first(drawn, picture):
    """Two callbacks share the limit, draw at the same updates, and say it once."""
    steps, said, share = drawn({"One": limited(), "Two": limited()}, picture=picture)
    assert steps["One"] == steps["Two"] and steps["One"][:2] == [10, 20] and len(steps["One"]) < 10
    (sentence,) = said
    assert "One, Two: fewer pictures than every 0.1 of the run" in sentence and "2%" in sentence
    # A picture may be drawn while the limit is nearly reached.
    assert share <= module.SHARE + 2 * picture / UPDATES


def test_the_first_picture_is_free(drawn):
    """It loads matplotlib, so that a run of seconds would have no other."""
    steps, said, share = drawn({"One": limited()}, picture=0.1, slower=5.0)
    assert steps["One"] == TENTHS and not said and share < module.SHARE


def test_what_is_not_limited(drawn):
    """A number of updates is the user's own choice, and other callbacks' time does not count."""
    steps, said, _ = drawn({"Own": limited(10), "Probe": Interval(0.1)}, picture=50)
    assert steps == {"Own": TENTHS, "Probe": TENTHS} and not said
    steps, said, _ = drawn({"Probe": Interval(0.1), "One": limited()}, picture=0.15)
    assert steps == {"Probe": TENTHS, "One": TENTHS} and not said


def test_another_fit_starts_anew(drawn):
    interval = limited()
    first, *_ = drawn({"One": interval}, picture=3)
    interval.restart()
    assert drawn({"One": interval}, picture=3)[0] == first


def test_all_pictures_are_limited():
    kinds = (VNetSurfaces, WeightDistributions, SuspectedPairs)
    assert all(kind().interval.limited for kind in kinds)
    assert not any(kind(every=5).interval.limited for kind in kinds)
    assert not WeightGap(every=0.1).interval.limited, "its table is data"


def test_a_run_always_draws_last(fit, tmp_path, monkeypatch):
    """Of twelve updates that take no time, each of which would be drawn."""

    class Pictures(WeightDistributions):
        shown: list[int] = []  # noqa: RUF012

        def show(self, trainer, *_):
            self.shown.append(trainer.global_step)

    ticks = iter(range(10**6))
    monkeypatch.setattr(module, "perf_counter", lambda: next(ticks))
    fit(tmp_path, [Pictures(every=0.05)])
    assert Pictures.shown == [1, 2, 12]
    assert (tmp_path / "analysis/weight-distributions-step-00012.png").exists()
