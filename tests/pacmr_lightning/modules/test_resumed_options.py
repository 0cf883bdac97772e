"""The record of options in a checkpoint."""

import pytest

from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import CentralDifference
from pacmr_lightning.modules.resumed_options import check_options, flat_options
from pacmr_lightning.objectives import RPOEM
from pacmr_lightning.weighting import AuditedWeights, VNetWeighting


def test_objects_are_known_by_their_options():
    assert flat_options("objective", RPOEM(0.2, momentum=0.3)) == {
        "objective": "RPOEM",
        "objective.beta": 0.2,
        "objective.initial_rate": 0.25,
        "objective.momentum": 0.3,
    }
    weighting = VNetWeighting(estimator=CentralDifference(0.5), learning_rate=0.1, every=3)
    found = flat_options("weighting", weighting)
    expected = {
        "weighting": "VNetWeighting",
        "weighting.outer": "PromptAugmentationConsistency",
        "weighting.estimator.epsilon": 0.5,
        "weighting.learning_rate": 0.1,
        "weighting.every": 3,
        "weighting.virtual_lr": None,
        "weighting.alpha_in_gradient": True,
        "weighting.hidden": [64, 16],
    }
    assert expected.items() <= found.items()


def test_a_file_is_known_by_its_content(tmp_path):
    one, moved = tmp_path / "pairs.parquet", tmp_path / "elsewhere" / "pairs.parquet"
    moved.parent.mkdir()
    for file in (one, moved):
        file.write_text("probabilities")
    saved = flat_options("weighting", AuditedWeights(str(one)))
    saved["planned updates"] = 5
    check_options(saved, flat_options("weighting", AuditedWeights(str(moved))) | {"planned updates": 5}, 3)
    moved.write_text("Probabilities")
    with pytest.raises(
        UserError, match=r"weighting\.audit pairs\.parquet \(.*\) instead of pairs\.parquet \("
    ):
        check_options(saved, flat_options("weighting", AuditedWeights(str(moved))), 3)


def test_sequences_are_plain_values():
    assert flat_options("betas", (0.9, 0.95)) == flat_options("betas", [0.9, 0.95])
    assert flat_options("", {"b": {"c": 1}, "a": {"z", "y"}}) == {"b.c": 1, "a": ["y", "z"]}


def test_a_shorter_run_than_the_checkpoint_is_told(caplog):
    caplog.set_level("INFO")
    check_options({"planned updates": 5}, {"planned updates": 6}, 5)
    assert "Nothing is left" not in caplog.text
    check_options({"planned updates": 5}, {"planned updates": 3}, 5)
    assert "Nothing is left to train: 5 of 3 updates are done" in caplog.text
