"""Statistics of preference data under a tokenizer: rows, lengths, contradicting labels, odd tokens."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..sources import Source
from ..splits import Split
from ..token_columns import row_bytes, row_lengths
from ..tokenization import token_warnings, tokenize_pairs
from ..tokenizer import Tokenization

_PARTS = ["prompt", "chosen", "rejected"]


@dataclass(frozen=True)
class Lengths:
    """Tokens of the kept pairs."""

    prompt: float
    """Mean, as the next two."""
    chosen: float
    rejected: float
    longest: int
    """Tokens of a prompt with its longer response, at most; max_length limits them."""
    chosen_longer: float
    """Share of pairs, as the next."""
    rejected_longer: float


@dataclass(frozen=True)
class Repeats:
    """Duplicates and contradictions among the kept pairs; a comparison is a prompt with two responses."""

    copies: int
    """Pairs with the same prompt, chosen and rejected response as an earlier one."""
    comparisons: int
    """Comparisons with more than one label."""
    labels: int
    contradicting_comparisons: int
    """Comparisons with both responses chosen."""
    least_wrong: int
    """Labels in the minority of their comparison: a lower bound on wrong labels."""


@dataclass(frozen=True)
class SplitStatistics:
    """Statistics of one split."""

    counts: dict[str, int]
    """As in a run: ``rows``, ``kept``, dropped ones by reason, ``no augmented prompt``."""
    prompts: int
    """Distinct prompts of the kept pairs."""
    in_other_split: int
    """Kept pairs whose prompt is also in the other split."""
    lengths: Lengths
    repeats: Repeats
    warnings: list[str]
    """``token_warnings``."""


class Kept(NamedTuple):
    """The pairs of a split that a run would have."""

    rows: Dataset
    table: pd.DataFrame


def inspect_pairs(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    tokenization: Tokenization = "default",
) -> tuple[dict[Split, SplitStatistics], dict[Split, Kept]]:
    """Return statistics of both splits, tokenized as in training, and the kept pairs of each split."""
    kept: dict[Split, Kept] = {}
    found: dict[Split, SplitStatistics] = {}
    prompts: dict[Split, pd.Series] = {}
    splits: tuple[Split, Split] = ("train", "validation")
    read = {split: source.load(split) for split in splits}
    counted = {
        split: tokenize_pairs(rows, tokenizer, max_length, tokenization=tokenization)
        for split, rows in read.items()
    }
    for split, (rows, _) in counted.items():
        kept[split] = Kept(rows, _pair_table(rows))
        prompts[split] = kept[split].table["prompt"]
    for split, other in zip(splits, splits[::-1], strict=True):
        (_, counts), table = counted[split], kept[split].table
        found[split] = SplitStatistics(
            counts=counts,
            prompts=prompts[split].nunique(),
            in_other_split=int(prompts[split].isin(prompts[other]).sum()),
            lengths=_lengths(table),
            repeats=count_repeats(table),
            warnings=list(token_warnings(tokenizer, read[split], counts, split)),
        )
    return found, kept


def _pair_table(rows: Dataset) -> pd.DataFrame:
    """Return hashes and token counts by pair; ``tokens`` is the sum that max_length limits."""
    columns = [f"{name}_ids" for name in _PARTS]
    table = pd.DataFrame(([*map(hash, row)] for row in row_bytes(rows, *columns)), columns=_PARTS)
    for name, column in zip(_PARTS, columns, strict=True):
        table[f"{name} tokens"] = row_lengths(rows, column)
    table["tokens"] = table["prompt tokens"] + table[["chosen tokens", "rejected tokens"]].max(axis=1)
    return table


def _lengths(kept: pd.DataFrame) -> Lengths:
    return Lengths(
        **{name: float(kept[f"{name} tokens"].mean()) for name in _PARTS},
        longest=int(kept["tokens"].max()),
        chosen_longer=float((kept["chosen tokens"] > kept["rejected tokens"]).mean()),
        rejected_longer=float((kept["chosen tokens"] < kept["rejected tokens"]).mean()),
    )


def count_repeats(table: pd.DataFrame) -> Repeats:
    """Return duplicates and contradictions among N pairs, by their hashes of prompt, chosen and rejected."""
    responses = table[["chosen", "rejected"]].to_numpy()
    first, second = responses.min(axis=1), responses.max(axis=1)
    pairs = pd.DataFrame({"prompt": table["prompt"], "first": first, "second": second})
    pairs["label"] = responses[:, 0] == first
    comparisons = pairs.groupby(["prompt", "first", "second"], sort=False)["label"].agg(["size", "sum"])
    more = comparisons[comparisons["size"] > 1]
    n, k = more["size"], more["sum"]
    outvoted = np.minimum(k, n - k)
    return Repeats(
        copies=int(pairs.duplicated().sum()),
        comparisons=len(more),
        labels=int(n.sum()),
        contradicting_comparisons=int((outvoted > 0).sum()),
        least_wrong=int(outvoted.sum()),
    )
