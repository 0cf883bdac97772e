"""A kind of label noise: which training labels are flipped on purpose."""

from datasets import Dataset

from pacmr_lightning.datamodules import LabelNoise
from pacmr_lightning.datamodules.reading import values_of
from pacmr_lightning.errors import UserError


class LengthBias(LabelNoise):
    """Annotators who sometimes take the longer response for the better one.

    Args:
        strength: probability of a flip where the rejected response is the longer one, in [0, 1].
    """

    def __init__(self, strength: float):
        if not 0 <= strength <= 1:
            raise UserError(f"strength is {strength}, but it must lie in [0, 1].")
        self.strength = strength

    def probabilities(self, rows: Dataset) -> list[float]:
        """``strength`` where the rejected response is longer, else 0."""
        responses = values_of(rows, "chosen", "rejected")
        return [self.strength if len(rejected) > len(chosen) else 0.0 for chosen, rejected in responses]
