"""TRL's DPOTrainer with our settings, for comparison."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # TRL would report its use

import datasets
import torch
from peft import LoraConfig
from timed_runs import BETAS, LEARNING_RATE, MAX_GRAD_NORM, Shape
from transformers import AutoTokenizer, PreTrainedModel, PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer

from pacmr_lightning.batch import LogProbs


class Clock(TrainerCallback):
    """Measures seconds of each step of TRL's trainer, from its batch to the end of its update."""

    def __init__(self, device: str):
        self.device = device
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start; the batch is ready."""
        self._wait()
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop."""
        self._wait()
        self.seconds.append(time.perf_counter() - self._start)

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def make_trl(
    folder: Path,
    rows: list[dict[str, str]],
    shape: Shape,
    adapter: dict[str, torch.Tensor],
    device: str,
    steps: int = 1,
    model: PreTrainedModel | None = None,
    **options: Any,
) -> DPOTrainer:
    """Return TRL's trainer with our settings and adapter; ``model`` replaces the one in the folder."""
    args = DPOConfig(
        output_dir=str(folder / "trl"),
        precompute_ref_log_probs=True,
        **{"gradient_checkpointing": False, "bf16": False, **options},
        model_init_kwargs=None if model else {"dtype": shape.dtype, "attn_implementation": "sdpa"},
        max_length=None,
        per_device_train_batch_size=shape.micro_batch or shape.pairs,
        gradient_accumulation_steps=shape.pairs // (shape.micro_batch or shape.pairs),
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=device == "cpu",
    )
    columns = ("prompt", "chosen", "rejected")
    trainer = DPOTrainer(
        model=model or str(folder),
        args=args,
        train_dataset=datasets.Dataset.from_list([{name: row[name] for name in columns} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(
            r=shape.rank, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
        ),
    )
    # The reference's log-probabilities, already computed, do not depend on it.
    parameters = {f"peft.{name}": p for name, p in trainer.model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, value in adapter.items():
            parameters[name].copy_(value)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock(device))
    return trainer


def trl_turn(trainer: DPOTrainer) -> list[float]:
    """Seconds of each update of a turn of TRL's trainer but the first."""
    (clock,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Clock))
    clock.seconds.clear()
    trainer.train()
    # Each call wraps the model's forward in autocast, the next one again.
    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    return clock.seconds[1:]


@torch.no_grad()
def trl_log_probs(trainer: DPOTrainer) -> LogProbs:
    """Return the log-probabilities of TRL's loss."""
    batch = trainer.data_collator(list(trainer.train_dataset))
    inputs = {name: batch[name].to(trainer.model.device) for name in ("input_ids", "attention_mask")}
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100).to(trainer.model.device)
    out = trainer.model(**inputs, labels=labels, fused_lm_head=True, use_cache=False)
    return LogProbs(*out.log_probs.sum(1).cpu().chunk(2))
