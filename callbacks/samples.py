"""Responses of the policy along the way, beside the reference's, to a few fixed prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import move_data_to_device

from pacmr_lightning.errors import check_at_least
from pacmr_lightning.evaluation.generation import Decoding, respond
from pacmr_lightning.evaluation.prompt_batch import PromptBatch
from pacmr_lightning.files import write_json_lines
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.datamodule import datamodule
from pacmr_lightning.runs.folder import RESPONSES

from .sequence_kl import first_prompts
from .to_loggers import log_texts


class SampleResponses(Callback):
    """Greedy responses of reference and policy to a few fixed prompts, as text for the loggers and as a file.

    ``responses.jsonl`` in the run's folder has one row a prompt and a step: ``step`` (policy updates),
    ``id``, ``prompt``, ``reference`` and ``response``. The prompts are the first ones that ``predict`` would
    answer. A fit that goes on from step s first drops the rows of later steps. Rank 0 asks, and where ZeRO-3
    keeps the model in parts all ranks ask the same.

    Args:
        prompts: how many prompts.
        every: policy updates between two looks; there is one at the start and one at the end, too.
        max_new_tokens: of a response; None for the module's own.

    Raises:
        UserError: a number is below 1; or, when training starts, the datamodule has no prompt.
    """

    _batch: PromptBatch
    """The prompts, on the ranks that generate; set when training starts."""

    def __init__(self, prompts: int = 4, every: int = 500, max_new_tokens: int | None = None):
        super().__init__()
        check_at_least(1, prompts=prompts, every=every, max_new_tokens=max_new_tokens)
        self.prompts = prompts
        self.every = every
        self.max_new_tokens = max_new_tokens
        self._generates = False
        self._reference: list[str] = []
        self._rows: list[dict[str, Any]] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Generate with the reference, once, and with the policy as it is."""
        self._generates = trainer.is_global_zero or pl_module.policy.is_sharded
        if not self._generates:
            return
        device = trainer.strategy.root_device
        self._batch = move_data_to_device(first_prompts(trainer, self.prompts, "SampleResponses"), device)
        with pl_module.policy.reference():
            self._reference = self._responses(trainer, pl_module)
        step, path = trainer.global_step, Path(trainer.default_root_dir) / RESPONSES
        self._rows = []
        if step and path.exists():
            # Not str.splitlines, which also cuts at separators that a response may hold.
            with path.open(encoding="utf-8") as file:
                self._rows = [row for line in file if (row := json.loads(line))["step"] <= step]
        if not self._rows:
            self._look(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Generate where it is due."""
        if self._generates and trainer.global_step % self.every == 0:
            self._look(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Generate at the end."""
        if self._generates and self._rows[-1]["step"] != trainer.global_step:
            self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        responses = self._responses(trainer, pl_module)
        columns = ("id", "prompt", "reference", "response")
        answered = zip(self._batch.ids, self._batch.prompts, self._reference, responses, strict=True)
        new = [{"step": trainer.global_step} | dict(zip(columns, row, strict=True)) for row in answered]
        self._rows += new
        if trainer.is_global_zero:
            write_json_lines(Path(trainer.default_root_dir) / RESPONSES, self._rows)
            headings = {"Prompt": "prompt", "Reference": "reference", "Policy": "response"}
            shown = {row["id"]: {heading: row[key] for heading, key in headings.items()} for row in new}
            log_texts(trainer, "responses", shown)

    def _responses(self, trainer: Trainer, pl_module: PreferenceModule) -> list[str]:
        limit = self.max_new_tokens or pl_module.max_new_tokens
        tokenizer = datamodule(trainer).tokenizer
        return [r.text for r in respond(pl_module.policy, tokenizer, self._batch, limit, Decoding())]
