"""From scores to labels that are taken for wrong: ranks, probabilities, threshold and expected share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from sklearn.isotonic import IsotonicRegression

from .detection_quality import Method, compare, confident_learning, same_number
from .group_reliability import group_reliability
from .linear_probe import agreement
from .scorers import BASIS, NAMES, SCORES, UNSEEN, Scorer
from .wrong_label_share import Share, expected_share


@dataclass(frozen=True)
class Findings:
    """What an audit found in N pairs."""

    pairs: pd.DataFrame
    """N rows by rank: those of ``last_pass`` with ``cross_fit_u`` (NaN where it was not computed),
    ``p_wrong`` (NaN where the share is not identified), ``suggested`` ("keep" or "flip") and ``rank``."""
    scorer: Scorer
    threshold: float
    """On ``p_wrong``."""
    cut: float | None
    """The same on the score; None where no label is suspect, or all are."""
    shares: dict[Scorer, Share]
    """By each score that was computed."""
    methods: pd.DataFrame
    """As ``detection_quality.compare`` makes it; the scorer is its first row."""
    groups: pd.DataFrame
    """As ``group_reliability`` makes it, by category and, where pairs have one, annotator."""

    @property
    def share(self) -> Share:
        """The scorer's."""
        return self.shares[self.scorer]

    @property
    def doubted(self) -> tuple[str, np.ndarray]:
        """The labels that are compared with the others, by name and as (N,) booleans by rank.

        Suspects, or where there are none the labels that the policy is against.
        """
        if self.suspects:
            return "suspects", self.pairs["suggested"].eq("flip").to_numpy()
        return "labels against the policy", (self.pairs[BASIS[self.scorer]] < 0).to_numpy()

    @property
    def suspects(self) -> int:
        """Number of labels that are taken for wrong."""
        return int((self.pairs["suggested"] == "flip").sum())


def find(
    pairs: pd.DataFrame,
    scorer: Scorer,
    threshold: float,
    varies: bool,
    known: float | None = None,
) -> Findings:
    """Ranks pairs, and takes the labels for wrong that are so with a probability above a threshold.

    Args:
        pairs: N rows, as ``last_pass`` makes them, with ``cross_fit_u`` and ``unpulled_u`` (u without what
            ``own_pull`` puts down to the pair's own label); they may have the columns ``annotator``,
            ``first_visit_u`` and ``probe_u``.
        scorer: whose opinion decides.
        threshold: on the probability that a label is wrong.
        varies: whether the weights are an opinion at all.
        known: the share of wrong labels, where somebody knows it.
    """
    computed: dict[Scorer, bool] = {
        "vnet": varies,
        "dpo": bool(pairs["cross_fit_u"].notna().all()),
        "policy": scorer == "policy",
        "first_visit": "first_visit_u" in pairs,
        "probe": "probe_u" in pairs and bool(pairs["probe_u"].notna().all()),
    }
    order = sorted((name for name in computed if computed[name]), key=lambda name: name != scorer)
    prompts = pairs["prompt"].to_numpy()
    shares = {name: expected_share(pairs[BASIS[name]].to_numpy(), prompts, known) for name in order}
    wrong = {name: _wrong(pairs, name, share) for name, share in shares.items()}
    ranked = pairs.assign(p_wrong=wrong[scorer])
    # NaN is not above any threshold.
    suspects = {name: p > threshold for name, p in wrong.items()}
    ranked["suggested"] = np.where(suspects[scorer], "flip", "keep")
    methods = [
        Method(NAMES[name], -pairs[SCORES[name]].to_numpy(), suspects[name], share.rate, share.stderr)
        if share.identified
        else Method(NAMES[name], -pairs[SCORES[name]].to_numpy(), suspects[name])
        for name, share in shares.items()
    ]
    number = int(suspects[scorer].sum())
    # Without a policy u is the probe's own.
    if scorer != "probe" or not pairs["u"].equals(pairs["probe_u"]):
        methods.append(same_number("loss", pairs["loss"].to_numpy(), number))
        if scorer != "policy":
            methods.append(same_number("u", -pairs["u"].to_numpy(), number))
    unseen = [name for name in UNSEEN if computed[name]]
    best = max(unseen, key=lambda name: agreement(pairs[SCORES[name]].to_numpy()), default=None)
    basis, named = ("u", "u") if best is None else (SCORES[best], NAMES[best])
    if learned := confident_learning(f"cleanlab on {named}", pairs[basis].to_numpy(), pairs["id"].tolist()):
        methods.append(learned)
    ranked = ranked.sort_values([SCORES[scorer], "u"], kind="stable", ignore_index=True)
    ranked["rank"] = np.arange(1, len(ranked) + 1)
    score = ranked[SCORES[scorer]]
    cut = None if number in (0, len(ranked)) else float(score.iloc[number - 1 : number + 1].mean())
    groups = group_reliability(ranked, ranked[BASIS[scorer]].to_numpy(), shares[scorer])
    return Findings(ranked, scorer, threshold, cut, shares, compare(methods, pairs["flipped"]), groups)


def _wrong(pairs: pd.DataFrame, scorer: Scorer, share: Share) -> np.ndarray:
    """(N,) probability that each label is wrong, which falls where the score rises."""
    wrong = share.wrong(pairs[BASIS[scorer]].to_numpy())
    if scorer != "vnet" or not share.identified:
        return wrong
    # A weight depends on more than u. The mean over pairs, which is the expected share, stays.
    return IsotonicRegression(increasing=False).fit_transform(pairs["weight"].to_numpy(), wrong)
