"""What the policy writes along the way, beside the reference, for a few fixed prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import move_data_to_device

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.generation import Decoding, respond
from pacmr_lightning.evaluation.prompt_batch import PromptBatch
from pacmr_lightning.files import replacing
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.datamodule import datamodule
from pacmr_lightning.runs.folder import RESPONSES

from .first_prompts import first_prompts
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
    """The prompts, on the ranks that ask; there from the start of training on."""

    def __init__(self, prompts: int = 4, every: int = 500, max_new_tokens: int | None = None):
        super().__init__()
        for option, value in (("prompts", prompts), ("every", every), ("max_new_tokens", max_new_tokens)):
            if value is not None and value < 1:
                raise UserError(f"{option} is {value}, but it must be at least 1.")
        self.prompts = prompts
        self.every = every
        self.max_new_tokens = max_new_tokens
        self._asks = False
        self._reference: list[str] = []
        self._rows: list[dict[str, Any]] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Asks the reference, once, and the policy as it is."""
        self._asks = trainer.is_global_zero or pl_module.policy.is_sharded
        if not self._asks:
            return
        device = trainer.strategy.root_device
        self._batch = move_data_to_device(first_prompts(trainer, self.prompts, "SampleResponses"), device)
        with pl_module.policy.reference():
            self._reference = self._answers(trainer, pl_module)
        step = trainer.global_step
        self._rows = [row for row in _read(self._path(trainer)) if row["step"] <= step] if step else []
        if not self._rows:
            self._look(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Asks the policy where it is time."""
        if self._asks and trainer.global_step % self.every == 0:
            self._look(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Asks the policy for the last time."""
        if self._asks and self._rows[-1]["step"] != trainer.global_step:
            self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        responses = self._answers(trainer, pl_module)
        named = list(zip(self._batch.ids, self._batch.prompts, self._reference, responses, strict=True))
        new = [
            {
                "step": trainer.global_step,
                "id": name,
                "prompt": prompt,
                "reference": reference,
                "response": text,
            }
            for name, prompt, reference, text in named
        ]
        self._rows += new
        if not trainer.is_global_zero:
            return
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self._rows)
        with replacing(self._path(trainer)) as temporary:
            temporary.write_text(lines, encoding="utf-8")
        shown = {
            name: {"Prompt": prompt, "Reference": reference, "Policy": text}
            for name, prompt, reference, text in named
        }
        log_texts(trainer, "responses", shown)

    def _answers(self, trainer: Trainer, pl_module: PreferenceModule) -> list[str]:
        limit = self.max_new_tokens or pl_module.max_new_tokens
        tokenizer = datamodule(trainer).tokenizer
        return [r.text for r in respond(pl_module.policy, tokenizer, self._batch, limit, Decoding())]

    @staticmethod
    def _path(trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) / RESPONSES


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # Not str.splitlines, which also cuts at separators that a response may hold.
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
