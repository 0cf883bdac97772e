"""The container for prompts that a policy is to answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class PromptBatch:
    """N prompts, padded on the left to L tokens, so that every answer begins at position L."""

    ids: list[str]
    """N prompt ids."""
    prompts: list[str]
    """N prompts as text, for judges and gold rewards."""
    input_ids: Tensor
    """(N, L) int64 token ids: padding, then the prompt."""
    attention_mask: Tensor
    """(N, L) int64: 0 for padding, 1 for the prompt."""

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @classmethod
    def collate(
        cls, ids: Sequence[str], prompts: Sequence[str], tokens: Sequence[Sequence[int]], *, pad_id: int
    ) -> PromptBatch:
        """Lays N tokenized prompts out as rows.

        Args:
            ids: N prompt ids.
            prompts: N prompts as text.
            tokens: N token lists, at least one token each.
            pad_id: token id that fills the rows up; it is never attended to.
        """
        length = max((len(t) for t in tokens), default=0)
        input_ids = torch.full((len(tokens), length), pad_id, dtype=torch.long)
        attention_mask = torch.zeros((len(tokens), length), dtype=torch.long)
        for row, t in enumerate(tokens):
            input_ids[row, length - len(t) :] = torch.tensor(t, dtype=torch.long)
            attention_mask[row, length - len(t) :] = 1
        return cls(list(ids), list(prompts), input_ids, attention_mask)
