"""Sentences of an audit: noise rate, limits, shortcuts, and traits of suspected label errors."""

from __future__ import annotations

from collections.abc import Hashable
from math import isnan
from typing import Any

import numpy as np
import pandas as pd

from .findings import Findings
from .group_reliability import GROUPINGS
from .noise_rate import NoiseRate
from .scorers import NAMES, Scorer
from .suspect_traits import LEVEL, at_least, label_rules

_UNSEEN: dict[Scorer, str] = {
    "dpo": "u is that of two DPO policies, each of them trained on half of the prompts, about the half that "
    "it has not seen.",
    "first_visit": "u is that of the run's own policy at the pair's first visit, before it learned from it: "
    "small for the pairs that came first, when the policy knew little.",
    "probe": "u is the log-odds of the label by a linear reward on what the untouched model's layers hold "
    "of the responses, fitted to the labels of other prompts.",
}
COIN_FLIPS = (
    "Without the share that is told these scores fit labels that are coin flips as well, so P(wrong) may say "
    "nothing of a pair."
)
_LEARNED = "u is that of a policy that has learned these labels, wrong ones among them"
_PLACES = {"length": "where lengths differ", "word": "where one response has it"}
SHOWN = 5
_RULE_OR_QUALITY = (
    "The scorer prefers the opposite of these labels. That may be what makes responses better, or a spurious "
    "feature that the labellers follow; scores cannot distinguish the two."
)
_FOLLOWED = (
    "If that is not what makes responses better, it is a rule of thumb of whoever labelled. The policy "
    "learns such a rule, doubts the right labels that break it and trusts the wrong ones that follow it, and "
    "dropping or reweighting its suspects makes things worse. Read such pairs before you use this audit."
)


def rate_in_words(rate: NoiseRate) -> str:
    """Return the noise rate with its uncertainty, or why it is not identified."""
    if rate.identified and rate.known:
        return f"{rate.rate:.1%}, {_source(rate)}"
    if rate.identified:
        return f"{rate.rate:.1%} ± {rate.stderr:.1%} (95% interval {rate.low:.1%} to {rate.high:.1%})"
    if not rate.separates:
        return "not identified: the scores do not separate, they fit labels that are coin flips as well"
    return (
        f"not identified: the scores fit no wrong labels at all as well (95% of resamples of the prompts "
        f"give {rate.low:.1%} to {rate.high:.1%})"
    )


def fit_in_words(rate: NoiseRate) -> str:
    """Return whether the labels fit the curve, and what a poor fit means."""
    p = rate.fit.p
    if isnan(p):
        return "Whether the curve fits cannot be tested: too little is known of these labels."
    chance = f"p = {p:.2f}" if p >= 0.01 else f"p = {p:.1g}" if p >= 1e-4 else "p < 0.0001"
    if not rate.fit.refused:
        return (
            f"The labels do not contradict the curve (score test over parts by |u|, {chance}). That does not "
            "prove flips that are independent of the pair: a rule of thumb of the labellers that the policy "
            "has learned, or flips at near ties, can give the same curve."
        )
    fitted, pairs = rate.tenths["fitted"], rate.tenths["pairs"]
    # A part without any label against the policy has standard error 0, so use the fit's as well.
    error = np.maximum(rate.tenths["stderr"].fillna(0), np.sqrt(fitted * (1 - fitted) / pairs))
    worst = rate.tenths.iloc[int(((rate.tenths["against"] - fitted) / error).abs().fillna(0).argmax())]
    said = (
        f"The labels contradict the curve (score test over parts by |u|, {chance}), most where |u| is about "
        f"{worst['size']:.2g}: {worst['against']:.1%} are against the policy, by the curve "
        f"{worst['fitted']:.1%}."
    )
    if rate.known and rate.tenths["against"].iloc[-1] < rate.rate:
        return (
            f"{said} Where the policy is sure, fewer labels are against it than if the given share of them "
            "were flipped independently of the pair: the share is lower, or flips gather at near ties, or "
            "policy and labellers follow one rule of thumb. P(wrong) is too high."
        )
    return (
        f"{said} So flips are not independent of the pair (at near ties they gather at small |u|), or "
        "the policy's sureness does not grow in proportion to |u|. Take the expected share and P(wrong) for "
        "rough figures; the ranks do not need the curve."
    )


def _source(rate: NoiseRate) -> str:
    return "assumed" if rate.assumed else "as given"


def findings_in_words(findings: Findings) -> list[str]:
    """Return how threshold and noise rate were found, and their limits."""
    rate, scorer = findings.rate, findings.scorer
    top = rate.tenths.iloc[-1]
    told = [_UNSEEN[scorer] if scorer in _UNSEEN else _learned(findings.pairs)]
    fit = (
        f"With eps = {rate.rate:.3f}, {_source(rate)}, the fit has k = {rate.slope:.3g} per nat."
        if rate.known
        else f"The fit has eps = {rate.rate:.3f} and k = {rate.slope:.3g} per nat; without wrong labels "
        f"(eps = 0) its BIC is {abs(rate.gain):.1f} {'worse' if rate.gain > 0 else 'better'}. "
        "The errors come from resampling prompts."
    )
    told.append(
        "u changes sign with the label, so wrong labels mirror right ones: of pairs with |u| = m a share "
        f"eps + (1 - 2 eps) sigmoid(-k m) is labelled against the policy. {fit}"
    )
    told.append(fit_in_words(rate))
    if rate.known and not rate.separates:
        told.append(COIN_FLIPS)
    if rate.identified:
        said, score = "P(wrong) = sigmoid(logit(eps) - k u)", "u"
        if scorer == "vnet":
            said, score = f"{said}, made a falling function of the weight by isotonic regression", "weight"
        cut = "" if findings.cut is None else f", which is a {score} under {findings.cut:.3g}"
        told.append(
            f"{said}. A label is suspect where P(wrong) is above {findings.threshold:g}{cut}: "
            f"{findings.suspects:,} of {len(findings.pairs):,}. That is not the expected share: a threshold "
            "leaves wrong labels unnoticed where the policy is unsure."
        )
    else:
        told.append("So there is no threshold and no label is suspect; the ranks say which to look at first.")
    told.append(
        f"Of the tenth of the pairs that the policy is surest of, {top['against']:.1%} ± "
        f"{top['stderr']:.1%} are labelled against it."
        + (
            " Where flips are independent of the pair, the true share is no higher, apart from that error: a "
            "sure policy can be wrong, which only adds."
            if scorer in _UNSEEN
            else ""
        )
    )
    for other, found in findings.rates.items():
        if other != scorer:
            told.append(f"By the {NAMES[other]} the expected share is {rate_in_words(found)}.")
    return told


