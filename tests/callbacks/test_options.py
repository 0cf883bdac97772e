"""Options of callbacks that are out of range."""

import pytest

from pacmr_lightning import callbacks
from pacmr_lightning.errors import UserError


@pytest.mark.parametrize(
    ("callback", "options"),
    [
        ("GoldReward", {"samples": 1, "max_new_tokens": 0, "batch_size": 0, "every": 0}),
        ("Health", {"max_slope_ratio": 1.0}),
        ("Health", {"min_effective_sample_size": 1.0, "max_saturated_share": 0.0}),
        ("Health", {"max_idle_updates": 0, "lora_after": 0}),
        ("RunSummary", {"window": 0}),
        ("SampleResponses", {"prompts": 0, "every": 0, "max_new_tokens": 0}),
        ("Throughput", {"window_size": 1}),
        ("VNetSurfaces", {"steps": [500, 0], "points": 1, "window": 0, "every": 1.5}),
        ("WeightDistributions", {"steps": [-1], "window": 0, "every": 0.0}),
        ("WeightGap", {"window": 0, "probe_pairs": 0, "every": 0}),
        ("WeightRecorder", {"rows_per_part": 0}),
        ("Snapshots", {"steps": [0, 5]}),
    ],
)
def test_bad_options(callback, options):
    for name, value in options.items():
        with pytest.raises(UserError) as caught:
            getattr(callbacks, callback)(**{name: value})
        assert f"{name} is {value}, but " in str(caught.value)


def test_snapshots_need_a_step():
    with pytest.raises(UserError, match="updates of at least 1"):
        callbacks.Snapshots([])
