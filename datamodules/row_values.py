"""Values of a ``datasets.Dataset``, read a batch at a time."""

from collections.abc import Iterator, Sequence
from typing import Any

from datasets import Dataset

from pacmr_lightning.evaluation.conversation import message_text

from .chat import decode_messages


def values_of(rows: Dataset, *names: str) -> Iterator[tuple[Any, ...]]:
    """Yield the values of some columns row by row, read in batches for speed and memory."""
    for batch in rows.select_columns(list(names)).iter(batch_size=1000):
        yield from zip(*(batch[name] for name in names), strict=True)


def prompts_of(rows: Dataset) -> list[str]:
    """Return the prompts of rows; unusable ones have the empty prompt."""
    return [prompt if reason is None else "" for prompt, reason in values_of(rows, "prompt", "reason")]


def response_text(response: str, chat: bool) -> str:
    """Return a response of a row as a text: of a chat message its content, and its other fields as JSON."""
    return message_text(decode_messages(response)[0]) if chat else response


def response_texts(rows: Dataset) -> Iterator[tuple[str, str]]:
    """Yield both responses of pairs as texts; unusable rows have empty ones."""
    for *sides, chat, reason in values_of(rows, "chosen", "rejected", "chat", "reason"):
        chosen, rejected = (response_text(side, chat) if reason is None else "" for side in sides)
        yield chosen, rejected


def readable_texts(rows: Dataset, ids: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Prompt, chosen and rejected of usable pairs as a person reads them, labels as found, by their ids."""
    places = {name: i for i, name in enumerate(rows["id"][:])}
    # One read of them all: a row at a time takes several times as long.
    found = rows.select([places[name] for name in ids]).to_dict()
    columns = (found[name] for name in ("prompt", "chosen", "rejected", "chat", "tools"))
    for said, chosen, rejected, chat, tools in zip(*columns, strict=True):
        if chat:
            said = "\n\n".join(f"{m['role']}: {message_text(m)}" for m in decode_messages(said))
            said = f"tools: {tools}\n\n{said}" if tools else said
        yield said, response_text(chosen, chat), response_text(rejected, chat)
