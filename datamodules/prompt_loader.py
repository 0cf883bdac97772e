"""Prompts for a policy to answer when it is evaluated."""

from __future__ import annotations

from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.prompt_batch import PromptBatch

from .tokenizer import prompt_tokens


def prompt_loader(
    prompts: list[str] | None,
    validation: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    batch_size: int,
) -> DataLoader:
    """``PromptBatch`` after ``PromptBatch``, each prompt once.

    Args:
        prompts: texts; None for the distinct prompts of the validation pairs.
        validation: tokenized pairs, as ``tokenize_pairs`` makes them.
        tokenizer: encodes the texts.
        max_length: tokens; prompts that leave no room for a response are left out.
        batch_size: prompts of a batch.
    """
    if prompts is not None:
        tokens = prompt_tokens(tokenizer, prompts)
        found = [(f"prompt-{i}", *prompt) for i, prompt in enumerate(zip(prompts, tokens, strict=True))]
    else:
        columns = (validation[name][:] for name in ("id", "prompt", "prompt_ids"))
        # Reversed, so that a prompt goes by the id of the first of its pairs.
        named = {row[1]: row for row in reversed(list(zip(*columns, strict=True)))}
        found = list(reversed(named.values()))
    rows = [row for row in found if 0 < len(row[2]) < max_length]

    def collate(part: list[tuple[str, str, list[int]]]) -> PromptBatch:
        return PromptBatch.collate(*zip(*part, strict=True), pad_id=tokenizer.pad_token_id)

    return DataLoader(rows, batch_size=batch_size, collate_fn=collate)
