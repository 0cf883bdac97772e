"""How far apart the weights of right and of wrong labels are, and how well they rank them."""

from __future__ import annotations

from torch import Tensor

NUMBERS = ("mean_unflipped", "mean_flipped", "gap", "auroc", "average_precision")
"""What ``weight_gap`` returns, by name."""


def weight_gap(weights: Tensor, flipped: Tensor) -> dict[str, float | None]:
    """Return the mean weights of unflipped and flipped pairs, and how well low weights rank the flipped ones.

    Args:
        weights: (N,) weights, or any other score that should be low where a label is wrong.
        flipped: (N,) 1 the label is wrong, 0 it is not, -1 unknown; unknown ones are left out.

    Returns:
        ``mean_unflipped``, ``mean_flipped``, their difference ``gap``, and ``auroc`` and
        ``average_precision`` of "the lower the weight, the likelier flipped". None where a number is not
        defined: nothing is known of the flips, there is one kind only, or a weight is NaN. Weights that are
        the same for all pairs rank nothing: no ``auroc`` and no ``average_precision``.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    known = flipped >= 0
    scores, wrong = weights[known].double(), flipped[known] == 1
    found: dict[str, float | None] = dict.fromkeys(NUMBERS)
    if scores.isnan().any():
        return found
    means = [float(part.mean()) if len(part) else None for part in (scores[~wrong], scores[wrong])]
    found["mean_unflipped"], found["mean_flipped"] = means
    if None not in means:
        found["gap"] = float(scores[~wrong].mean() - scores[wrong].mean())
        if scores.min() < scores.max():
            for name, score in (("auroc", roc_auc_score), ("average_precision", average_precision_score)):
                found[name] = round(float(score(wrong.cpu(), -scores.cpu())), 6)
    return found
