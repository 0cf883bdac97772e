"""Interval: actions after a number of updates, or ten times a run."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

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
