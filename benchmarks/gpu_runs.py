"""What gpu_check.py asks of whole runs: the same again, resumed, audited, and by DeepSpeed's stages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from gpu_updates import SHORT, model_folder
from torch import Tensor

from pacmr_lightning.errors import UserError

STEPS, HALF = 6, 3
ZERO_ERROR = 0.05
"""Relative difference of what is trained: ZeRO's AdamW is another kernel, and the base may be bf16."""


def fit(output: Path, *, device: str) -> dict[str, Any]:
    """PACMR-DPO with samples, KL and every callback of the shipped config."""
    _fit(output, "fit", device)
    return {"ok": True, "says": f"{STEPS} updates"}


def again(output: Path, *, device: str) -> dict[str, Any]:
    """Whether the same run twice is the same bit for bit: not an error where kernels add in any order."""
    _fit(output, "again", device)
    return {"ok": True, "says": f"differs by {_difference(output, 'again'):.1e} from the same run"}


def resumed(output: Path, *, device: str) -> dict[str, Any]:
    """From half way on: as far from the whole run as the same run again is, at most twice."""
    found = _resumed(output, "resumed", "fit", device)
    return _against_whole(found, 2 * _difference(output, "again"))


def audit(output: Path) -> dict[str, Any]:
    """A probability for each pair."""
    _pacmr(
        output, "audit", str(_root(output, "fit")), "--scorer", "policy", "--output", str(output / "audit")
    )
    pairs = pd.read_parquet(output / "audit/pairs.parquet")
    return {"ok": bool(pairs["u"].notna().all()), "says": f"{len(pairs)} pairs"}


def zero(output: Path, *, stage: int, device: str) -> dict[str, Any]:
    """One process, against the same run without DeepSpeed."""
    _fit(output, f"zero{stage}", device, *_strategy(stage))
    found = _difference(output, f"zero{stage}")
    return {"ok": found <= ZERO_ERROR, "says": f"differs by {found:.1e} from the run without DeepSpeed"}


def zero_resumed(output: Path, *, device: str) -> dict[str, Any]:
    """ZeRO-2 from half way on, against ZeRO-2."""
    found = _resumed(output, "zero2-resumed", "zero2", device, *_strategy(2))
    return _against_whole(found, ZERO_ERROR)


def _against_whole(found: float, allowed: float) -> dict[str, Any]:
    return {"ok": found <= allowed, "says": f"differs by {found:.1e} from the run that was not interrupted"}


def _strategy(stage: int) -> list[str]:
    return ["--config", f"strategies/zero{stage}"]


def _root(output: Path, name: str) -> Path:
    return output / "runs" / name


def _fit(output: Path, name: str, device: str, *more: str) -> None:
    root = _root(output, name)
    shutil.rmtree(root, ignore_errors=True)
    folder = model_folder(output)
    options = {
        "data.source.train": folder / "short.jsonl",
        "model.policy.model": folder,
        "model.learning_rate": 1e-3,
        "model.weighting.every": 2,
        "model.max_new_tokens": 16,
        "data.max_length": SHORT.prompt[1] + SHORT.response[1],
        "data.global_batch_size": 8,
        "data.meta_batch_size": 16,
        "trainer.max_epochs": -1,
        "trainer.max_steps": STEPS,
        "trainer.val_check_interval": STEPS,
        "trainer.check_val_every_n_epoch": "null",
        "trainer.log_every_n_steps": 2,
        "trainer.devices": 1,
        "trainer.accelerator": "gpu" if device == "cuda" else "cpu",
        "trainer.default_root_dir": root,
        "checkpoint.every_n_train_steps": HALF,
        "checkpoint.save_top_k": -1,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    configs = ["--config", "preference", "--config", "methods/pacmr", *more]
    _pacmr(output, "fit", *configs, *words)


def _pacmr(output: Path, *words: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pacmr_lightning", *words], cwd=output, capture_output=True, text=True
    )
    sys.stderr.write(found.stdout + found.stderr)
    if found.returncode:
        said = (found.stderr.strip() or found.stdout.strip()).splitlines() or [""]
        raise UserError(f"pacmr {words[0]} ended with status {found.returncode}: {said[-1]}")


def _resumed(output: Path, name: str, whole: str, device: str, *more: str) -> float:
    checkpoint = _root(output, whole) / "checkpoints" / f"step-{HALF}.ckpt"
    _fit(output, name, device, *more, "--ckpt_path", str(checkpoint))
    return _difference(output, name, whole)


def _difference(output: Path, name: str, other: str = "fit") -> float:
    a, b = (_trained(_root(output, run)) for run in (name, other))
    return float((a - b).norm() / b.norm())


def _trained(root: Path) -> Tensor:
    """Adapter and VNet."""
    checkpoint = torch.load(root / "checkpoints/last.ckpt", map_location="cpu")
    parts = [*checkpoint["state_dict"].values(), *checkpoint["weighting"]["vnet"].values()]
    return torch.cat([value.double().flatten() for value in parts])
