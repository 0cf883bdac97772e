"""A random model and random pairs as files, and timed runs of PreferenceModule on them."""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
import transformers
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from machine import PeakMemory
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from pacmr_lightning.datamodules import Files, PreferenceDataModule
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.token_layout import Layout
from pacmr_lightning.weighting import Weighting

SPECIAL = ("<pad>", "<eos>")
# For every contestant.
LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0


@dataclass
class Shape:
    """Sizes of a model and of its pairs, by default TL;DR's and a small Llama; lengths are from and to."""

    pairs: int = 32
    prompt: tuple[int, int] = (200, 400)
    response: tuple[int, int] = (25, 50)
    """With EOS."""
    width: int = 256
    layers: int = 6
    vocabulary: int = 32_000
    rank: int = 16
    micro_batch: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the frozen base."""


def add_shape(parser: argparse.ArgumentParser, shape: Shape) -> None:
    """Add an option per size, with the defaults of ``shape``."""
    for size in fields(Shape):
        name, default = f"--{size.name.replace('_', '-')}", getattr(shape, size.name)
        if isinstance(default, tuple):
            parser.add_argument(name, type=int, nargs=2, metavar=("MIN", "MAX"), default=default)
        elif size.name == "dtype":
            parser.add_argument(name, choices=("float32", "bfloat16"), default=default)
        else:
            parser.add_argument(name, type=int, default=default)


def shape_of(options: argparse.Namespace) -> Shape:
    """Return the sizes of the options."""
    found = {size.name: getattr(options, size.name) for size in fields(Shape)}
    return Shape(**{name: tuple(v) if isinstance(v, list) else v for name, v in found.items()})


def quiet() -> None:
    """Silence Lightning and other libraries."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


def write_model(folder: Path, shape: Shape) -> None:
    """Write a random Llama, and a tokenizer with a word per token, so that any ids have a text."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        # Llama's 8/3, a multiple of 16.
        intermediate_size=-(-shape.width * 8 // 3 // 16) * 16,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(1, shape.width // 64),
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder, shape.vocabulary)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer of the words <pad>, <eos>, w2, w3 and so on."""
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), vocabulary))]
    pad, eos = SPECIAL
    # The data module tries letters that are no words here.
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos).save_pretrained(folder)


def random_rows(
    count: int, shape: Shape, seed: int = 0, lengths: Sequence[Sequence[int]] | None = None
) -> list[dict[str, str]]:
    """Return pairs of random tokens with augmented prompts; ``lengths`` (with EOS) replace random ones."""
    generator = torch.Generator().manual_seed(seed)

    def text(low: int, high: int) -> str:
        length = int(torch.randint(low, high + 1, (1,), generator=generator))
        ids = torch.randint(len(SPECIAL), shape.vocabulary, (length,), generator=generator)
        return " ".join(f"w{i}" for i in ids.tolist())

    low, high = shape.response[0] - 1, shape.response[1] - 1
    bounds = [(shape.prompt, (low, high), (low, high))] * count
    if lengths is not None:
        bounds = [((p, p), (c - 1, c - 1), (r - 1, r - 1)) for p, c, r in lengths]
    return [
        {
            "id": str(row),
            "prompt": text(*prompt),
            "augmented_prompt": text(*prompt),
            "chosen": f" {text(*chosen)}",
            "rejected": f" {text(*rejected)}",
        }
        for row, (prompt, chosen, rejected) in enumerate(bounds)
    ]


def write_rows(file: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write JSON Lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Clock(Callback):
    """Measures seconds of each step, from its batch to the end of its update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Start; the batch is on the device."""
        self._wait()
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop."""
        self._wait()
        self.seconds.append(time.perf_counter() - self._start)

    @staticmethod
    def _wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Memory(Callback):
    """Measures the peak of the steps over the memory at the start of training, MiB."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.peak = float("nan")

    def on_train_start(self, *_: Any) -> None:
        """Start; the model is loaded, the first batch is not."""
        self._memory = PeakMemory(self.device)

    def on_train_end(self, *_: Any) -> None:
        """Stop."""
        self.peak = self._memory.over_start()


class OnDevice(SingleDeviceStrategy):
    """Leaves the model on its device after a run: moving 15 GB to the CPU and back takes seconds."""

    def teardown(self) -> None:
        """Do nothing."""


def make_policy(
    folder: Path, shape: Shape, layout: Layout = "shared", device: str = "cpu", **options: Any
) -> PolicyModel:
    """Return a policy on the model in a folder, LoRA's B not 0, with more of ``PolicyModel``'s options."""
    policy = PolicyModel(str(folder), rank=shape.rank, layout=layout, dtype=shape.dtype, **options)
    policy.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.adapter().values():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return policy.to(device)


def make_data(
    folder: Path, shape: Shape, meta_every: int | None = None, meta_pairs: int = 64
) -> PreferenceDataModule:
    """Return the pairs in a folder (``rows.jsonl``), set up, with the reference cached there."""
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    rows = str(folder / "rows.jsonl")
    data = PreferenceDataModule(
        Files(rows, rows),
        str(folder),
        max_length=shape.prompt[1] + shape.response[1],
        global_batch_size=shape.pairs,
        meta_every=meta_every,
        meta_batch_size=meta_pairs,
        reference="cached",
    )
    data.setup("fit")
    return data


def train(
    policy: PolicyModel,
    data: PreferenceDataModule,
    shape: Shape,
    steps: int,
    *,
    weighting: Weighting | None = None,
    device: str = "cpu",
    callbacks: Sequence[Callback] = (),
) -> list[float]:
    """Train for ``steps`` policy updates, DPO without ``weighting``; return seconds of each."""
    module = PreferenceModule(
        policy,
        weighting=weighting,
        learning_rate=LEARNING_RATE,
        betas=BETAS,
        max_grad_norm=MAX_GRAD_NORM,
        warmup_ratio=0.0,
        min_lr_ratio=1.0,
        micro_batch_size=shape.micro_batch,
    )
    clock = Clock()
    Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="gpu" if device == "cuda" else "cpu",
        strategy=OnDevice("cuda:0" if device == "cuda" else "cpu"),
        devices=1,
        limit_val_batches=0,
        callbacks=[clock, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, data)
    return clock.seconds
