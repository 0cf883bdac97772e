"""Suspected label errors: ranks, p, threshold, and the quality of each score."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import expit
from sklearn.metrics import average_precision_score, roc_auc_score

from .agreement import Agreement, Votes, agreement
from .group_reliability import group_reliability
from .linear_probe import signed_rank_agreement
from .scorers import NAMES, SCORES, UNSEEN, Scorer
from .several_votes import annotator_reliability


@dataclass(frozen=True)
class Findings:
    """Findings of an audit on N pairs."""

    pairs: pd.DataFrame
    """By rank: scores of the pairs, ``p`` (NaN if the labels cannot be predicted), ``suggested`` ("keep" or
    "swap") and ``rank``.
    """
    scorer: Scorer
    alone: Scorer
    """The scorer, or the one that verdicts of judges are combined with."""
    threshold: float
    cut: float | None
    """The threshold on the score; None if no label, or every label, is suspected."""
    agreement: Agreement
    """By the scorer; pairs in the order in which they were scored."""
    contradicted: tuple[float, float, float]
    """Expected fraction of the suspected labels that another annotator would contradict, and its 95%
    interval; NaN without suspected labels.
    """
    methods: pd.DataFrame
    """``detection_quality``, with the scorer in the first row."""
    groups: pd.DataFrame

    @property
    def doubted(self) -> tuple[str, np.ndarray]:
        """Name and (N,) mask by rank of suspected label errors, else of labels against the scorer."""
        if self.suspected:
            return "suspected label errors", self.pairs["suggested"].eq("swap").to_numpy()
        return "contradicted labels", (self.pairs[SCORES[self.scorer]] < 0).to_numpy()

    @property
    def suspected(self) -> int:
        """Number of suspected label errors."""
        return int((self.pairs["suggested"] == "swap").sum())


def is_suspected(found: Agreement, ties: np.ndarray, threshold: float) -> np.ndarray:
    """Return a mask of the (N,) labels that are suspected: p below the threshold, where p says something.

    A tie is never suspected.
    """
    return found.usable & ~ties & (found.p < threshold)


def find(
    pairs: pd.DataFrame,
    scorer: Scorer,
    found: Agreement,
    votes: Votes,
    threshold: float,
    alone: Scorer | None = None,
) -> Findings:
    """Rank pairs of ``ScoredPairs``, and mark labels with p below a threshold as suspected errors.

    With the scorer "judge", ``alone`` is the scorer that the verdicts are combined with; with decisions it is
    "combined".
    """
    ties = pairs["tie"].to_numpy()
    suspected = is_suspected(found, ties, threshold)
    ranked = pairs.assign(p=found.p if found.usable else np.nan, p_majority=found.p_majority)
    ranked["suggested"] = np.where(suspected, "swap", "keep")
    share = found.contradicted(suspected) if suspected.any() else (np.nan, np.nan, np.nan)
    methods = [Detector(NAMES[scorer], -pairs[SCORES[scorer]].to_numpy(), suspected, share[0])]
    for name in _computed(pairs, scorer, alone):
        other = agreement(pairs[SCORES[name]].to_numpy(), pairs["prompt"].to_numpy(), votes, resamples=0)
        by_other = is_suspected(other, ties, threshold)
        expected = other.contradicted(by_other)[0] if by_other.any() else np.nan
        methods.append(Detector(NAMES[name], -pairs[SCORES[name]].to_numpy(), by_other, expected))
    unseen = [name for name in (*_computed(pairs, None, None), scorer) if name in UNSEEN]
    best = max(unseen, key=lambda name: signed_rank_agreement(pairs[SCORES[name]].to_numpy()), default=None)
    basis, named = ("u", "u") if best is None else (SCORES[best], NAMES[best])
    if learned := confident_learning(f"cleanlab on {named}", pairs[basis].to_numpy(), pairs["id"].tolist()):
        methods.append(learned)
    ranked = ranked.sort_values([SCORES[scorer], "u"], kind="stable", ignore_index=True)
    ranked["rank"] = np.arange(1, len(ranked) + 1)
    score = ranked[SCORES[scorer]]
    number = int(suspected.sum())
    cut = None if number in (0, len(ranked)) else float(score.iloc[number - 1 : number + 1].mean())
    quality = detection_quality(methods, pairs["flipped"])
    reliability = annotator_reliability(pairs, found.margin) if "annotator" in pairs else None
    groups = group_reliability(ranked, reliability)
    return Findings(ranked, scorer, alone or scorer, threshold, cut, found, share, quality, groups)


def _computed(pairs: pd.DataFrame, scorer: Scorer | None, alone: Scorer | None) -> list[Scorer]:
    """Return the other scorers of which the pairs have a score, and the policy only if it is ``alone``."""
    there: dict[Scorer, bool] = {
        "dpo": bool(pairs["cross_fit_u"].notna().all()),
        "policy": alone == "policy",
        "probe": "probe_u" in pairs and bool(pairs["probe_u"].notna().all()),
    }
    return [name for name, computed in there.items() if computed and name != scorer]


@dataclass(frozen=True)
class Detector:
    """Results of a method for label error detection on N pairs."""

    name: str
    suspicion: np.ndarray
    """(N,) score, higher for more suspected labels."""
    suspected: np.ndarray
    contradicted: float = np.nan
    """Expected fraction of the suspected labels that another annotator would contradict; NaN if unknown."""


def confident_learning(name: str, u: np.ndarray, ids: Sequence[str]) -> Detector | None:
    """Return cleanlab's confident learning on sigmoid(u); None if cleanlab is not installed.

    It needs two classes, so a hash of the id puts the chosen response first or second.
    """
    try:
        from cleanlab.filter import find_label_issues
    except ImportError:
        return None
    turned = np.array([hashlib.blake2b(pair.encode(), digest_size=1).digest()[0] % 2 for pair in ids])
    if turned.min() == turned.max():
        return None
    first = expit(np.where(turned, -u, u))
    probabilities = np.stack([first, 1 - first], axis=1)
    suspected = find_label_issues(turned, probabilities, n_jobs=1)
    return Detector(name, -u, suspected)


def detection_quality(methods: Sequence[Detector], flipped: pd.Series) -> pd.DataFrame:
    """Return one row per method: suspected errors, and quality by (N,) ``flipped`` (NA: unknown).

    ``precision`` and ``recall`` are of the suspected errors, the other two of the score.
    """
    known = flipped.notna().to_numpy()
    truth = flipped[known].to_numpy(dtype=bool)
    both = 0 < truth.sum() < len(truth)
    rows = []
    for method in methods:
        score, suspected = method.suspicion[known], method.suspected[known]
        hits = (truth & suspected).sum()
        rows.append(
            {
                "method": method.name,
                "suspected": int(method.suspected.sum()),
                "contradicted": method.contradicted,
                "precision": hits / suspected.sum() if suspected.any() else np.nan,
                "recall": hits / truth.sum() if truth.any() else np.nan,
                "auroc": roc_auc_score(truth, score) if both else np.nan,
                "average_precision": average_precision_score(truth, score) if both else np.nan,
            }
        )
    return pd.DataFrame(rows)
