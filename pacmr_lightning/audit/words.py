"""Sentences of an audit: its result, how p was estimated, shortcuts, and traits of suspected labels."""

from collections.abc import Hashable
from typing import Any

import pandas as pd

from .agreement import SCORE_VOTES, Agreement
from .scorers import Scorer
from .suspect_traits import LEVEL, at_least, label_rules
from .suspected import Findings

_SCORES: dict[Scorer, str] = {
    "probe": "u is the log-odds of the label under a linear probe on the base model's hidden states, fitted "
    "to the labels of other prompts.",
    "policy": "u is the policy's implicit reward margin.",
    "dpo": "u comes from two DPO policies, each trained on half of the prompts and scoring the other half.",
    "combined": "u is a sum of the score and of the differences of lengths and of log-probabilities under "
    "the reference, weighted by the decisions by hand (a logistic regression).",
}
_JUDGED = (
    "A verdict for the label adds logit(reliability) of its judge to k u, one against it subtracts it; eps, "
    "k and reliabilities are fitted together (Dawid and Skene, 1979). Judges that err with the score, or "
    "with each other, get too high a reliability."
)
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


def verdict(findings: Findings) -> str:
    """Return the audit's result in one or two sentences: how many labels would be contradicted."""
    found, pairs, number = findings.agreement, findings.pairs, findings.suspected
    if not found.usable:
        return (
            f"These {len(pairs):,} labels cannot be predicted from the scores better than by a coin, so no "
            "label is suspected."
        )
    share, low, high = findings.contradicted
    if found.known:
        said = f"{number:,} of {len(pairs):,} labels are probably wrong"
        if number:
            said += f"; {share:.0%} of these are expected to be ({low:.0%} to {high:.0%})"
        return f"{said}, at a given rate of random flips of {found.rate:.1%}."
    said = f"A second annotator would probably contradict {number:,} of {len(pairs):,} labels."
    if number:
        said += (
            f" Of these suspected labels {share:.0%} are expected to be contradicted (95% interval {low:.0%} "
            f"to {high:.0%})."
        )
    return said


def known_in_words(findings: Findings) -> str:
    """Return how many labels are known to be wrong; empty without any that are known."""
    flipped = findings.pairs["flipped"]
    if not (known := int(flipped.notna().sum())):
        return ""
    wrong = int(flipped.sum())
    return f"Known to be wrong: {wrong:,} of {known:,} labels ({wrong / known:.1%})."


def flips_in_words(found: Agreement) -> str:
    """Return the rate of random flips with its uncertainty; empty if it is not identified."""
    if found.known or not found.identified:
        return ""
    return (
        f"Rate of random flips, if the errors are such: {found.rate:.1%} ± {found.stderr:.1%} (95% interval "
        f"{found.low:.1%} to {found.high:.1%})."
    )


def findings_in_words(findings: Findings) -> list[str]:
    """Return sentences on how p was estimated, and on its limits."""
    found, scorer, alone = findings.agreement, findings.scorer, findings.alone
    told = [_SCORES[alone], *([_JUDGED] if scorer == "judge" else [])]
    told.append(
        "u changes sign with the label. Of the votes on pairs with this u, a share c = eps + (1 - 2 eps) "
        f"sigmoid(k u) is for the label; fitted to these labels, eps is {found.rate:.3f} and k "
        f"{found.slope:.3g} per nat. Out of fold this predicts a label {found.gain:.3f} ± "
        f"{found.gain_error:.3f} nats better than a coin."
    )
    if found.known:
        told.append(
            "eps is given as the rate of random flips, so p is the probability that the label is right, "
            "sigmoid(logit(1 - eps) + k u)."
        )
    else:
        source = (
            "as pairs with single votes had it elsewhere"
            if found.strength == SCORE_VOTES
            else "as the pairs with several votes say"
        )
        told.append(
            "p is the probability that another annotator of the same pool agrees with the label. The label "
            f"is a vote, and the score counts as s = {found.strength:.1f} votes, {source}: p = (s c + votes "
            "for the label) / (s + votes). The interval takes s as known to a factor of two or so, and "
            "resamples prompts."
        )
    cut = "" if findings.cut is None else f" (u below {findings.cut:.3g})"
    told.append(
        f"Labels with p below {findings.threshold:g}{cut} are suspected: {findings.suspected:,} of "
        f"{len(findings.pairs):,}."
        if found.usable
        else "No label is suspected; the ranks say which pairs to read first."
    )
    if found.usable and not found.known:
        total, low, high = found.contradicted(found.p >= 0)
        told.append(
            f"Over all labels another annotator would contradict {total:.0%} ({low:.0%} to {high:.0%}), most "
            "of them where p is above one half."
        )
    if rate := flips_in_words(found):
        told.append(rate)
    return told


def rules_in_words(traits: pd.DataFrame, found: Agreement, shown: int = SHOWN) -> list[str]:
    """Return sentences on lengths and words that most labels follow; empty if none."""
    rules = traits.assign(sure=at_least(traits))[label_rules(traits, found)]
    rules = rules.sort_values("sure", ascending=False, kind="stable")
    told = []
    for row in rules.head(shown).to_dict("records"):
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
        if found.identified and min(ends) > 1 - found.rate:
            said += (
                f"; a rate of random flips of {share_of(found.rate)} would leave at most "
                f"{share_of(1 - found.rate)}"
            )
        told.append(f"{said}.")
    return [*told, _FOLLOWED] if told else []


def traits_in_words(traits: pd.DataFrame, doubted: str, shown: int = SHOWN) -> list[str]:
    """Return a sentence for each of the first traits that distinguish ``doubted`` pairs from others."""
    if traits["p"].isna().all():
        return [f"There are too few {doubted}, or other pairs, to compare the two."]
    found = traits[traits["p_adjusted"] < LEVEL]
    if found.empty:
        return [
            f"None of {traits['p'].notna().sum():,} traits (length, single words) distinguishes "
            f"{doubted} from the others. Shortcuts of more than one word are not tested."
        ]
    told = [_trait_sentence(row, doubted) for row in found.head(shown).to_dict("records")]
    return [*told, _RULE_OR_QUALITY]


def _place(row: dict[Hashable, Any]) -> str:
    return _PLACES[row["kind"]].format(trait=row["trait"])


def share_of(share: float) -> str:
    """Return a fraction in percent, with tenths near 0 and 1."""
    return f"{share:.0%}" if 0.02 <= share <= 0.98 or share in (0, 1) else f"{share:.1%}"


def _trait_sentence(row: dict[Hashable, Any], doubted: str) -> str:
    more = row["in_suspected"] > row["in_others"]
    first, second = ((row[name] if more else 1 - row[name]) for name in ("in_suspected", "in_others"))
    said = "has it" if more else "lacks it"
    if row["kind"] == "length":
        said = f"is the {'longer' if more else 'shorter'} one"
    return (
        f"Of the {row['suspected']:,} {doubted} {_place(row)}, the chosen response {said} in "
        f"{share_of(first)}, against {share_of(second)} of the {row['others']:,} other pairs "
        f"(p {row['p_adjusted']:.1g})."
    )
