"""What suspects have in common, in sentences that say which way round it is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pandas as pd

from .group_reliability import GROUPINGS
from .suspect_traits import LEVEL

SHOWN = 5
"""Traits that get a sentence."""
_MEANING = (
    "The policy doubts such labels because it has learned to prefer the opposite. Where that makes responses "
    "better, they are wrong labels. Where it is a rule of thumb of whoever labelled (length, a favoured "
    "word), the policy has learned the rule, they may be the right labels that break it, and dropping or "
    "reweighting them makes things worse. Scores cannot tell the two apart: read some pairs before you use "
    "this audit."
)


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
    if traits.empty:
        return [f"There are too few {doubted}, or other pairs, to say what they have in common."]
    found = traits[traits["p_adjusted"] < LEVEL]
    if found.empty:
        return [
            f"None of {len(traits):,} traits (length, single words, groups) tells {doubted} from the "
            "others: no such rule stands out. That does not exclude a rule of more than one word."
        ]
    sentences = [
        _group_sentence(row, groups, doubted) if row["kind"] in GROUPINGS else _sentence(row, doubted)
        for row in found.head(shown).to_dict("records")
    ]
    rule = found["kind"].isin(["length", "word"]).any()
    return [*sentences, _MEANING] if rule else sentences


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
        place, over_all = "where lengths differ", "The longer one is the choice"
    else:
        said = f"{'has' if more else 'lacks'} the word “{row['trait']}” in {share_of(first)}"
        place, over_all = "where one response has it", "The response with it is the choice"
    return (
        f"The chosen response {said} of the {row['suspects']:,} {doubted} {place}, against "
        f"{share_of(second)} of the {row['others']:,} other pairs (difference {size:.0f} points, 95% "
        f"interval {low:.0f} to {high:.0f}). {over_all} of {share_of(row['in_all'])} of all these labels."
    )
