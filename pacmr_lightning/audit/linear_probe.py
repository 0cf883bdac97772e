"""Linear probe: Bradley-Terry with a linear reward on hidden states, cross-fitted over groups of pairs."""

import math

import numpy as np
import pandas as pd
from datasets import Dataset
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold
from tqdm import tqdm

from ..datamodules.tokenized_pairs import row_bytes
from ..errors import UserError

FOLDS = 5
VARIANCES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Candidate prior variances of the log-odds."""


def text_groups(rows: Dataset) -> tuple[np.ndarray, list[str]]:
    """Return (N,) group numbers from 0, and notes if the groups are not those of a prompt.

    If a prompt has more than a fold's pairs, such as one instruction for all, groups are pairs connected by
    common responses instead: no response is in two groups, so that none is scored by its own labels.
    """
    prompts = pd.factorize(np.array(rows["prompt"][:], dtype=object))[0]
    if (most := np.bincount(prompts).max()) * FOLDS <= len(prompts):
        return prompts, []
    texts = np.array(list(row_bytes(rows, "chosen_ids", "rejected_ids")), dtype=object)
    ends = pd.factorize(texts.ravel())[0].reshape(-1, 2)
    graph = coo_array((np.ones(len(ends)), tuple(ends.T)), shape=(ends.max() + 1,) * 2)
    groups = pd.factorize(connected_components(graph, directed=False)[1][ends[:, 0]])[0]
    return groups, [
        f"{most:,} of {len(prompts):,} pairs have the same prompt, so pairs with common responses are one "
        f"group of {groups.max() + 1:,}, and labels are scored by those of other groups, not other prompts."
    ]


def check_groups(groups: np.ndarray) -> None:
    """Raise UserError if there are fewer groups than a linear probe has folds."""
    if (number := len(np.unique(groups))) < FOLDS:
        raise UserError(
            f"The pairs form {number} groups without common texts, but a linear probe needs {FOLDS}; give "
            "pairs with other prompts or responses, or audit an adapter or run with --scorer policy."
        )


def probe_log_odds(
    differences: np.ndarray, groups: np.ndarray, share: np.ndarray | None = None
) -> np.ndarray:
    """Return (N,) log-odds in nats that chosen is preferred, by the labels of other groups.

    The penalty is the strongest whose ``signed_rank_agreement`` is within a standard error of the best.
    ``differences`` are (N, D) features, chosen minus rejected, ``groups`` (N,) numbers, such as of prompts.
    (N,) ``share`` of the votes that are for chosen is the label; None: all are for it.
    """
    check_groups(groups)
    share = np.ones(len(groups)) if share is None else share
    scaled = (differences / feature_scale(differences)).astype(np.float32)
    if len(scaled) < scaled.shape[1]:  # the penalty does not change under rotation into the rows' own span
        scaled = np.asarray(np.linalg.qr(scaled.T, mode="r")).T
    parts = list(GroupKFold(FOLDS, shuffle=True, random_state=0).split(scaled, groups=groups))
    log_odds = np.zeros((len(VARIANCES), len(scaled)))
    with tqdm(total=len(parts) * len(VARIANCES), desc="Linear probe", unit="fit") as bar:
        for learned, judged in parts:
            rows = np.concatenate([learned, divided := learned[share[learned] < 1]])
            weight = np.concatenate([share[learned], 1 - share[divided]])
            label = np.where(np.arange(len(rows)) < len(learned), 1, -1)
            mirror = mirror_signs(len(rows)).astype(np.float32)
            # Each fit starts from the last one, from the strongest penalty on.
            model = LogisticRegression(fit_intercept=False, warm_start=True, max_iter=1000)
            for row, variance in zip(log_odds, VARIANCES, strict=True):
                model.set_params(C=variance)
                model.fit(scaled[rows] * mirror[:, None], mirror * label, sample_weight=weight)
                row[judged] = scaled[judged] @ model.coef_[0]
                bar.update()
    ranks = np.array([signed_rank_agreement(row, share) for row in log_odds])
    return log_odds[int(np.argmax(ranks >= ranks.max() - agreement_error(share)))]


def signed_rank_agreement(log_odds: np.ndarray, share: np.ndarray | float = 1.0) -> float:
    """Return the fraction of pairs of (N,) log-odds with a sum above 0 (Wilcoxon's signed ranks).

    With (N,) shares of the votes, those below one half change their sign, and ties are left out. It is 0.5 by
    chance. On unseen labels, the scorer with the higher value also ranks independent label
    errors better.
    """
    lean = np.sign(np.broadcast_to(share, log_odds.shape) - 0.5)
    log_odds = (lean * log_odds)[lean != 0] if lean.any() else np.zeros(1)
    sides = np.repeat([1, 0], len(log_odds))
    return float(roc_auc_score(sides, np.concatenate([log_odds, -log_odds])))


def agreement_error(share: np.ndarray) -> float:
    """Return the standard error of ``signed_rank_agreement`` by chance, for (N,) shares of the votes."""
    return 1 / math.sqrt(3 * max(1, int(np.count_nonzero(share != 0.5))))


def feature_scale(differences: np.ndarray) -> np.ndarray:
    """Return (D,) divisors of features; a logistic regression's C is then the variance of its log-odds."""
    scale = np.sqrt(np.mean(np.square(differences), axis=0, dtype=np.float64)) * np.sqrt(differences.shape[1])
    return np.where(scale > 0, scale, 1)


def mirror_signs(pairs: int) -> np.ndarray:
    """Return (N,) alternating 1 and -1, which give logistic regression its two classes."""
    return np.where(np.arange(pairs) % 2, -1, 1)
