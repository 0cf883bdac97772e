"""Scores what the policy generates, where a gold reward is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from pacmr_lightning.errors import UserError
from pacmr_lightning.files import replacing
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.data import datamodule
from pacmr_lightning.runs.folder import SAMPLES


class GoldReward(Callback):
    """Mean gold reward of responses that the trained policy samples at temperature 1.

    At the end of training it logs ``val/gold_reward`` and ``val/gold_reward_stderr`` (of the mean) to all
    loggers and to ``trainer.callback_metrics``, from where ``RunSummary`` takes them, and writes the samples
    (prompt, response, gold_reward) to ``samples.jsonl`` in the run's folder. The prompts are those of the
    datamodule's source, from the first again when there are fewer of them than samples. The global random
    state is left as it was.

    All ranks generate the same samples: sharded models need them to take the same number of forward passes,
    and so the number does not depend on how many ranks there are.

    Args:
        samples: responses to generate, at least 2.
        max_new_tokens: length at which a response is cut, in tokens.
        batch_size: responses to generate at a time.
        seed: of the sampling.

    Raises:
        UserError: an option is out of range; at setup, the data has no gold reward or no prompts.
    """

    def __init__(self, samples: int = 512, max_new_tokens: int = 64, batch_size: int = 128, seed: int = 0):
        super().__init__()
        if samples < 2:
            raise UserError(f"samples is {samples}, but a standard error needs at least 2.")
        if max_new_tokens < 1 or batch_size < 1:
            raise UserError(
                f"max_new_tokens is {max_new_tokens} and batch_size {batch_size}, but both must be 1 or more."
            )
        self.samples = samples
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self.seed = seed

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses data that cannot be scored before any time is spent on training."""
        if stage != "fit":
            return
        data = datamodule(trainer)
        if data is None or data.gold_reward is None:
            task = "of this run" if data is None else f"of task {data.task}"
            raise UserError(
                f"The data {task} has no gold reward; take GoldReward out of trainer.callbacks, or train on "
                "the embedded world."
            )
        if not data.source.prompts:
            raise UserError(
                f"The source of task {data.task} has no prompts; take GoldReward out of trainer.callbacks."
            )

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Generates, scores, logs and writes."""
        data = datamodule(trainer)
        every = data.source.prompts
        prompts = [every[i % len(every)] for i in range(self.samples)]
        responses = self._responses(trainer, pl_module, prompts)
        scores = [float(data.gold_reward(*pair)) for pair in zip(prompts, responses, strict=True)]
        rewards = torch.tensor(scores, dtype=torch.double)
        metrics = {
            "val/gold_reward": rewards.mean(),
            "val/gold_reward_stderr": rewards.std() / len(rewards) ** 0.5,
        }
        # Lightning has no self.log in this hook.
        trainer.callback_metrics.update(metrics)
        for logger in trainer.loggers:
            # The row of the update that has just been done, as the module's own metrics.
            logger.log_metrics(
                {name: float(value) for name, value in metrics.items()}, step=trainer.global_step - 1
            )
            logger.save()
        if trainer.is_global_zero:
            with (
                replacing(Path(trainer.default_root_dir) / SAMPLES) as temporary,
                temporary.open("w", encoding="utf-8") as file,
            ):
                for prompt, response, score in zip(prompts, responses, scores, strict=True):
                    row = {"prompt": prompt, "response": response, "gold_reward": score}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _responses(self, trainer: Trainer, pl_module: PreferenceModule, prompts: list[str]) -> list[str]:
        tokenizer = datamodule(trainer).tokenizer
        device = trainer.strategy.root_device
        responses: list[str] = []
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            for start in range(0, len(prompts), self.batch_size):
                inputs = tokenizer(
                    prompts[start : start + self.batch_size],
                    padding=True,
                    padding_side="left",
                    return_tensors="pt",
                ).to(device)
                sequences = pl_module.policy.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    max_new_tokens=self.max_new_tokens,
                    do_sample=True,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=0,  # transformers' own default keeps the 50 likeliest tokens only
                    eos_token_id=tokenizer.eos_token_id,
                    pad_token_id=tokenizer.pad_token_id,
                )
                continuations = sequences[:, inputs["input_ids"].shape[1] :]
                responses += tokenizer.batch_decode(continuations, skip_special_tokens=True)
        return responses
