"""Suspected label errors: ranks, p, threshold, and the quality of each score."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from sklearn.metrics import average_precision_score, roc_auc_score

from .agreement import Agreement, Votes, agreement
from .annotators import annotator_reliability, group_reliability
from .manual_review import Decisions, decided_wrong, settled
from .scorers import NAMES, SCORES, Scorer


@dataclass(frozen=True)
class Findings:
    """Findings of an audit on N pairs."""

    pairs: pd.DataFrame
    """By rank: scores of the pairs, ``p`` (NaN if the labels cannot be predicted), ``suggested`` ("keep" or
    "swap", whatever was decided), ``rank`` and perhaps ``decision``.
    """
    scorer: Scorer
    alone: Scorer
    """The scorer, or the one that verdicts of judges are combined with."""
    threshold: float
    cut: float | None
    """The threshold on the score; None if no score parts the suspected labels from the others."""
    agreement: Agreement
    """By the scorer; pairs in the order in which they were scored."""
    contradicted: tuple[float, float, float]
    """Expected fraction of the undecided suspected labels that another annotator would contradict, and its
    95% interval; NaN without such labels.
    """
    methods: pd.DataFrame
    """By score, the scorer's first: ``detection_quality``, and the expected fraction ``contradicted``."""
    groups: pd.DataFrame

    @property
    def suspected(self) -> int:
        """Number of suspected label errors: undecided, or decided to be wrong."""
        return int(self.methods["suspected"][0])


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
    alone: Scorer,
    decided: Decisions | None = None,
) -> Findings:
    """Rank pairs of ``ScoredPairs``, and mark labels with p below a threshold as suspected errors.

    With the scorer "judge", ``alone`` is the scorer that the verdicts are combined with; with decisions it is
    "combined". Counts, ranks and ``groups`` follow those in ``decided``, estimates and suggestions do not.
    """
    ties = pairs["tie"].to_numpy()
    pairs = pairs.assign(flipped=pairs["flipped"].mask(ties))  # the other way round a tie says the same
    suspected = is_suspected(found, ties, threshold)
    ranked = pairs.assign(p=found.p if found.usable else np.nan, p_majority=found.p_majority)
    ranked["suggested"] = np.where(suspected, "swap", "keep")
    ranked = ranked if decided is None else decided.follow(ranked)
    done, wrong = settled(ranked).to_numpy(), decided_wrong(ranked).to_numpy()
    methods, shares, known = [], [], found.rate if found.known else None
    own = replace(votes, verdicts=np.zeros((len(pairs), 0)))  # those of annotators alone
    for name in (scorer, *_computed(pairs, scorer, alone)):
        u, fit = pairs[SCORES[name]].to_numpy(), found
        if name != scorer:
            fit = agreement(u, pairs["prompt"].to_numpy(), own, known, resamples=0)
        which = is_suspected(fit, ties, threshold)
        left = which & ~done
        shares.append(fit.contradicted(left) if left.any() else (np.nan, np.nan, np.nan))
        row = {"method": NAMES[name], "contradicted": shares[-1][0]}
        methods.append(row | detection_quality(u, np.where(done, wrong, which), pairs["flipped"]))
    # With several votes on a pair p does not follow the score.
    by = [*(["tie"] if found.usable else []), "place", SCORES[scorer], "u"]
    ranked = ranked.assign(place=ranked["p"].fillna(0.5)).sort_values(by, kind="stable", ignore_index=True)
    ranked = ranked.drop(columns="place").assign(rank=np.arange(1, len(ranked) + 1))
    low, high = (pairs[SCORES[scorer]][which] for which in (suspected, ~suspected))
    cut = float(low.max() + high.min()) / 2 if low.max() < high.min() else None
    told = found.usable or (votes.total > 1).any()  # else nothing says whether a label is right
    reliability = annotator_reliability(pairs, found.margin) if told and "annotator" in pairs else None
    groups = group_reliability(ranked, reliability)
    return Findings(ranked, scorer, alone, threshold, cut, found, shares[0], pd.DataFrame(methods), groups)


def _computed(pairs: pd.DataFrame, scorer: Scorer, alone: Scorer) -> list[Scorer]:
    """Return the other scorers of which the pairs have a score, and the policy only if it is ``alone``."""
    there: dict[Scorer, bool] = {
        "dpo": bool(pairs["cross_fit_u"].notna().all()),
        "policy": alone == "policy",
        "probe": "probe_u" in pairs and bool(pairs["probe_u"].notna().all()),
    }
    return [name for name, computed in there.items() if computed and name != scorer]


def detection_quality(u: np.ndarray, suspected: np.ndarray, flipped: pd.Series) -> dict[str, float]:
    """Return the number of (N,) suspected labels, and the quality of detection by ``flipped`` (NA: unknown).

    ``precision`` and ``recall`` are of the suspected labels, ``auroc`` and ``average_precision`` of low u.
    """
    known = flipped.notna().to_numpy()
    truth = flipped[known].to_numpy(dtype=bool)
    both = 0 < truth.sum() < len(truth)
    score, marked = -u[known], suspected[known]
    hits = (truth & marked).sum()
    return {
        "suspected": int(suspected.sum()),
        "precision": hits / marked.sum() if marked.any() else np.nan,
        "recall": hits / truth.sum() if truth.any() else np.nan,
        "auroc": roc_auc_score(truth, score) if both else np.nan,
        "average_precision": average_precision_score(truth, score) if both else np.nan,
    }
