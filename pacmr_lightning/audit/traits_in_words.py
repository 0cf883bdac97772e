"""What suspects have in common, in sentences that say which way round it is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pandas as pd

from .group_reliability import GROUPINGS
from .suspect_traits import LEVEL
from .wrong_label_share import Share

_PLACES = {"length": "where lengths differ", "word": "where one response has it"}
SHOWN = 5
"""Traits that get a sentence."""
FOLLOWED = 0.75
"""Share of the labels from which on they are said to follow a trait.

In the embedded world right labels follow no word in more than 69% (lower end of the interval); under a
favourite word, or a preference for the longer response, they follow one in 78% and more.
"""
_LEARNED = (
    "The policy doubts these labels because it has learned to prefer the opposite, which may be what makes "
    "responses better or a rule of thumb of whoever labelled; which of the two it is, scores cannot tell."
)
_FOLLOWED = (
    "If that is not what makes responses better, it is a rule of thumb of whoever labelled. The policy "
    "learns such a rule, doubts the right labels that break it and trusts the wrong ones that follow it, and "
    "dropping or reweighting its suspects makes things worse. Read such pairs before you use this audit."
)


def rules(traits: pd.DataFrame, share: Share) -> pd.Series:
    """Which traits are a rule that most labels follow.

    Flips at a rate eps that are independent of the pair leave at most 1 - eps of the labels to any trait. An
    eps that was estimated lowers the line from ``FOLLOWED``; one that was given may be too high on purpose.

    Args:
        traits: of ``suspect_traits``.
        share: of wrong labels.
    """
    estimated = share.identified and not share.known
    bound = min(FOLLOWED, 1 - share.low) if estimated else FOLLOWED
    return traits["kind"].isin(["length", "word"]) & (_sure(traits) > bound)


def _sure(traits: pd.DataFrame) -> pd.Series:
    """Share of the labels that go with a trait, or against it, at least."""
    return traits["in_all_low"].clip(lower=1 - traits["in_all_high"])


def rules_in_words(traits: pd.DataFrame, share: Share, shown: int = SHOWN) -> list[str]:
    """The lengths and words that most labels follow, and what that does to an audit; nothing if none.

    Args:
        traits: of ``suspect_traits``.
        share: of wrong labels.
        shown: at most so many traits.
    """
    found = traits.assign(sure=_sure(traits))[rules(traits, share)]
    found = found.sort_values("sure", ascending=False, kind="stable")
    told = []
    for row in found.head(shown).to_dict("records"):
        has = row["in_all"] > 0.5
        follows, *ends = (
            row[name] if has else 1 - row[name] for name in ("in_all", "in_all_low", "in_all_high")
        )
        side = "longer" if has else "shorter"
        which = (
            side if row["kind"] == "length" else f"{'with' if has else 'without'} the word “{row['trait']}”"
        )
        told.append(
            f"Labels follow a rule: of {row['suspects'] + row['others']:,} pairs {_PLACES[row['kind']]}, the "
            f"response {which} is the chosen one in {share_of(follows)} (95% interval "
            f"{share_of(min(ends))} to {share_of(max(ends))})"
            + (
                f"; {share_of(share.rate)} wrong labels that are independent of the pair would leave at most "
                f"{share_of(1 - share.rate)}."
                if share.identified and min(ends) > 1 - share.rate
                else "."
            )
        )
    return [*told, _FOLLOWED] if told else []


def traits_in_words(
    traits: pd.DataFrame, groups: pd.DataFrame, doubted: str, shown: int = SHOWN
) -> list[str]:
    """One sentence for each of the first traits that tell suspects from the other pairs, and what it means.

    Args:
        traits: of ``suspect_traits``.
        groups: of ``group_reliability``.
        doubted: what the labels are called that are compared with the others.
        shown: at most so many traits.
    """
    if traits["p"].isna().all():
        return [f"There are too few {doubted}, or other pairs, to say what they have in common."]
    found = traits[traits["p_adjusted"] < LEVEL]
    if found.empty:
        return [
            f"None of {traits['p'].notna().sum():,} traits (length, single words, groups) tells {doubted} "
            "from the others: no such rule stands out. That does not exclude a rule of more than one word."
        ]
    sentences = [
        _group_sentence(row, groups, doubted) if row["kind"] in GROUPINGS else _sentence(row, doubted)
        for row in found.head(shown).to_dict("records")
    ]
    rule = found["kind"].isin(["length", "word"]).any()
    return [*sentences, _LEARNED] if rule else sentences


def trait_name(row: Any) -> str:
    """How a table calls a trait: of the chosen response, or of the pair."""
    if row.kind == "length":
        return "chosen is the longer"
    return f"chosen has “{row.trait}”" if row.kind == "word" else f"{row.kind} {row.trait}"


def share_of(share: float) -> str:
    """A share in percent; tenths where it would else be rounded to nothing or all."""
    return f"{share:.0%}" if 0.02 <= share <= 0.98 or share in (0, 1) else f"{share:.1%}"


def _group_sentence(row: dict[Hashable, Any], groups: pd.DataFrame, doubted: str) -> str:
    name = f"{row['kind']} {row['trait']}"
    said = (
        f"{share_of(row['in_suspects'])} of the {doubted} are of {name}, against "
        f"{share_of(row['in_others'])} of the other pairs"
    )
    [group] = groups[(groups["grouping"] == row["kind"]) & (groups["group"] == row["trait"])].itertuples()
    if pd.isna(group.expected):
        return f"{said}."
    return (
        f"{said}; {group.expected:.0%} of its labels are expected to be wrong (95% interval {group.low:.0%} "
        f"to {group.high:.0%})."
    )


def _sentence(row: dict[Hashable, Any], doubted: str) -> str:
    more = row["difference"] > 0
    points = [100 * row[name] for name in ("difference", "low", "high")]
    size, low, high = points if more else (-points[0], -points[2], -points[1])
    first, second = ((row[name] if more else 1 - row[name]) for name in ("in_suspects", "in_others"))
    if row["kind"] == "length":
        said = f"is the {'longer' if more else 'shorter'} one in {share_of(first)}"
    else:
        said = f"{'has' if more else 'lacks'} the word “{row['trait']}” in {share_of(first)}"
    return (
        f"The chosen response {said} of the {row['suspects']:,} {doubted} {_PLACES[row['kind']]}, against "
        f"{share_of(second)} of the {row['others']:,} other pairs (difference {size:.0f} points, 95% "
        f"interval {low:.0f} to {high:.0f})."
    )
