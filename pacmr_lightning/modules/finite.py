"""Ends a run with a sentence where a loss or a gradient is NaN or infinite, before the update."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UserError
from ..gradient import norm
from ..ranks import on_all_ranks, sum_over_ranks


def check_finite(losses: Tensor, ids: list[str], gradient: dict[str, Tensor]) -> None:
    """Stops all ranks, with the same sentence, before an update spreads what is no number.

    Args:
        losses: (N,) of this rank's pairs.
        ids: their ids.
        gradient: the same on all ranks.

    Raises:
        UserError: the loss of a pair, or the gradient, is NaN or infinite on some rank.
    """
    bad = ~torch.isfinite(losses)
    count = (bad.any() | ~torch.isfinite(norm(gradient))).float()
    sum_over_ranks([count])
    if not count:
        return
    found = on_all_ranks([ids[i] for i in bad.nonzero()[:, 0].tolist()])
    names = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
    what = f"The loss of {len(found)} pairs ({names})" if found else "The gradient"
    raise UserError(
        f"{what} is not a finite number; look at these pairs, lower the learning rate, or use float32."
    )
