"""Prompts that a policy answers, as a batch, and its responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .conversation import Messages


@dataclass
class Response:
    """A model's response to a prompt."""

    text: str
    """Without the token that ended it, and without special tokens."""
    finish_reason: Literal["stop", "length"]
    """``length`` where it was cut at the limit of tokens."""
    prompt_tokens: int | None
    """None where nobody has counted them, as some servers do not."""
    response_tokens: int | None
    """Generated tokens, with the one that ended the response; likewise."""

    def row(self, name: str, prompt: str | Messages) -> dict[str, Any]:
        """Return the row of a file of responses, for a prompt's id and its text or chat messages."""
        counts = {"prompt_tokens": self.prompt_tokens, "response_tokens": self.response_tokens}
        answer = {"response": self.text, "finish_reason": self.finish_reason}
        return {"id": name, "prompt": prompt, **answer, **counts}


@dataclass
class PromptBatch:
    """N prompts, padded on the left to L tokens, so that every answer begins at position L."""

    ids: list[str]
    """N prompt ids."""
    prompts: list[str]
    """N prompts as the model reads them, for gold rewards."""
    input_ids: Tensor
    """(N, L) int64 token ids: padding, then the prompt."""
    attention_mask: Tensor
    """(N, L) int64: 0 for padding, 1 for the prompt."""
    asked: list[str | Messages]
    """N prompts for judges: chat messages where the data holds such, else the same texts."""
    places: list[int]
    """N places in the order of the data, in which files are written; batches may be in another one."""
    columns: list[dict[str, Any]]
    """N further columns of their rows, ``tools`` and ``chat_template_kwargs``, for files of responses."""
    answers: list[Response] | None = None
    """N answers of an earlier run, so that nothing has to be generated."""

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
        asked: Sequence[str | Messages] | None = None,
        places: Sequence[int] | None = None,
        columns: Sequence[dict[str, Any]] | None = None,
    ) -> PromptBatch:
        """Lay N prompts of at least one token each out as rows, padded with a token that is not attended to.

        ``asked``, ``places`` and ``columns`` are by default the texts, the order of the batch, and none.
        """
        length = max((len(t) for t in tokens), default=0)
        input_ids = torch.full((len(tokens), length), pad_id, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, t in enumerate(tokens):
            input_ids[row, length - len(t) :] = torch.tensor(t, dtype=torch.long)
            attention_mask[row, length - len(t) :] = 1
        return cls(
            list(ids),
            list(prompts),
            input_ids,
            attention_mask,
            list(prompts if asked is None else asked),
            list(range(len(tokens)) if places is None else places),
            [{} for _ in tokens] if columns is None else list(columns),
        )
