"""Sentences of an audit: noise rate, limits, shortcuts, and traits of suspected label errors."""

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
    "dpo": "u comes from two DPO policies, each trained on half of the prompts and scoring the other half.",
    "pre_update": "u is the pre-update score: that of the trained policy before its first update on the "
    "pair. It is small for pairs that came early in training.",
    "probe": "u is the log-odds of the label under a linear probe on the base model's hidden states, fitted "
    "to the labels of other prompts.",
}
_COMBINED = (
    "u is a sum of the score and of the differences of lengths and of log-probabilities under the reference, "
    "weighted by the decisions by hand (logistic regression with a prior around the score alone)."
)
COIN_FLIPS = (
    "Without the given noise rate, random labels would fit these scores as well, so P(wrong) may carry no "
    "information."
)
_JUDGED = (
    "A verdict for the label adds logit(reliability) of its judge to k u, one against it subtracts it; noise "
    "rate, k and reliabilities are fitted together (Dawid and Skene, 1979). Judges that err with the "
    "score, or with each other, get too high a reliability. From here on u is this sum, in nats."
)
_LEARNED = "u comes from a policy that was trained on these labels, wrong ones included"
_PLACES = {
    "length": "whose responses differ in length",
    "word": "with the word “{trait}” in only one response",
}
SHOWN = 5
_RULE_OR_QUALITY = (
    "The scorer prefers the opposite of these labels. That may be what makes responses better, or a spurious "
    "feature that the labellers follow; scores cannot distinguish the two."
)
_FOLLOWED = (
    "If that feature does not make responses better, it is a shortcut of the labellers. A policy learns such "
    "a shortcut: it then ranks right labels that break it as errors and misses wrong ones that follow it, so "
    "dropping suspected label errors makes the data worse. Read some of these pairs before using this audit."
)


def rate_in_words(rate: NoiseRate) -> str:
    """Return the noise rate with its uncertainty, or why it is not identified."""
    if rate.identified and rate.known:
        return f"{rate.rate:.1%}, {_source(rate)}"
    if rate.identified:
        return f"{rate.rate:.1%} ± {rate.stderr:.1%} (95% interval {rate.low:.1%} to {rate.high:.1%})"
    if not rate.separates:
        return "not identified (random labels would fit these scores as well)"
    return (
        f"not identified (a rate of 0 fits these scores as well; 95% of resamples give {rate.low:.1%} to "
        f"{rate.high:.1%})"
    )


def fit_in_words(rate: NoiseRate) -> str:
    """Return whether the labels fit the curve, and what a poor fit means."""
    p = rate.fit.p
    if isnan(p):
        return "The fit of the curve cannot be tested with these labels."
    chance = f"p = {p:.2f}" if p >= 0.01 else f"p = {p:.1g}" if p >= 1e-4 else "p < 0.0001"
    if not rate.fit.refused:
        return (
            f"The labels do not contradict the curve (score test over parts by |u|, {chance}). That does not "
            "prove label errors that are independent of the pair: a shortcut of the labellers that the "
            "policy has learned, or errors at near ties, can give the same curve."
        )
    fitted, pairs = rate.tenths["fitted"], rate.tenths["pairs"]
    # A part without any label against the policy has standard error 0, so use the fit's as well.
    error = np.maximum(rate.tenths["stderr"].fillna(0), np.sqrt(fitted * (1 - fitted) / pairs))
    worst = rate.tenths.iloc[int(((rate.tenths["against"] - fitted) / error).abs().fillna(0).argmax())]
    said = (
        f"The labels contradict the curve (score test over parts by |u|, {chance}), most at |u| of about "
        f"{worst['size']:.2g}: {worst['against']:.1%} disagree with the scorer, the curve has "
        f"{worst['fitted']:.1%}."
    )
    if rate.known and rate.tenths["against"].iloc[-1] < rate.rate:
        return (
            f"{said} Where |u| is large, fewer labels disagree than the given noise rate implies. The rate "
            "is lower, or errors gather at near ties, or policy and labellers share a shortcut. P(wrong) is "
            "too high."
        )
    return (
        f"{said} So errors depend on the pair (they gather at near ties, for example), or log-odds are not "
        "proportional to u. Noise rate and P(wrong) are rough; the ranks do not need the curve."
    )


def _source(rate: NoiseRate) -> str:
    return "assumed" if rate.assumed else "as given"


def findings_in_words(findings: Findings) -> list[str]:
    """Return sentences on how noise rate and threshold were estimated, and on their limits."""
    rate, scorer, alone = findings.rate, findings.scorer, findings.alone
    top = rate.tenths.iloc[-1]
    told = [
        _COMBINED if alone == "combined" else _UNSEEN[alone] if alone in _UNSEEN else _learned(findings.pairs)
    ]
    told += [] if rate.judged is None else [_JUDGED]
    fit = (
        f"With a noise rate of {rate.rate:.3f}, {_source(rate)}, the fit has k = {rate.slope:.3g} per nat."
        if rate.known
        else f"The fit has a noise rate of {rate.rate:.3f} and k = {rate.slope:.3g} per nat; at a rate of 0 "
        f"its BIC is {abs(rate.gain):.1f} {'worse' if rate.gain > 0 else 'better'}. "
        "Standard errors come from resampling prompts."
    )
    told.append(
        "u changes sign with the label, so wrong labels mirror right ones: of pairs with |u| = m the "
        f"fraction rate + (1 - 2 rate) sigmoid(-k m) has a label that disagrees with the scorer. {fit}"
    )
    told.append(fit_in_words(rate))
    if rate.known and not rate.separates:
        told.append(COIN_FLIPS)
    if rate.identified:
        said, score = "P(wrong) = sigmoid(logit(rate) - k u)", "u"
        if scorer == "vnet":
            said, score = f"{said}, as a falling function of the weight by isotonic regression", "weight"
        cut = "" if findings.cut is None else f" ({score} below {findings.cut:.3g})"
        told.append(
            f"{said}. Labels with P(wrong) above {findings.threshold:g}{cut} are suspected label errors: "
            f"{findings.suspected:,} of {len(findings.pairs):,}. The noise rate counts errors below the "
            "threshold too, so the two differ."
        )
    else:
        told.append("So no label is suspected; the ranks say which pairs to read first.")
    told.append(
        f"In the tenth of the pairs with the largest |u|, {top['against']:.1%} ± {top['stderr']:.1%} of the "
        "labels disagree with the scorer."
        + (
            " For errors that are independent of the pair, the noise rate is no higher, up to that error."
            if alone in _UNSEEN
            else ""
        )
    )
    for other, found in findings.rates.items():
        if other != scorer:
            told.append(f"Noise rate by {NAMES[other]}: {rate_in_words(found)}.")
    return told


