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
    if asked == "auto":
        # Before Ampere (T4, V100) torch only emulates it, and slowly.
        slow = gpu is None and _gpu(gpu) and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if _gpu(gpu) and not slow else torch.float32
    return getattr(torch, asked)


def recomputes(asked: bool | Literal["auto"], gpu: bool | None = None) -> bool:
    """Return whether activations are computed again in backward; "auto": on a GPU.

    Args:
        asked: the option.
        gpu: as above.
    """
    return _gpu(gpu) if asked == "auto" else asked


def wide(values: torch.Tensor) -> torch.Tensor:
    """Values for sums that must not round: in float64, which MPS does not have."""
    return values if values.device.type == "mps" else values.double()


def _gpu(known: bool | None) -> bool:
    return torch.cuda.is_available() if known is None else known


def numerics(device: torch.device | str) -> dict[str, str]:
    """For keys of kept values: the device's kind, torch's version and precision of fp32 products."""
    return {
        "device": torch.device(device).type,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
    }
