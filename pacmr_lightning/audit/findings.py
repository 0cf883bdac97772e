"""Labels that are taken for wrong: ranks, probabilities, threshold, and how good each score is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.special import expit
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import average_precision_score, roc_auc_score

from .group_reliability import group_reliability
from .linear_probe import signed_rank_agreement
from .noise_rate import NoiseRate, rate_by
from .scorers import BASIS, NAMES, SCORES, UNSEEN, Scorer


@dataclass(frozen=True)
class Findings:
    """What an audit found in N pairs."""

    pairs: pd.DataFrame
    """N rows by rank: those of ``last_pass`` with ``cross_fit_u`` (NaN where it was not computed),
    ``p_wrong`` (NaN where the rate is not identified), ``suggested`` ("keep" or "flip") and ``rank``."""
    scorer: Scorer
    threshold: float
    """On ``p_wrong``."""
    cut: float | None
    """The same on the score; None where no label is suspect, or all are."""
    rates: dict[Scorer, NoiseRate]
    """By each score that was computed."""
    methods: pd.DataFrame
    """As ``detection_quality`` makes it; the scorer is its first row."""
    groups: pd.DataFrame
    """As ``group_reliability`` makes it, by category and, where pairs have one, annotator."""

    @property
    def rate(self) -> NoiseRate:
        """The scorer's."""
        return self.rates[self.scorer]

    @property
    def doubted(self) -> tuple[str, np.ndarray]:
        """Labels that are compared with the others, by name and as (N,) booleans by rank.

        Suspects, or where there are none the labels that the policy is against.
        """
        if self.suspects:
            return "suspects", self.pairs["suggested"].eq("flip").to_numpy()
        return "labels against the policy", (self.pairs[BASIS[self.scorer]] < 0).to_numpy()

    @property
    def suspects(self) -> int:
        """Number of labels that are taken for wrong."""
        return int((self.pairs["suggested"] == "flip").sum())


def find(pairs: pd.DataFrame, scorer: Scorer, rate: NoiseRate, threshold: float, varies: bool) -> Findings:
    """Rank pairs, and take the labels for wrong that are so with a probability above a threshold.

    Args:
        pairs: N rows of ``scorers.Scored``.
        scorer: whose opinion decides.
        rate: the scorer's noise rate; other scores have their own estimates where it was not given.
        threshold: on the probability that a label is wrong.
        varies: whether the weights are an opinion at all.
    """
    computed: dict[Scorer, bool] = {
        "vnet": varies,
        "dpo": bool(pairs["cross_fit_u"].notna().all()),
        "policy": scorer == "policy",
        "first_visit": "first_visit_u" in pairs,
        "probe": "probe_u" in pairs and bool(pairs["probe_u"].notna().all()),
    }
    rates: dict[Scorer, NoiseRate] = {scorer: rate}
    for name in (name for name in computed if computed[name] and name != scorer):
        known = rate.rate if rate.known else None
        rates[name] = replace(rate_by(pairs, name, known), assumed=rate.assumed)
    wrong = {name: _wrong(pairs, name, found) for name, found in rates.items()}
    ranked = pairs.assign(p_wrong=wrong[scorer])
    # NaN is not above any threshold.
    suspects = {name: p > threshold for name, p in wrong.items()}
    ranked["suggested"] = np.where(suspects[scorer], "flip", "keep")
    methods = [
        Detector(
            NAMES[name],
            -pairs[SCORES[name]].to_numpy(),
            suspects[name],
            *((found.rate, found.stderr) if found.identified else ()),
        )
        for name, found in rates.items()
    ]
    number = int(suspects[scorer].sum())
    # Without a policy u is the probe's own.
    if scorer != "probe" or not pairs["u"].equals(pairs["probe_u"]):
        methods.append(same_number("loss", pairs["loss"].to_numpy(), number))
        if scorer != "policy":
            methods.append(same_number("u", -pairs["u"].to_numpy(), number))
    unseen = [name for name in UNSEEN if computed[name]]
    best = max(unseen, key=lambda name: signed_rank_agreement(pairs[SCORES[name]].to_numpy()), default=None)
    basis, named = ("u", "u") if best is None else (SCORES[best], NAMES[best])
    if learned := confident_learning(f"cleanlab on {named}", pairs[basis].to_numpy(), pairs["id"].tolist()):
        methods.append(learned)
    ranked = ranked.sort_values([SCORES[scorer], "u"], kind="stable", ignore_index=True)
    ranked["rank"] = np.arange(1, len(ranked) + 1)
    score = ranked[SCORES[scorer]]
    cut = None if number in (0, len(ranked)) else float(score.iloc[number - 1 : number + 1].mean())
    groups = group_reliability(ranked, ranked[BASIS[scorer]].to_numpy(), rate)
    quality = detection_quality(methods, pairs["flipped"])
    return Findings(ranked, scorer, threshold, cut, rates, quality, groups)


