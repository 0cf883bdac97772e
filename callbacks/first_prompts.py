"""The prompts that callbacks ask the policy."""

from __future__ import annotations

from itertools import islice

from lightning.pytorch import Trainer

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.prompt_batch import PromptBatch
from pacmr_lightning.modules.datamodule import datamodule


def first_prompts(trainer: Trainer, count: int, asker: str) -> PromptBatch:
    """The first prompts that ``predict`` would answer, at most ``count``, as one batch on the CPU.

    Raises:
        UserError: there is none; ``asker`` is the callback to take out then.
    """
    rows = [
        (batch.ids[i], batch.prompts[i], batch.input_ids[i][batch.attention_mask[i] == 1].tolist())
        for batch in islice(datamodule(trainer).predict_dataloader(), count)
        for i in range(len(batch))
    ]
    if not rows:
        raise UserError(f"{asker} needs prompts, but the data has none; take it out.")
    columns = zip(*rows[:count], strict=True)
    return PromptBatch.collate(*columns, pad_id=datamodule(trainer).tokenizer.pad_token_id)
