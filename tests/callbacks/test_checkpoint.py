"""Checkpoints: the end of a run is always there, and chosen steps stay."""

import pytest
import torch

from pacmr_lightning.callbacks import RunCheckpoint, Snapshots
from pacmr_lightning.errors import UserError


def step_of(path):
    return torch.load(path, weights_only=True)["global_step"]


@pytest.mark.parametrize("every", [5, 4, 12])
def test_last_is_the_end(fit, tmp_path, make_module, every):
    """Twelve updates; then six more from there, as one run does them."""
    folder = tmp_path / "checkpoints"
    options = {"every_n_train_steps": every, "save_last": True, "dirpath": folder}
    fit(tmp_path, [RunCheckpoint(**options)])
    assert step_of(folder / "last.ckpt") == 12 and not (folder / "last-v1.ckpt").exists()
    resumed, whole = make_module(), make_module()
    fit(tmp_path, [RunCheckpoint(**options)], resumed, resume=folder / "last.ckpt", max_epochs=5)
    fit(tmp_path / "whole", [], whole, max_epochs=5, enable_checkpointing=False)
    assert torch.equal(resumed.slope, whole.slope)
    assert step_of(folder / "last.ckpt") == 20


def test_snapshots(fit, tmp_path):
    fit(tmp_path, [Snapshots([3, 8, 100])], enable_checkpointing=False)
    folder = tmp_path / "checkpoints"
    assert {path.name: step_of(path) for path in folder.iterdir()} == {
        "snapshot-3.ckpt": 3,
        "snapshot-8.ckpt": 8,
    }
    for steps in ([], [0, 5]):
        with pytest.raises(UserError, match="steps of at least 1"):
            Snapshots(steps)