def _wrong(pairs: pd.DataFrame, scorer: Scorer, rate: NoiseRate) -> np.ndarray:
    """(N,) probability that each label is wrong, which falls where the score rises."""
    wrong = rate.wrong(pairs[BASIS[scorer]].to_numpy())
    if scorer != "vnet" or not rate.identified:
        return wrong
    # A weight depends on more than u. The mean over pairs, which is the expected share, stays.
    return IsotonicRegression(increasing=False).fit_transform(pairs["weight"].to_numpy(), wrong)


@dataclass(frozen=True)
class Detector:
    """One way to find wrong labels, with what it found among N pairs."""

    name: str
    suspicion: np.ndarray
    """(N,) higher where the label is more suspect."""
    suspects: np.ndarray
    """(N,) whether the label is taken for wrong."""
    expected: float = np.nan
    """Its own expected share of wrong labels; NaN where it has none."""
    stderr: float = np.nan


def same_number(name: str, suspicion: np.ndarray, number: int) -> Detector:
    """A score without a threshold of its own, which suspects a given number of labels."""
    suspects = np.zeros(len(suspicion), dtype=bool)
    suspects[np.argsort(-suspicion, kind="stable")[:number]] = True
    return Detector(name, suspicion, suspects)


def confident_learning(name: str, u: np.ndarray, ids: Sequence[str]) -> Detector | None:
    """The choice of cleanlab's confident learning on sigmoid(u); None where cleanlab is not installed.

    It compares two classes, but the labelled response always stands first. So each pair is turned round or
    not by a hash of its id, which knows nothing of labels: the classes are "the first is better" and "the
    second is better", and both are there in equal numbers.
    """
    try:
        from cleanlab.count import estimate_joint
        from cleanlab.filter import find_label_issues
    except ImportError:
        return None
    turned = np.array([hashlib.blake2b(pair.encode(), digest_size=1).digest()[0] % 2 for pair in ids])
    if turned.min() == turned.max():
        return None
    first = expit(np.where(turned, -u, u))
    probabilities = np.stack([first, 1 - first], axis=1)
    suspects = find_label_issues(turned, probabilities, n_jobs=1)
    joint = estimate_joint(turned, probabilities)
    return Detector(name, -u, suspects, float(1 - np.trace(joint)))


def detection_quality(methods: Sequence[Detector], flipped: pd.Series) -> pd.DataFrame:
    """Return one row a method, with its quality by ``flipped`` ((N,) pandas' ``boolean``, NA if unknown).

    ``method``, ``suspects`` (count), ``expected`` and ``expected_stderr`` (share of wrong labels), and over
    the pairs whose truth is known ``precision`` and ``recall`` of the suspects, ``auroc`` and
    ``average_precision`` of the score (NaN where there is nothing to divide by, or only one kind of label).
    """
    known = flipped.notna().to_numpy()
    truth = flipped[known].to_numpy(dtype=bool)
    both = 0 < truth.sum() < len(truth)
    rows = []
    for method in methods:
        score, suspects = method.suspicion[known], method.suspects[known]
        hits = (truth & suspects).sum()
        rows.append(
            {
                "method": method.name,
                "suspects": int(method.suspects.sum()),
                "expected": method.expected,
                "expected_stderr": method.stderr,
                "precision": hits / suspects.sum() if suspects.any() else np.nan,
                "recall": hits / truth.sum() if truth.any() else np.nan,
                "auroc": roc_auc_score(truth, score) if both else np.nan,
                "average_precision": average_precision_score(truth, score) if both else np.nan,
            }
        )
    return pd.DataFrame(rows)
