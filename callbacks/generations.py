"""Writes down what ``predict`` generates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info

from pacmr_lightning.prompt_batch import PromptBatch
from pacmr_lightning.run_folder import replacing

GENERATIONS = "generations.jsonl"
"""File of generated responses inside a run's folder."""


class GenerationWriter(BasePredictionWriter):
    """Writes ``generations.jsonl`` into the run's folder: ``id``, ``prompt`` and ``response`` of each prompt.

    The file appears when all prompts are done. Each rank keeps the rows of its own prompts until then.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="batch")
        self._rows: list[dict[str, str]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: list[str],
        batch_indices: Sequence[int] | None,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Keeps the rows of a batch."""
        for name, prompt, response in zip(batch.ids, batch.prompts, prediction, strict=True):
            self._rows.append({"id": name, "prompt": prompt, "response": response})

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collects the ranks' rows and writes the file."""
        path = Path(trainer.default_root_dir) / GENERATIONS
        with replacing(path.with_name(f"{GENERATIONS}.{trainer.global_rank}")) as part:
            part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self._rows))
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            parts = [path.with_name(f"{GENERATIONS}.{rank}") for rank in range(trainer.world_size)]
            with replacing(path) as whole:
                whole.write_text("".join(part.read_text() for part in parts))
            for part in parts:
                part.unlink()
            rank_zero_info(f"Generated responses are in {path}.")
