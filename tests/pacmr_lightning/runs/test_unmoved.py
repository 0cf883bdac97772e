"""A policy that still equals its reference."""

import pytest

from pacmr_lightning.runs.folder import unmoved

STILL = {"val/loss": 0.6928, "val/rewards/margins": 0.0007, "val/kl": 2.6e-7}


def test_still():
    said = unmoved(STILL)
    assert (
        said == "The policy did not move: its validation loss is 0.6928 and its KL to the reference 2.6e-07"
    )


@pytest.mark.parametrize("changed", [{"val/rewards/margins": -0.02}, {"val/kl": 1e-3}, {"val/loss": None}])
def test_moved_or_not_validated(changed):
    assert unmoved(STILL | changed) is None
