"""Checkpoint files: atomic writes, safe reads, and the choice of the one to resume from."""

import os
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from ..errors import UserError, first_line, is_out_of_memory
from ..files import local_path, replacing
from ..policy.numerics import check_weights

LAST = "last.ckpt"
CONTENT = {"global_step", "state_dict", "loops"}
TRAINING = {"optimizer_states", "lr_schedulers", "callbacks"}
"""Keys of a checkpoint from which training can go on."""


class CheckpointFiles(TorchCheckpointIO):
    """Plugin for checkpoint files that survive kills and power cuts, unlike Lightning's own."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: None = None
    ) -> None:
        """Write the file atomically and sync it; remove partial files of a killed run."""
        path = Path(path)
        check_weights(checkpoint.get("state_dict", {}), path)
        for left in path.parent.glob(".*.ckpt.*.partial"):
            left.unlink(missing_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        if os.name == "posix":  # elsewhere folders cannot be opened
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return tensors and plain values; a pickle, which could run code, is refused."""
        return super().load_checkpoint(path, map_location, weights_only=True)


def to_resume_from(
    ckpt_path: str | None, folder: Path, training: bool, configs: Sequence[Path] = ()
) -> tuple[str | None, int]:
    """Return the checkpoint of ``--ckpt_path`` and its number of policy updates; None and 0 for none.

    "last" means ``last.ckpt`` in ``folder``, or if that is missing or damaged the good file with the most
    updates. If not for ``training``, weights alone are enough, and "last" must exist. Of ``configs`` none may
    be that of this run with checkpoints elsewhere, where it was moved to.
    """
    if ckpt_path is None:
        return None, 0
    files = sorted(folder.glob("*.ckpt"))
    if ckpt_path != "last":
        path = local_path(ckpt_path)
        if not path.is_file():
            raise UserError(f"The checkpoint {path} does not exist; name another, or last for the newest.")
        try:
            step = _step(path, training)
            _check_sums(path)
        except _DamagedError as error:
            raise UserError(
                f"The checkpoint {path} cannot be used: {error}; name another, or last for the newest good "
                "one of the run."
            ) from None
        return str(path), step
    newest, step = _newest(files, training)
    if newest is not None:
        return str(newest), step
    if files:
        raise UserError(
            f"None of the {len(files)} checkpoints in {folder} can be used; put a good copy of one there, or "
            "delete them to train from the beginning."
        )
    for config in configs:
        trainer = yaml.safe_load(config.read_text(encoding="utf-8")).get("trainer") or {}
        of_this_run = trainer.get("default_root_dir") == str(folder.parent)
        if of_this_run and any((config.parent / folder.name).glob("*.ckpt")):
            raise UserError(f"No checkpoint is in {folder}; add --output {config.parent}, which has one.")
    if not training:
        raise UserError(f"There is no checkpoint in {folder}; train first, or name a checkpoint's file.")
    rank_zero_info(f"There is no checkpoint in {folder} yet; training starts from the beginning.")
    return None, 0


class _DamagedError(Exception):
    """Error of an unusable checkpoint file; the message is the reason."""


def _newest(paths: list[Path], training: bool) -> tuple[Path | None, int]:
    steps = {}
    for path in paths:
        try:
            steps[path] = _step(path, training)
        except _DamagedError as error:
            rank_zero_warn(f"The checkpoint {path} is skipped: {error}.")
    # A run that resumed from an earlier checkpoint leaves files with more updates.
    for path in sorted(steps, key=lambda path: (path.name == LAST, steps[path]), reverse=True):
        try:
            _check_sums(path)
            return path, steps[path]
        except _DamagedError as error:
            rank_zero_warn(f"The checkpoint {path} is skipped: {error}.")
    return None, 0


def _step(path: Path, training: bool) -> int:
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # the kind depends on where the file is damaged
        raise _DamagedError("it is empty" if path.stat().st_size == 0 else unreadable(error)) from None
    if not isinstance(content, dict) or not content.keys() >= CONTENT:
        raise _DamagedError("it is not a checkpoint of a run")
    if training and not content.keys() >= TRAINING:
        raise _DamagedError("it holds weights only, from which training cannot go on")
    return int(content["global_step"])


def unreadable(error: Exception) -> str:
    """Return why a checkpoint cannot be read, from torch's error."""
    if isinstance(error, PermissionError) or is_out_of_memory(error):
        return first_line(error)
    code = "unsupported global" in str(error).lower()
    return "it holds more than tensors and plain values, which could run code" if code else "it is damaged"


def _check_sums(path: Path) -> None:
    """Check the whole file against its checksums, which torch ignores."""
    with suppress(Exception), zipfile.ZipFile(path) as file:
        if file.testzip() is None:
            return
    raise _DamagedError("it is damaged")
