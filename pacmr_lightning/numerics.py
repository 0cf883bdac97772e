"""What rounds a model's values in another way although weights, tokens and options are the same."""

from __future__ import annotations

import torch


def numerics(device: torch.device | str) -> dict[str, str]:
    """For keys of kept values: the device's kind, torch's version and precision of fp32 products."""
    return {
        "device": torch.device(device).type,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
    }
