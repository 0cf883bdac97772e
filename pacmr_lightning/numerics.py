"""The dtype of a base model, and other settings of a machine that change the last bits of its values."""

from __future__ import annotations

from typing import Literal

import torch

AskedDtype = Literal["auto", "float32", "bfloat16"]


def base_dtype(asked: AskedDtype, gpu: bool | None = None) -> torch.dtype:
    """The dtype of a frozen base; "auto" is bfloat16 on a GPU that multiplies it, and else float32.

    Few CPUs multiply bfloat16 (/proc/cpuinfo: ``avx512_bf16`` or ``amx_bf16``), and these are faster with it;
    all others are much slower.

    Args:
        asked: the option.
        gpu: whether the run uses one; None: whether there is one.
    """
    if asked != "auto":
        return getattr(torch, asked)
    if gpu is None:  # before Ampere (T4, V100) torch only emulates it, and slowly
        gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if gpu else torch.float32


def recomputes(asked: bool | Literal["auto"], gpu: bool | None = None) -> bool:
    """Whether activations are computed again in backward; "auto": on a GPU. ``gpu`` is as above."""
    if asked != "auto":
        return asked
    return torch.cuda.is_available() if gpu is None else gpu


def wide(values: torch.Tensor) -> torch.Tensor:
    """Values for sums that must not round: in float64, which MPS does not have."""
    return values if values.device.type == "mps" else values.double()


def numerics(device: torch.device | str) -> dict[str, str]:
    """For keys of kept values: the device's kind, torch's version and precision of fp32 products."""
    return {
        "device": torch.device(device).type,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
    }
