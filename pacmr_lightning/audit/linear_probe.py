"""A linear reward on the base model's states, fitted to labels of other prompts than those that it judges.

The log-odds of a label are w^T d, where d is what the model's layers hold of the chosen response minus what
they hold of the rejected one: Bradley-Terry with a linear reward. w has few parameters and is penalised, so
it cannot learn single labels by heart as a policy does.
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


def probe_log_odds(differences: np.ndarray, prompts: np.ndarray, seed: int = 0) -> np.ndarray:
    """(N,) log-odds in nats that a labeller prefers the chosen responses, by labels of other prompts.

    The penalty is the strongest one under which unseen labels rank within a standard error of the best: the
    only thing that a pair's own label has a part in.

    Args:
        differences: (N, D) of features, chosen minus rejected.
        prompts: (N,) numbers of the pairs' prompts; pairs of one prompt are judged together.
        seed: of the parts.

    Raises:
        UserError: there are fewer prompts than parts.
    """
    if (number := len(np.unique(prompts))) < FOLDS:
        raise UserError(
            f"The training pairs have {number} prompts, but a linear probe learns from {FOLDS} parts of "
            "them; use --scorer policy."
        )
    scaled = (differences / feature_scale(differences)).astype(np.float32)
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
    ranks = np.array([signed_rank_agreement(row) for row in found])
    return found[int(np.argmax(ranks >= ranks.max() - agreement_error(len(scaled))))]


def signed_rank_agreement(log_odds: np.ndarray) -> float:
    """Share of two of (N,) log-odds whose sum is above 0, as in Wilcoxon's signed ranks: 0.5 by chance.

    Of scorers that have not seen the labels the one that agrees with more of them also ranks wrong ones
    better, where labels are wrong independently of the pair.
    """
    sides = np.repeat([1, 0], len(log_odds))
    return float(roc_auc_score(sides, np.concatenate([log_odds, -log_odds])))


def agreement_error(pairs: int) -> float:
    """Standard error of ``signed_rank_agreement`` by chance."""
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