def _learned(pairs: pd.DataFrame) -> str:
    size = float((pairs["u"] - pairs["unpulled_u"]).mean())
    if not size:
        return (
            f"{_LEARNED}, so the share is likely to be higher; the scorers dpo, first_visit and probe "
            "of pacmr audit ask judges that have not seen them."
        )
    return (
        f"{_LEARNED}. What each label itself has added to its pair's u, {size:.2g} nats on average to first "
        "order, is taken off."
    )


def rules_in_words(traits: pd.DataFrame, rate: NoiseRate, shown: int = SHOWN) -> list[str]:
    """Return sentences on the lengths and words that most labels follow; empty if none."""
    found = traits.assign(sure=at_least(traits))[label_rules(traits, rate)]
    found = found.sort_values("sure", ascending=False, kind="stable")
    told = []
    for row in found.head(shown).to_dict("records"):
        has = row["in_all"] > 0.5
        follows, *ends = (
            row[name] if has else 1 - row[name] for name in ("in_all", "in_all_low", "in_all_high")
        )
        which = f"{'with' if has else 'without'} the word “{row['trait']}”"
        if row["kind"] == "length":
            which = "longer" if has else "shorter"
        said = (
            f"Labels follow a rule: of {row['suspects'] + row['others']:,} pairs {_PLACES[row['kind']]}, the "
            f"response {which} is the chosen one in {share_of(follows)} (95% interval "
            f"{share_of(min(ends))} to {share_of(max(ends))})"
        )
        if rate.identified and min(ends) > 1 - rate.rate:
            said += (
                f"; {share_of(rate.rate)} wrong labels that are independent of the pair would leave at most "
                f"{share_of(1 - rate.rate)}"
            )
        told.append(f"{said}.")
    return [*told, _FOLLOWED] if told else []


def traits_in_words(
    traits: pd.DataFrame, groups: pd.DataFrame, doubted: str, shown: int = SHOWN
) -> list[str]:
    """Return a sentence for each of the first traits that separate ``doubted`` pairs from others."""
    if traits["p"].isna().all():
        return [f"There are too few {doubted}, or other pairs, to say what they have in common."]
    found = traits[traits["p_adjusted"] < LEVEL]
    if found.empty:
        return [
            f"None of {traits['p'].notna().sum():,} traits (length, single words, groups) tells {doubted} "
            "from the others: no such rule stands out. That does not exclude a rule of more than one word."
        ]
    told = [
        _group_sentence(row, groups, doubted) if row["kind"] in GROUPINGS else _trait_sentence(row, doubted)
        for row in found.head(shown).to_dict("records")
    ]
    return [*told, _RULE_OR_QUALITY] if found["kind"].isin(list(_PLACES)).any() else told


def share_of(share: float) -> str:
    """Return a share in percent, with tenths near 0 and 1."""
    return f"{share:.0%}" if 0.02 <= share <= 0.98 or share in (0, 1) else f"{share:.1%}"


def _group_sentence(row: dict[Hashable, Any], groups: pd.DataFrame, doubted: str) -> str:
    said = (
        f"{share_of(row['in_suspects'])} of the {doubted} are of {row['kind']} {row['trait']}, against "
        f"{share_of(row['in_others'])} of the other pairs"
    )
    [group] = groups[(groups["grouping"] == row["kind"]) & (groups["group"] == row["trait"])].itertuples()
    if pd.isna(group.expected):
        return f"{said}."
    return (
        f"{said}; {group.expected:.0%} of its labels are expected to be wrong (95% interval {group.low:.0%} "
        f"to {group.high:.0%})."
    )


def _trait_sentence(row: dict[Hashable, Any], doubted: str) -> str:
    more = row["difference"] > 0
    points = [100 * row[name] for name in ("difference", "low", "high")]
    size, low, high = points if more else (-points[0], -points[2], -points[1])
    first, second = ((row[name] if more else 1 - row[name]) for name in ("in_suspects", "in_others"))
    said = f"{'has' if more else 'lacks'} the word “{row['trait']}” in {share_of(first)}"
    if row["kind"] == "length":
        said = f"is the {'longer' if more else 'shorter'} one in {share_of(first)}"
    return (
        f"The chosen response {said} of the {row['suspects']:,} {doubted} {_PLACES[row['kind']]}, against "
        f"{share_of(second)} of the {row['others']:,} other pairs (difference {size:.0f} points, 95% "
        f"interval {low:.0f} to {high:.0f})."
    )
