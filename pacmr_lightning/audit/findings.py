"""Suspected label errors: ranks, probabilities, threshold, and the quality of each score."""

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
    """Findings of an audit on N pairs."""

    pairs: pd.DataFrame
    """By rank: ``last_pass`` with ``cross_fit_u``, ``p_wrong`` (NaN if the rate is not identified),
    ``suggested`` ("keep" or "swap") and ``rank``.
    """
    scorer: Scorer
    alone: Scorer
    """The scorer, or the one that votes of judges are combined with."""
    threshold: float
    cut: float | None
    """The threshold on the score; None if no label, or every label, is suspected."""
    rates: dict[Scorer, NoiseRate]
    methods: pd.DataFrame
    """``detection_quality``, with the scorer in the first row."""
    groups: pd.DataFrame

    @property
    def rate(self) -> NoiseRate:
        """Noise rate by the scorer."""
        return self.rates[self.scorer]

    @property
    def doubted(self) -> tuple[str, np.ndarray]:
        """Name and (N,) mask by rank of suspected label errors, else of labels against the scorer."""
        if self.suspected:
            return "suspected label errors", self.pairs["suggested"].eq("swap").to_numpy()
        return "contradicted labels", (self.pairs[BASIS[self.scorer]] < 0).to_numpy()

    @property
    def suspected(self) -> int:
        """Number of suspected label errors."""
        return int((self.pairs["suggested"] == "swap").sum())


def find(
    pairs: pd.DataFrame,
    scorer: Scorer,
    rate: NoiseRate,
    threshold: float,
    varies: bool,
    alone: Scorer | None = None,
) -> Findings:
    """Rank pairs of ``ScoredPairs``, and mark labels with P(wrong) above a threshold as suspected errors.

    With the scorer "judge", ``alone`` is the scorer that the votes are combined with; with decisions it is
    "combined".
    """
    computed: dict[Scorer, bool] = {
        "vnet": varies,
        "dpo": bool(pairs["cross_fit_u"].notna().all()),
        "policy": "policy" in (scorer, alone),
        "pre_update": "pre_update_u" in pairs,
        "probe": "probe_u" in pairs and bool(pairs["probe_u"].notna().all()),
        "judge": False,
        "combined": False,
    }
    rates: dict[Scorer, NoiseRate] = {scorer: rate}
    for name in (name for name in computed if computed[name] and name != scorer):
        known = rate.rate if rate.known else None
        rates[name] = replace(rate_by(pairs, name, known), assumed=rate.assumed)
    wrong = {name: _wrong(pairs, name, found) for name, found in rates.items()}
    ranked = pairs.assign(p_wrong=wrong[scorer])
    suspected = {name: p > threshold for name, p in wrong.items()}
    ranked["suggested"] = np.where(suspected[scorer], "swap", "keep")
    methods = [
        Detector(
            NAMES[name],
            -pairs[SCORES[name]].to_numpy(),
            suspected[name],
            *((found.rate, found.stderr) if found.identified else ()),
        )
        for name, found in rates.items()
    ]
    number = int(suspected[scorer].sum())
    # Without a policy u is the probe's.
    if "probe_u" not in pairs or not pairs["u"].equals(pairs["probe_u"]):
        methods.append(same_number("loss", pairs["loss"].to_numpy(), number))
        if "policy" not in (scorer, alone):
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
    return Findings(ranked, scorer, alone or scorer, threshold, cut, rates, quality, groups)


def _wrong(pairs: pd.DataFrame, scorer: Scorer, rate: NoiseRate) -> np.ndarray:
    wrong = rate.wrong(pairs[BASIS[scorer]].to_numpy())
    if scorer != "vnet" or not rate.identified:
        return wrong
    # A weight depends on more than u. Isotonic regression keeps the mean, which is the noise rate.
    return IsotonicRegression(increasing=False).fit_transform(pairs["weight"].to_numpy(), wrong)


@dataclass(frozen=True)
class Detector:
    """Results of a method for label error detection on N pairs."""

    name: str
    suspicion: np.ndarray
    """(N,) score, higher for more suspected labels."""
    suspected: np.ndarray
    expected: float = np.nan
    """Its own noise rate; NaN if it has none."""
    stderr: float = np.nan


def same_number(name: str, suspicion: np.ndarray, number: int) -> Detector:
    """Return a detector without its own threshold that marks the ``number`` highest scores."""
    suspected = np.zeros(len(suspicion), dtype=bool)
    suspected[np.argsort(-suspicion, kind="stable")[:number]] = True
    return Detector(name, suspicion, suspected)


def confident_learning(name: str, u: np.ndarray, ids: Sequence[str]) -> Detector | None:
    """Return cleanlab's confident learning on sigmoid(u); None if cleanlab is not installed.

    It needs two classes, so a hash of the id puts the chosen response first or second.
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
    suspected = find_label_issues(turned, probabilities, n_jobs=1)
    joint = estimate_joint(turned, probabilities)
    return Detector(name, -u, suspected, float(1 - np.trace(joint)))


def detection_quality(methods: Sequence[Detector], flipped: pd.Series) -> pd.DataFrame:
    """Return one row per method: suspected errors, noise rate, and quality by (N,) ``flipped`` (NA: unknown).

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
                "expected": method.expected,
                "expected_stderr": method.stderr,
                "precision": hits / suspected.sum() if suspected.any() else np.nan,
                "recall": hits / truth.sum() if truth.any() else np.nan,
                "auroc": roc_auc_score(truth, score) if both else np.nan,
                "average_precision": average_precision_score(truth, score) if both else np.nan,
            }
        )
    return pd.DataFrame(rows)
