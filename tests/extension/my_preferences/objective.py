"""An objective: the loss of a pair."""

from torch import Tensor

from pacmr_lightning.errors import UserError
from pacmr_lightning.objectives import Objective
from pacmr_lightning.rewards import Rewards


class SLiC(Objective):
    """Hinge loss max(0, margin - u) of the implicit reward difference (arXiv 2305.10425, 2309.06657).

    Args:
        beta: see ``Objective``.
        margin: u from which on a pair pulls no more; above 0.
    """

    def __init__(self, beta: float = 0.1, margin: float = 1.0):
        super().__init__(beta)
        if not margin > 0:
            raise UserError(f"margin is {margin}, but it must be above 0 (SLiC-HF uses 1).")
        self.margin = margin

    def __call__(self, rewards: Rewards) -> Tensor:
        """(N,) losses, unreduced."""
        return (self.margin - rewards.u).clamp(min=0)
