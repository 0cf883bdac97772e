"""A linear reward on the untouched model's states, learned from labels and asked about pairs it has not seen.

A pretrained model knows what makes responses differ long before it has been trained on these labels. Labels
are told from each other by log-odds w^T d, where d is what its layers hold of the chosen response minus what
they hold of the rejected one: Bradley-Terry with a linear reward. w has few parameters and is penalised,
so it cannot learn single labels by heart as a policy does, and each pair is judged by a w that was fitted to
other prompts.
"""

from __future__ import annotations

import math

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold
from tqdm import tqdm

from ..errors import UserError

FOLDS = 5
"""Parts of the prompts; a part is judged by what the others have taught."""
VARIANCES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Of the log-odds before any label is seen, among which the labels choose."""


def judge_by_probe(
    differences: np.ndarray, prompts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, str]:
    """``probe_log_odds`` of the states, or of states and lengths where that agrees with more labels.

    Labels may follow the length more surely than what a small model's states say (TL;DR), or hardly at all
    (HH), and then the choice of a penalty is worse with one feature more. So the labels choose, by more than
    a standard error.

    Args:
        differences: (N, D) of states, chosen minus rejected.
        prompts: (N,) numbers of the pairs' prompts.
        lengths: (N,) ``Pairs.log_length_ratios``.

    Returns:
        (N,) in nats, and what a reader has to know of it.

    Raises:
        UserError: there are fewer prompts than parts.
    """
    states = differences / feature_scale(differences)
    # By itself it is scaled as all of the states are together.
    with_lengths = np.concatenate([states, (lengths / feature_scale(lengths[:, None]))[:, None]], axis=1)
    judged = _log_odds(states, prompts), _log_odds(with_lengths, prompts)
    without, both = map(agreement, judged)
    better = both > without + agreement_error(len(lengths))
    note = (
        f"The probe weighs states and lengths: of labels that it has not seen it agrees with {both:.0%}, by "
        f"the states alone with {without:.0%} (signed ranks; 50% by chance)."
        if better
        else f"The probe weighs states alone ({without:.0%} of unseen labels; with lengths, {both:.0%})."
    )
    return judged[int(better)], note


def probe_log_odds(differences: np.ndarray, prompts: np.ndarray, seed: int = 0) -> np.ndarray:
    """Log-odds that a labeller prefers the chosen responses, by what labels of other prompts teach.

    The penalty is the strongest one under which unseen labels rank within a standard error of the best: the
    only thing that a pair's own label has a part in.

    Args:
        differences: (N, D) of features, chosen minus rejected.
        prompts: (N,) numbers of the pairs' prompts; pairs of one prompt are judged together.
        seed: of the parts.

    Returns:
        (N,) in nats.

    Raises:
        UserError: there are fewer prompts than parts.
    """
    return _log_odds(differences / feature_scale(differences), prompts, seed)


def _log_odds(scaled: np.ndarray, prompts: np.ndarray, seed: int = 0) -> np.ndarray:
    if (number := len(np.unique(prompts))) < FOLDS:
        raise UserError(
            f"The training pairs have {number} prompts, but a linear probe learns from {FOLDS} parts of "
            "them; use --scorer policy."
        )
    scaled = scaled.astype(np.float32)
    parts = list(GroupKFold(FOLDS, shuffle=True, random_state=seed).split(scaled, groups=prompts))
    found = np.zeros((len(VARIANCES), len(scaled)))
    with tqdm(total=len(parts) * len(VARIANCES), desc="Linear probe", unit="fit") as bar:
        for learned, judged in parts:
            mirror = mirror_signs(len(learned)).astype(np.float32)
            # From the strongest penalty on, each fit begins where the last one ended.
            model = LogisticRegression(fit_intercept=False, warm_start=True, max_iter=1000)
            for row, variance in zip(found, VARIANCES, strict=True):
                model.set_params(C=variance)
                model.fit(scaled[learned] * mirror[:, None], mirror)
                row[judged] = scaled[judged] @ model.coef_[0]
                bar.update()
    ranks = np.array([agreement(row) for row in found])
    return found[int(np.argmax(ranks >= ranks.max() - agreement_error(len(scaled))))]


def agreement(log_odds: np.ndarray) -> float:
    """Share of two of (N,) log-odds whose sum is above 0, as in Wilcoxon's signed ranks: 0.5 by chance.

    Of judges that have not seen the labels the one that agrees with more of them also ranks wrong ones
    better, where labels are wrong independently of the pair.
    """
    sides = np.repeat([1, 0], len(log_odds))
    return float(roc_auc_score(sides, np.concatenate([log_odds, -log_odds])))


def agreement_error(pairs: int) -> float:
    """Standard error of ``agreement`` by chance."""
    return 1 / math.sqrt(3 * pairs)


def feature_scale(differences: np.ndarray) -> np.ndarray:
    """(D,) by which (N, D) features are divided to have mean square length 1; 1 for those that are always 0.

    The inverse of a logistic regression's penalty is then the variance of the log-odds.
    """
    scale = np.sqrt(np.mean(np.square(differences), axis=0, dtype=np.float64)) * np.sqrt(differences.shape[1])
    return np.where(scale > 0, scale, 1)


def mirror_signs(pairs: int) -> np.ndarray:
    """(N,) 1 and -1 by turns, for pairs and labels alike.

    To a likelihood without intercept a pair and its mirror image are the same, and two kinds are needed.
    """
    return np.where(np.arange(pairs) % 2, -1, 1)
