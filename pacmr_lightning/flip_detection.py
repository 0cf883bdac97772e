"""Weight gap between unflipped and flipped pairs, and ranking of flips by weight."""

from torch import Tensor

NUMBERS = ("mean_unflipped", "mean_flipped", "gap", "auroc", "average_precision")


def weight_gap(weights: Tensor, flipped: Tensor) -> dict[str, float | None]:
    """Return the mean weights, their gap, and AUROC and average precision of low weights for flips.

    ``weights`` are (N,), or other scores that are low for wrong labels; ``flipped`` (N,) 1 for a wrong label,
    0 for a right one, -1 for unknown, left out. None if undefined: no known flips, only one kind, a NaN
    weight, or for ``auroc`` and ``average_precision`` equal weights.
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
