"""Statistics of preference data under a tokenizer: kept pairs, lengths, repeats, shared prompts, advice."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..sources import Source
from ..splits import Split
from ..tokenization import NO_AUGMENTED_PROMPT, token_warnings, tokenize_pairs

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
LIMITS = (256, 512, 768, 1024, 2048)
PARTS = ("prompt", "chosen", "rejected", "prompt + longer response")

DROPPED = 0.05
"""Share of rows dropped for one reason above which ``advice`` mentions it."""
CONTRADICTING, COPIES, NO_VIEW = 0.02, 0.02, 0.2
"""Likewise, shares of pairs."""
LONGER = 0.7
"""Likewise, share of pairs in which the same side is longer (inclusive)."""
_FIXES = {
    "empty response": "give them a response, or look whether the columns are the right ones",
    "equal responses": "a tie teaches nothing; leave such rows out of the file",
    "different prompts": "give one prompt with two responses to it in each row",
    "no common prompt": "give the prompt in a column 'prompt'",
    "empty prompt": "give them a prompt",
}
_NO_LIMIT = 2**31 - 1
_AT_A_TIME = 1000
_RESPONSES = ["chosen", "rejected"]


@dataclass(frozen=True)
class Lengths:
    """Token counts of the kept pairs and those that are only too long."""

    percentiles: dict[str, dict[str, int]]
    """For each of ``PARTS``, the percentiles "1" to "99" and "max"."""
    kept_at: dict[int, float]
    """Share of all rows that would be kept, by max_length."""
    suggested: int
    """The multiple of 64 that as max_length makes at most 1% of these pairs too long."""


@dataclass(frozen=True)
class LengthBias:
    """Lengths in tokens, chosen against rejected, in kept pairs: shares, and median difference."""

    chosen_longer: float
    rejected_longer: float
    median_difference: float


@dataclass(frozen=True)
class Repeats:
    """Duplicates and contradictions among the kept pairs; a comparison is a prompt with two responses."""

    copies: int
    """Pairs with the same prompt, chosen and rejected response as an earlier one."""
    sharing: int
    """Pairs with a response that another comparison of the same prompt also has."""
    comparisons: int
    """Comparisons with more than one label."""
    labels: int
    contradicting_comparisons: int
    """Comparisons with both responses chosen."""
    contradicting_labels: int
    least_wrong: int
    """Labels in the minority of their comparison: a lower bound on wrong labels."""
    noise: float | None
    """Noise rate that explains disagreement within comparisons, for independent errors; None without one."""


@dataclass(frozen=True)
class SplitStatistics:
    """Statistics of one split."""

    counts: dict[str, int]
    """As in a run: ``rows``, ``kept``, dropped ones by reason, ``no augmented prompt``."""
    known: dict[str, float]
    """Shares of rows: each column, ``non-ASCII`` text, and wrong labels by ``flipped`` or ``eta``."""
    prompts: int
    """Distinct prompts of the kept pairs."""
    pairs_a_prompt: dict[str, float]
    categories: dict[str, int]
    """Kept pairs by category, largest first, without uncategorised ones."""
    lengths: Lengths
    bias: LengthBias
    repeats: Repeats
    token_warnings: list[str]


@dataclass(frozen=True)
class SharedPrompts:
    """Prompts of kept pairs in both splits."""

    prompts: int
    train_pairs: int
    validation_pairs: int


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of both splits."""

    splits: dict[Split, SplitStatistics]
    overlap: SharedPrompts
    overlap_normalised: SharedPrompts
    """Equal but for case and whitespace."""


class Kept(NamedTuple):
    """The pairs of a split that a run would have."""

    rows: Dataset
    table: pd.DataFrame


