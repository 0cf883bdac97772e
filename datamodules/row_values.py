"""Values of a ``datasets.Dataset``, read a batch at a time."""

from collections.abc import Iterator, Sequence
from typing import Any

from datasets import Dataset

from pacmr_lightning.evaluation.conversation import message_text

from .chat import decode_messages
from .prompts import split_row


def values_of(rows: Dataset, *names: str) -> Iterator[tuple[Any, ...]]:
    """Yield the values of some columns row by row, read in batches for speed and memory."""
    for batch in rows.select_columns(list(names)).iter(batch_size=1000):
        yield from zip(*(batch[name] for name in names), strict=True)


def prompts_of(rows: Dataset) -> Iterator[str]:
    """Yield the prompts of pairs; unusable rows have the empty prompt."""
    for row in values_of(rows, "prompt", "chosen", "rejected", "chat"):
        yield split_row(*row).prompt


def readable_texts(rows: Dataset, ids: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Prompt, chosen and rejected of pairs as a person reads them, labels as found, by their ids."""
    places = {name: i for i, name in enumerate(rows["id"][:])}
    # One read of them all: a row at a time takes several times as long.
    found = rows.select([places[name] for name in ids]).to_dict()
    columns = (found[name] for name in ("prompt", "chosen", "rejected", "chat", "tools"))
    for prompt, chosen, rejected, chat, tools in zip(*columns, strict=True):
        split = split_row(prompt, chosen, rejected, chat)
        said = split.prompt
        if chat:
            said = "\n\n".join(f"{m['role']}: {message_text(m)}" for m in decode_messages(said))
            said = f"tools: {tools}\n\n{said}" if tools else said
        yield said, split.chosen, split.rejected
