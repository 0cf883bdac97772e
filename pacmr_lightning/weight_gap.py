"""How far apart the weights of right and of wrong labels are, and how well they rank them (torchmetrics)."""

from __future__ import annotations

from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

NUMBERS = ("mean_unflipped", "mean_flipped", "gap", "auroc", "average_precision")
"""What ``weight_gap`` returns, by name."""


def weight_gap(weights: Tensor, flipped: Tensor) -> dict[str, float | None]:
    """How far apart the weights of flipped pairs are from the others, and how well they rank them.

    Args:
        weights: (N,) weights, or any other score that should be low where a label is wrong.
        flipped: (N,) 1 the label is wrong, 0 it is not, -1 unknown; unknown ones are left out.

    Returns:
        ``mean_unflipped``, ``mean_flipped``, their difference ``gap``, and ``auroc`` and
        ``average_precision`` of "the lower the weight, the likelier flipped". None where a number is not
        defined: nothing is known of the flips, there is one kind only, or a weight is NaN. Weights that are
        the same for all pairs rank nothing: no ``auroc`` and no ``average_precision``.
    """
    known = flipped >= 0
    scores, wrong = weights[known].double(), flipped[known] == 1
    found: dict[str, float | None] = dict.fromkeys(NUMBERS)
    if scores.isnan().any():
        return found
    mean_unflipped, mean_flipped = (
        float(part.mean()) if len(part) else None for part in (scores[~wrong], scores[wrong])
    )
    found |= {"mean_unflipped": mean_unflipped, "mean_flipped": mean_flipped}
    if mean_unflipped is None or mean_flipped is None:
        return found
    found["gap"] = mean_unflipped - mean_flipped
    # Ranks in [0, 1], because torchmetrics squashes other scores by a sigmoid, under which large ones tie.
    levels, level = scores.unique(return_inverse=True)
    if len(levels) > 1:
        suspicion = 1 - level.double() / (len(levels) - 1)
        for name, score in (("auroc", binary_auroc), ("average_precision", binary_average_precision)):
            # They sum in float32, where a perfect score can come out as 1.0000001.
            found[name] = round(float(score(suspicion, wrong.long())), 6)
    return found