def inspect_pairs(
    source: Source, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[DataStatistics, dict[Split, Kept]]:
    """Return statistics of both splits, tokenized as in training, and the kept pairs of each split."""
    kept: dict[Split, Kept] = {}
    splits: dict[Split, SplitStatistics] = {}
    for split in ("train", "validation"):
        found = source.load(split)
        rows, counts = tokenize_pairs(found, tokenizer, max_length)
        table = usable = _pair_table(rows)
        if counts.get("too long"):
            # Only the dropped ones are tokenized again without a limit; the others stay cached.
            names = set(rows["id"][:])
            dropped = [i for i, name in enumerate(found["id"][:]) if name not in names]
            dropped, _ = tokenize_pairs(found.select(dropped, keep_in_memory=True), tokenizer, _NO_LIMIT)
            usable = pd.concat([table, _pair_table(dropped)], ignore_index=True)
        kept[split] = Kept(rows, table)
        a_prompt = table["prompt"].value_counts()
        difference = table["chosen tokens"].astype("int64") - table["rejected tokens"]
        longer = (float((difference > 0).mean()), float((difference < 0).mean()))
        splits[split] = SplitStatistics(
            counts=counts,
            known=_known_columns(found),
            prompts=len(a_prompt),
            pairs_a_prompt={"median": float(a_prompt.median()), "max": int(a_prompt.max())},
            categories={str(name): int(n) for name, n in table["category"].value_counts().items()},
            lengths=_lengths(usable, counts["rows"], max_length),
            bias=LengthBias(*longer, float(difference.median())),
            repeats=count_repeats(table),
            token_warnings=list(token_warnings(tokenizer, found, counts, split)),
        )
    train, validation = kept["train"].table, kept["validation"].table
    shared = []
    for name in ("prompt", "normalised prompt"):
        one, other = train[name].isin(validation[name]), validation[name].isin(train[name])
        shared.append(SharedPrompts(train[name][one].nunique(), int(one.sum()), int(other.sum())))
    return DataStatistics(splits, *shared), kept


def _pair_table(rows: Dataset) -> pd.DataFrame:
    """Return hashes, ``category`` and token counts by pair; ``tokens`` is the sum that max_length limits."""
    parts = []
    for batch in _batches(rows):
        prompts = batch["prompt"].to_pylist()
        tokens = {name: batch[f"{name}_ids"] for name in ("prompt", *_RESPONSES)}
        columns = {
            "prompt": _hashes(prompts),
            "normalised prompt": _hashes([" ".join(prompt.casefold().split()) for prompt in prompts]),
            **{name: _hashes(_list_bytes(tokens[name])) for name in _RESPONSES},
            "category": batch["category"].to_pandas(),
            **{f"{name} tokens": pc.list_value_length(ids).to_numpy() for name, ids in tokens.items()},
        }
        parts.append(pd.DataFrame(columns))
    table = pd.concat(parts, ignore_index=True)
    table["tokens"] = table["prompt tokens"] + table[["chosen tokens", "rejected tokens"]].max(axis=1)
    return table


def _known_columns(rows: Dataset) -> dict[str, float]:
    found: Counter[str] = Counter()
    for batch in _batches(rows):
        for name in ("flipped", "eta", "augmented_prompt", "category"):
            found[name] += len(batch) - batch[name].null_count
        found["wrong by flipped"] += pc.sum(batch["flipped"]).as_py() or 0
        found["wrong by eta"] += pc.sum(pc.subtract(1.0, batch["eta"])).as_py() or 0
        texts = (pc.fill_null(batch[name], "") for name in ("prompt", *_RESPONSES))
        ascii_texts = [pc.string_is_ascii(text) for text in texts]
        found["non-ASCII"] += len(batch) - pc.sum(pc.and_(pc.and_(*ascii_texts[:2]), ascii_texts[2])).as_py()
    of = {"wrong by flipped": found["flipped"], "wrong by eta": found["eta"]}
    return {name: count / of.get(name, len(rows)) for name, count in found.items() if of.get(name, 1)}


def _lengths(table: pd.DataFrame, rows: int, max_length: int) -> Lengths:
    columns = ["prompt tokens", "chosen tokens", "rejected tokens", "tokens"]
    names = [*map(str, PERCENTILES), "max"]
    # The least number of tokens that so many percent of the pairs do not exceed.
    found = np.percentile(table[columns], [*PERCENTILES, 100], axis=0, method="inverted_cdf").astype(int)
    percentiles = pd.DataFrame(found, index=names, columns=PARTS).to_dict()
    return Lengths(
        percentiles=percentiles,
        kept_at={n: int((table["tokens"] <= n).sum()) / rows for n in sorted({*LIMITS, max_length})},
        suggested=-(-percentiles[PARTS[-1]]["99"] // 64) * 64,
    )


def count_repeats(table: pd.DataFrame) -> Repeats:
    """Return duplicates and contradictions among N pairs, by their hashes of prompt, chosen and rejected."""
    responses = table[["chosen", "rejected"]].to_numpy()
    first, second = responses.min(axis=1), responses.max(axis=1)
    pairs = pd.DataFrame({"prompt": table["prompt"], "first": first, "second": second})
    pairs["label"] = responses[:, 0] == first
    comparisons = pairs.groupby(["prompt", "first", "second"], sort=False)["label"].agg(["size", "sum"])
    comparisons = comparisons.reset_index()
    shown = comparisons.melt("prompt", ["first", "second"], ignore_index=False)
    shared = shown[shown.duplicated(["prompt", "value"], keep=False)].index.unique()
    more = comparisons[comparisons["size"] > 1]
    n, k = more["size"], more["sum"]
    outvoted = np.minimum(k, n - k)
    contradicting = outvoted > 0
    disagree = float((k * (n - k)).sum() / (n * (n - 1) / 2).sum()) if len(more) else 1.0
    return Repeats(
        copies=int(pairs.duplicated().sum()),
        sharing=int(comparisons["size"].loc[shared].sum()),
        comparisons=len(more),
        labels=int(n.sum()),
        contradicting_comparisons=int(contradicting.sum()),
        contradicting_labels=int(n[contradicting].sum()),
        least_wrong=int(outvoted.sum()),
        # Two labels, each wrong with probability e, disagree with probability 2 e (1 - e).
        noise=(1 - (1 - 2 * disagree) ** 0.5) / 2 if disagree <= 0.5 else None,
    )


def advice(report: DataStatistics, max_length: int, overlap: bool = True) -> list[str]:
    """Return a sentence with a fix for each problem; ``overlap=False`` accepts shared prompts."""
    # Both splits have the same template warnings.
    found = list(dict.fromkeys(said for split in report.splits.values() for said in split.token_warnings))
    too_long = {
        split: numbers.counts.get("too long", 0) / numbers.counts["rows"]
        for split, numbers in report.splits.items()
    }
    if max(too_long.values()) > DROPPED:
        shares = " and ".join(f"{share:.1%} of the {split} rows" for split, share in too_long.items())
        enough = max(numbers.lengths.suggested for numbers in report.splits.values())
        found.append(f"{shares} are too long for max_length {max_length}; raise it to {enough}.")
    for split, numbers in report.splits.items():
        found += _of_split(split, numbers)
    shared = report.overlap_normalised
    if overlap and shared.prompts:
        found.append(
            f"{shared.prompts:,} prompts are in both splits ({report.overlap.prompts:,} to the letter), so "
            f"{shared.validation_pairs:,} validation pairs do not measure new prompts; take "
            "these prompts out of the training rows."
        )
    return found


def _of_split(split: Split, report: SplitStatistics) -> Iterator[str]:
    rows, kept = report.counts["rows"], report.counts["kept"]
    for reason, fix in _FIXES.items():
        if report.counts.get(reason, 0) > DROPPED * rows:
            yield f"{split}: {report.counts[reason] / rows:.1%} of the rows are dropped, {reason}; {fix}."
    repeats, bias = report.repeats, report.bias
    if repeats.contradicting_labels > CONTRADICTING * kept:
        yield (
            f"{split}: {repeats.contradicting_labels / kept:.1%} of the pairs contradict another one, so "
            f"{repeats.least_wrong:,} labels or more are wrong; keep the majority's label of each "
            "comparison, or train with a method for noisy labels (configs/methods/)."
        )
    if repeats.copies > COPIES * kept:
        yield (
            f"{split}: {repeats.copies / kept:.1%} of the pairs are copies of others and count several "
            "times; keep one of each."
        )
    for side, share in (("chosen", bias.chosen_longer), ("rejected", bias.rejected_longer)):
        if share >= LONGER:
            yield (
                f"{split}: in {share:.0%} of the pairs the {side} response is the longer one, so a policy "
                "may learn length alone; balance the pairs by length, and hold accuracies against that share."
            )
    if split == "train" and report.counts[NO_AUGMENTED_PROMPT] > NO_VIEW * kept:
        yield (
            f"{split}: {report.counts[NO_AUGMENTED_PROMPT] / kept:.1%} of the pairs have no augmented "
            "prompt, so VNet (PACMR-DPO) does not learn from them; give them an augmented_prompt."
        )


def _batches(rows: Dataset) -> Iterator[pa.Table]:
    return rows.with_format("arrow").iter(batch_size=_AT_A_TIME)


def _hashes(values: Sequence[str | bytes]) -> np.ndarray:
    return pd.util.hash_array(np.array(values, dtype=object), categorize=False)


def _list_bytes(column: pa.ChunkedArray) -> list[bytes]:
    lists = column.combine_chunks()
    values = lists.values.to_numpy()
    return [values[start:end].tobytes() for start, end in pairwise(lists.offsets.to_numpy())]
