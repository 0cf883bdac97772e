"""Scores what the policy generates, where a gold reward is known."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.generation import decode_response
from pacmr_lightning.evaluation.reward import Reward
from pacmr_lightning.files import write_json_lines
from pacmr_lightning.modules.datamodule import datamodule
from pacmr_lightning.runs.folder import SAMPLES

from .sequence_kl import SequenceKL, Tokens, mean_and_error
from .to_loggers import log_numbers


class GoldReward(SequenceKL):
    """Mean gold reward of responses that the trained policy samples at temperature 1, and their KL.

    At the end of training, and along the way where ``every`` says so, it logs ``val/gold_reward`` and
    ``val/gold_reward_stderr`` (of the mean) and, of the same responses, what ``SequenceKL`` logs, and writes
    the samples (prompt, response, gold_reward) to ``samples.jsonl`` in the run's folder. The prompts are
    those of the datamodule's source, or where it has none of its own, as in ``SequenceKL``.

    Args:
        samples: see ``SequenceKL``.
        max_new_tokens: see ``SequenceKL``.
        batch_size: see ``SequenceKL``.
        seed: see ``SequenceKL``.
        every: see ``SequenceKL``.
        second_reward: another reward, which nothing was trained on; its mean is logged as
            ``val/second_reward``, with its standard error. A policy that games the first raises that alone.

    Raises:
        UserError: an option is out of range; at setup, the data has no gold reward; see also ``SequenceKL``.
    """

    def __init__(
        self,
        samples: int = 512,
        max_new_tokens: int = 64,
        batch_size: int = 128,
        seed: int = 0,
        every: int | None = None,
        second_reward: Reward | None = None,
    ):
        super().__init__(samples, max_new_tokens, batch_size, seed, every)
        self.second_reward = second_reward

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses data that cannot be scored before any time is spent on training."""
        if stage != "fit":
            return
        data = datamodule(trainer)
        if data is None or data.gold_reward is None:
            task = "of this run" if data is None else f"of task {data.task}"
            raise UserError(
                f"The data {task} has no gold reward; take GoldReward out of trainer.callbacks, or give one "
                "with --data.source.reward, or train on the embedded world."
            )

    def _look(self, trainer: Trainer, pl_module: Any) -> None:
        """Generates, scores, logs and writes."""
        data = datamodule(trainer)
        texts, asked = self._prompts(trainer)
        tokens = self._sample(trainer, pl_module, asked)
        pairs = zip(cycle(asked), tokens, strict=False)
        responses = [decode_response(data.tokenizer, *pair) for pair in pairs]
        prompts = list(islice(cycle(texts), self.samples))
        answered = list(zip(prompts, responses, strict=True))
        scores = [float(data.gold_reward(*pair)) for pair in answered]
        log_numbers(trainer, mean_and_error("gold_reward", torch.tensor(scores, dtype=torch.double)))
        if self.second_reward is not None:
            others = [self.second_reward(*pair) for pair in answered]
            log_numbers(trainer, mean_and_error("second_reward", torch.tensor(others, dtype=torch.double)))
        if trainer.is_global_zero:
            rows = [
                {"prompt": prompt, "response": response, "gold_reward": score}
                for (prompt, response), score in zip(answered, scores, strict=True)
            ]
            write_json_lines(Path(trainer.default_root_dir) / SAMPLES, rows)

    def _prompts(self, trainer: Trainer) -> tuple[list[str], list[Tokens]]:
        data = datamodule(trainer)
        if not data.source.prompts:
            return super()._prompts(trainer)
        return data.source.prompts, data.prompt_ids(data.source.prompts)
