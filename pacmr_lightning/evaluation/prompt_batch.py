"""Prompts as a batch for generation, and responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .conversation import Messages


@dataclass
class Response:
    """A model's response to a prompt."""

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int | None
    response_tokens: int | None
    """Generated tokens, the end token included; None where the server does not count."""

    def row(self, name: str, prompt: str | Messages) -> dict[str, Any]:
        """Return the row of a file of responses."""
        counts = {"prompt_tokens": self.prompt_tokens, "response_tokens": self.response_tokens}
        answer = {"response": self.text, "finish_reason": self.finish_reason}
        return {"id": name, "prompt": prompt, **answer, **counts}


@dataclass
class PromptBatch:
    """N prompts, padded on the left to L tokens, so that every answer begins at position L."""

    ids: list[str]
    prompts: list[str]
    """N prompts as the model reads them, for gold rewards."""
    input_ids: Tensor
    """(N, L) int64 token ids."""
    attention_mask: Tensor
    """(N, L) int64: 0 for padding, 1 for the prompt."""
    asked: Sequence[str | Messages] = ()
    """N prompts for a file of responses: chat messages where the data has them, else texts."""
    places: Sequence[int] = ()
    """N positions in the data, in which order the file is written."""
    columns: Sequence[dict[str, Any]] = ()
    """N dicts of row columns for the file: ``tools`` and ``chat_template_kwargs``."""
    answers: list[Response] | None = None
    """N answers of an earlier run, if nothing is to be generated."""
    decoding: Any = None
    """``Decoding`` of this batch; None for greedy."""

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @classmethod
    def collate(
        cls,
        ids: Sequence[str],
        prompts: Sequence[str],
        tokens: Sequence[Sequence[int]],
        *,
        pad_id: int,
        **of_files: Any,
    ) -> PromptBatch:
        """Collate N prompts of at least one token; ``of_files`` are ``asked``, ``places`` and ``columns``."""
        rows = [torch.tensor(ids_of_row) for ids_of_row in tokens]
        ones = [torch.ones_like(row) for row in rows]
        input_ids = pad_sequence(rows, True, pad_id, padding_side="left")
        mask = pad_sequence(ones, True, 0, padding_side="left")
        return cls(list(ids), list(prompts), input_ids, mask, **of_files)
