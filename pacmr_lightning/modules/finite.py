"""End of a run whose values are not finite."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UserError
from ..meta_gradient.gradient import Direction, norm
from ..strategies.ranks import on_all_ranks, sum_over_ranks


def check_finite(losses: Tensor, gradient: Direction, ids: Sequence[str] = (), of: str = "loss") -> None:
    """Raise UserError on all ranks if a loss, or the gradient, is not finite on one of them.

    ``losses`` are (N,) with ``ids``, or 0-dim; an empty ``gradient`` is not checked. ``of`` names the losses.
    """
    bad = ~torch.isfinite(losses)
    count = torch.stack([bad.any(), ~torch.isfinite(norm(gradient)) if gradient else bad.any()]).float()
    sum_over_ranks([count])
    if not count.any():
        return
    found = on_all_ranks([ids[i] for i in bad.nonzero()[:, 0].tolist()] if ids else [])
    what, look = f"The {of}" if count[0] else "The gradient", ""
    if found:
        what = (
            f"The loss of {len(found)} pairs ({', '.join(found[:5]) + (', ...' if len(found) > 5 else '')})"
        )
        look = "look at these pairs, "
    raise UserError(f"{what} is not a finite number; {look}lower the learning rate, or use float32.")