def _learned(pairs: pd.DataFrame) -> str:
    size = float((pairs["u"] - pairs["unpulled_u"]).mean())
    if not size:
        return (
            f"{_LEARNED}, so the noise rate is likely to be higher; use --scorer probe, dpo or pre_update "
            "for scores of unseen labels."
        )
    return (
        f"{_LEARNED}. The self-influence of each label on its u, {size:.2g} nats on average to first order, "
        "is subtracted."
    )


def rules_in_words(traits: pd.DataFrame, rate: NoiseRate, shown: int = SHOWN) -> list[str]:
    """Return sentences on lengths and words that most labels follow; empty if none."""
    found = traits.assign(sure=at_least(traits))[label_rules(traits, rate)]
    found = found.sort_values("sure", ascending=False, kind="stable")
    told = []
    for row in found.head(shown).to_dict("records"):
        has = row["in_all"] > 0.5
        follows, *ends = (
            row[name] if has else 1 - row[name] for name in ("in_all", "in_all_low", "in_all_high")
        )
        which = f"the response {'with' if has else 'without'} it"
        if row["kind"] == "length":
            which = f"the {'longer' if has else 'shorter'} response"
        said = (
            f"Labels follow a shortcut: in {share_of(follows)} of {row['suspected'] + row['others']:,} pairs "
            f"{_place(row)}, {which} is the chosen one (95% interval {share_of(min(ends))} to "
            f"{share_of(max(ends))})"
        )
        if rate.identified and min(ends) > 1 - rate.rate:
            said += (
                f"; a noise rate of {share_of(rate.rate)} that is independent of the pair would leave at "
                f"most {share_of(1 - rate.rate)}"
            )
        told.append(f"{said}.")
    return [*told, _FOLLOWED] if told else []


def traits_in_words(
    traits: pd.DataFrame, groups: pd.DataFrame, doubted: str, shown: int = SHOWN
) -> list[str]:
    """Return a sentence for each of the first traits that distinguish ``doubted`` pairs from others."""
    if traits["p"].isna().all():
        return [f"There are too few {doubted}, or other pairs, to compare the two."]
    found = traits[traits["p_adjusted"] < LEVEL]
    if found.empty:
        return [
            f"None of {traits['p'].notna().sum():,} traits (length, single words, groups) distinguishes "
            f"{doubted} from the others. Shortcuts of more than one word are not tested."
        ]
    told = [
        _group_sentence(row, groups, doubted) if row["kind"] in GROUPINGS else _trait_sentence(row, doubted)
        for row in found.head(shown).to_dict("records")
    ]
    return [*told, _RULE_OR_QUALITY] if found["kind"].isin(list(_PLACES)).any() else told


def _place(row: dict[Hashable, Any]) -> str:
    return _PLACES[row["kind"]].format(trait=row["trait"])


def share_of(share: float) -> str:
    """Return a fraction in percent, with tenths near 0 and 1."""
    return f"{share:.0%}" if 0.02 <= share <= 0.98 or share in (0, 1) else f"{share:.1%}"


def _group_sentence(row: dict[Hashable, Any], groups: pd.DataFrame, doubted: str) -> str:
    said = (
        f"{share_of(row['in_suspected'])} of the {doubted} have the {row['kind']} {row['trait']}, against "
        f"{share_of(row['in_others'])} of the other pairs"
    )
    [group] = groups[(groups["grouping"] == row["kind"]) & (groups["group"] == row["trait"])].itertuples()
    if pd.isna(group.expected):
        return f"{said}."
    return (
        f"{said}; its noise rate is {group.expected:.0%} (95% interval {group.low:.0%} to {group.high:.0%})."
    )


def _trait_sentence(row: dict[Hashable, Any], doubted: str) -> str:
    more = row["difference"] > 0
    points = [100 * row[name] for name in ("difference", "low", "high")]
    size, low, high = points if more else (-points[0], -points[2], -points[1])
    first, second = ((row[name] if more else 1 - row[name]) for name in ("in_suspected", "in_others"))
    said = "has it" if more else "lacks it"
    if row["kind"] == "length":
        said = f"is the {'longer' if more else 'shorter'} one"
    return (
        f"Of the {row['suspected']:,} {doubted} {_place(row)}, the chosen response {said} in "
        f"{share_of(first)}, against {share_of(second)} of the {row['others']:,} other pairs (difference "
        f"{size:.0f} points, 95% interval {low:.0f} to {high:.0f})."
    )
