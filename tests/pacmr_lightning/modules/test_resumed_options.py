"""The record of options in a checkpoint."""

import pytest

from pacmr_lightning.errors import UserError
from pacmr_lightning.modules.resumed_options import check_options, flat_options
from pacmr_lightning.weighting import AuditedWeights


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


def test_a_shorter_run_than_the_checkpoint_is_told(caplog):
    caplog.set_level("INFO")
    check_options({"planned updates": 5}, {"planned updates": 6}, 5)
    assert "Nothing is left" not in caplog.text
    check_options({"planned updates": 5}, {"planned updates": 3}, 5)
    assert "Nothing is left to train: 5 of 3 updates are done" in caplog.text
