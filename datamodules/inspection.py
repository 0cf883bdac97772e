"""Statistics of preference data under a tokenizer (``pacmr inspect``), and rows token by token."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from rich.padding import Padding
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.batch import Segment
from pacmr_lightning.evaluation.generation import decode_response

from .sources import Source, Split
from .token_report import token_warnings
from .tokenization import Tokenization, tokenize_pairs
from .tokenized_pairs import TokenizedPairs, part_lengths, row_bytes

_PARTS = ["prompt", "chosen", "rejected"]
_COLUMNS = [f"{part}_ids" for part in _PARTS]
LEGEND = (
    "Tokens are set apart by blanks; ▁ is a blank of the text and ⏎ a line break. Those in ‹angle brackets› "
    "count for the loss, those of the prompt do not."
)
SHOWN = 60
"""Tokens shown at each end of a long part."""

_STYLES = {Segment.PROMPT: "dim", Segment.CHOSEN: "green", Segment.REJECTED: "red"}


def inspect_pairs(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    tokenization: Tokenization = "default",
) -> tuple[dict[Split, dict[str, Any]], TokenizedPairs]:
    """Return the numbers of both splits, tokenized as in training, and the kept training pairs.

    Numbers of a split: ``counts`` as in a run; distinct ``prompts`` of the kept pairs; pairs whose prompt is
    also ``in_other_split``; ``lengths`` in tokens (means, the ``longest`` prompt with its longer response,
    and shares of pairs whose one response is longer); ``repeats`` of ``count_repeats``; ``warnings``.
    """
    splits: tuple[Split, Split] = ("train", "validation")
    read = {split: source.load(split) for split in splits}
    kept = {
        split: tokenize_pairs(rows, tokenizer, max_length, None, tokenization, f"{split} pairs")
        for split, rows in read.items()
    }
    hashes = {
        split: pd.DataFrame(([*map(hash, row)] for row in row_bytes(rows, *_COLUMNS)), columns=_PARTS)
        for split, (rows, _) in kept.items()
    }
    numbers: dict[Split, dict[str, Any]] = {}
    for split, other in zip(splits, splits[::-1], strict=True):
        (rows, counts), table = kept[split], hashes[split]
        lengths = pd.DataFrame(part_lengths(rows, *_COLUMNS).T, columns=_PARTS)
        chosen, rejected = lengths["chosen"], lengths["rejected"]
        ties = TokenizedPairs(rows, tokenizer.pad_token_id).ties
        numbers[split] = {
            "counts": counts,
            "prompts": table["prompt"].nunique(),
            "in_other_split": int(table["prompt"].isin(hashes[other]["prompt"]).sum()),
            "lengths": {
                **lengths.mean().to_dict(),
                "longest": int((lengths["prompt"] + np.maximum(chosen, rejected)).max()),
                "chosen_longer": float((chosen > rejected).mean()),
                "rejected_longer": float((chosen < rejected).mean()),
            },
            "repeats": count_repeats(table[~ties]),  # a tie contradicts no label
            "warnings": list(token_warnings(tokenizer, read[split], rows, split)),
        }
    return numbers, TokenizedPairs(kept["train"][0], tokenizer.pad_token_id)


def count_repeats(table: pd.DataFrame) -> dict[str, int]:
    """Return duplicates and contradictions among N pairs, by their hashes of prompt, chosen and rejected.

    A comparison is a prompt with two responses. ``copies``: pairs like an earlier one. ``comparisons`` with
    more than one label, and these ``labels``. ``contradicting_comparisons``: those with both responses
    chosen. ``least_wrong``: labels in the minority of their comparison, a lower bound on wrong labels.
    """
    responses = table[["chosen", "rejected"]].to_numpy()
    first, second = responses.min(axis=1), responses.max(axis=1)
    pairs = pd.DataFrame({"prompt": table["prompt"], "first": first, "second": second})
    pairs["label"] = responses[:, 0] == first
    comparisons = pairs.groupby(["prompt", "first", "second"], sort=False)["label"].agg(["size", "sum"])
    more = comparisons[comparisons["size"] > 1]
    n, k = more["size"], more["sum"]
    outvoted = np.minimum(k, n - k)
    return {
        "copies": int(pairs.duplicated().sum()),
        "comparisons": len(more),
        "labels": int(n.sum()),
        "contradicting_comparisons": int((outvoted > 0).sum()),
        "least_wrong": int(outvoted.sum()),
    }


def show_rows(pairs: TokenizedPairs, tokenizer: PreTrainedTokenizerBase) -> Iterator[Text | Padding]:
    """Yield printed forms of the shortest, median and longest of N pairs, collated as in training."""
    order = pairs.lengths().argsort(kind="stable").tolist()
    places = {"shortest": order[0], "median": order[len(order) // 2], "longest": order[-1]}
    batch = pairs.batch(list(places.values()))
    for row, name in enumerate(places):
        ids, segments = batch.input_ids[row], batch.segment_ids[row]
        parts = {kind: ids[segments == kind].tolist() for kind in Segment}
        counts = ", ".join(f"{len(parts[kind])} {kind.name.lower()}" for kind in _STYLES)
        padding = f"{len(parts[Segment.PAD])} of padding beside the others"
        yield Text.assemble((f"The {name} pair, {batch.ids[row]}", "bold"), f" (tokens: {counts}, {padding})")
        for kind, style in _STYLES.items():
            heading = Text(f"{kind.name.lower()}: ", style="bold")
            shown = token_text(parts[kind], tokenizer, counts=kind != Segment.PROMPT)
            yield Padding(heading + Text(shown, style=style), (0, 0, 0, 2), expand=False)


def token_text(ids: list[int], tokenizer: PreTrainedTokenizerBase, counts: bool) -> str:
    """Return tokens decoded one by one, shortened; angle brackets mark those that count for the loss."""
    pieces, names = {}, {" ": "▁", "\n": "⏎"}
    for place in range(len(ids)):
        if SHOWN <= place < len(ids) - SHOWN:
            continue
        text = decode_response(tokenizer, ids[:place], ids[place : place + 1])
        # Special tokens and parts of UTF-8 characters have no text; show the token's name.
        if not text or "\N{REPLACEMENT CHARACTER}" in text:
            text = str(tokenizer.convert_ids_to_tokens(ids[place]))
        piece = "".join(
            names.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text
        )
        pieces[place] = f"‹{piece}›" if counts else piece
    shown = list(pieces.values())
    left_out = len(ids) - len(shown)
    if left_out:
        shown.insert(SHOWN, f"[… {left_out} tokens are left out here …]")
    return " ".join(shown)
