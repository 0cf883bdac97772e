"""Reads what ``training_step`` returned of its pairs, and brings it to the CPU or to all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics.utilities.distributed import gather_all_tensors

from pacmr_lightning.errors import UserError
from pacmr_lightning.ranks import several_ranks
from pacmr_lightning.rewards import PairRecord


def record_of(outputs: Any) -> PairRecord:
    """The record of a step's pairs, from what ``training_step`` returned.

    Raises:
        UserError: the module keeps no records (an SFT run, for one).
    """
    if not isinstance(outputs, Mapping) or "record" not in outputs:
        raise UserError(
            "training_step returned no 'record' of its pairs; use this callback with PreferenceModule only, "
            "or take it out of trainer.callbacks."
        )
    return outputs["record"]


def to_host(record: PairRecord) -> dict[str, np.ndarray]:
    """Columns of a record by field name, (N,) float32 each; fields that are None are left out.

    All of them travel in one transfer, since each transfer from a GPU waits for the kernels before it.
    """
    fields = {
        "u": record.u,
        "delta": record.delta,
        "weight": record.weight,
        "flipped": record.flipped,
        "a": record.a,
        "b": record.b,
    }
    known = {name: column for name, column in fields.items() if column is not None}
    rows = torch.stack([column.detach().float() for column in known.values()]).cpu().numpy()
    return dict(zip(known, rows, strict=True))


def gathered(values: Tensor, device: torch.device) -> list[Tensor]:
    """The ranks' values, which may differ in length, on the CPU."""
    if not several_ranks():
        return [values.cpu()]
    return [part.cpu() for part in gather_all_tensors(values.to(device))]
