"""Dtype of a base model and other numerical settings."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ..errors import UserError, check_choice

AskedDtype = Literal["auto", "float32", "bfloat16"]
Recomputed = bool | Literal["selective"]
"""Activations that are recomputed in backward; "selective": all but products with the base, and attention."""


def base_dtype(asked: AskedDtype, gpu: bool | None = None) -> torch.dtype:
    """Return a frozen base's dtype; "auto" is bfloat16 on a GPU that multiplies it, else float32.

    ``gpu`` None: whether there is one. Most CPUs are much slower in bfloat16.
    """
    check_choice(AskedDtype, dtype=asked)
    if asked != "auto":
        return getattr(torch, asked)
    if gpu is None:  # before Ampere (T4, V100) torch emulates it slowly
        gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if gpu else torch.float32


def recomputes(asked: Recomputed | Literal["auto"]) -> Recomputed:
    """Return what is recomputed in backward; "auto": all on a GPU, until a fit tries it."""
    check_choice(Literal["auto", "selective", True, False], gradient_checkpointing=asked)
    return torch.cuda.is_available() if asked == "auto" else asked


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor with a value that is not finite; None if all are."""
    return next((name for name, value in tensors.items() if not torch.isfinite(value).all()), None)


def check_weights(weights: Mapping[str, torch.Tensor], place: Path) -> None:
    """Raise UserError, before ``place`` is written, if a weight is not finite."""
    if name := not_finite(weights):
        raise UserError(
            f"The weight {name} is not finite, so {place} is not written: the training diverged; lower the "
            "learning rate."
        )


def numerics(device: torch.device | str) -> dict[str, str]:
    """Return cache-key entries: device kind, torch version and precision of fp32 products."""
    return {
        "device": torch.device(device).type,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
    }


def clustered_standard_error(values: np.ndarray, clusters: np.ndarray) -> float:
    """Return the cluster-robust standard error of a mean of (N,) values; NaN for fewer than two clusters.

    sqrt(G / (G - 1) * sum over G clusters of (sum of deviations from the mean)^2) / N.
    """
    sums = np.bincount(clusters, values - values.mean()) if len(values) else np.zeros(0)
    count = len(np.unique(clusters))
    if count < 2:
        return math.nan
    return math.sqrt(count / (count - 1) * np.square(sums).sum()) / len(values)
