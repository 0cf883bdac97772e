"""The LightningDataModule for supervised fine-tuning."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError
from pacmr_lightning.policy.limits import check_tokens

from .chat import (
    Rendered,
    decode_messages,
    render,
    say_what_the_template_leaves_out,
    template_options,
)
from .completions import Completions
from .prompts import NO_COMPLETION, split_completion
from .reference_cache import tokens_digest
from .rows import extent
from .stream import RowsLeft, StepLoader
from .tokenization import count_oddities, oddities, token_warnings
from .tokenizer import load_tokenizer, prompt_tokens, response_tokens, tokenizer_digest
from .train_tokenizer import train_tokenizer

IGNORED = -100
"""Label of tokens that carry no loss: prompt and padding."""

_LAYOUT = 3
"""Part of the cache's key; raised whenever the same rows are turned into other tokens."""

_REASONS = ("too long", "empty completion", "empty prompt", NO_COMPLETION)
_TOKENS = List(Value("int32"))
_COLUMNS = ("prompt_ids", "completion_ids")
_FEATURES = Features(
    {
        "prompt_ids": _TOKENS,
        "completion_ids": _TOKENS,
        "odd": List(Value("string")),
        "drop": Value("string"),
    }
)


class SFTDataModule(LightningDataModule):
    """Prompts and their completions as batches with a loss on the completion only.

    Batches are dicts of (N, L) int64 tensors: ``input_ids`` (prompt, completion, one EOS, padding on the
    right), ``attention_mask`` (1 on tokens, 0 on padding) and ``labels`` (the token on the completion and its
    EOS, -100 elsewhere; not shifted). Rows that do not fit ``max_length`` are dropped and counted, never cut.

    Args:
        source: where the rows come from.
        tokenizer: a model's folder or Hub id. None: a byte-level BPE tokenizer is trained on the training
            rows, for a model that is trained from scratch.
        vocab_size: tokens of the trained tokenizer at most, at least 259; given exactly where ``tokenizer``
            is None.
        max_length: tokens of a prompt with its completion and EOS.
        batch_size: rows of a batch, per step and rank.
        seed: order of the training rows, which are shuffled anew in each epoch.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        task: a name for the run's folder and summary.

    Attributes:
        counts: after ``setup``, for ``train`` and ``validation``: ``rows``, ``kept``, and dropped rows by
            reason.

    Raises:
        UserError: an option is out of range. Later: the data or the tokenizer cannot be used.
    """

    def __init__(
        self,
        source: Completions,
        tokenizer: str | None = None,
        vocab_size: int | None = None,
        max_length: int = 768,
        batch_size: int = 32,
        seed: int = 42,
        num_workers: int = 0,
        task: str = "sft",
    ):
        super().__init__()
        for option, value, least in (
            ("max_length", max_length, 2),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise UserError(f"{option} is {value}, but it must be at least {least}.")
        if (tokenizer is None) == (vocab_size is None):
            raise UserError(
                f"tokenizer is {tokenizer!r} and vocab_size is {vocab_size}; give the one to use a model's "
                "tokenizer or the other to train a new one."
            )
        self.source = source
        self.tokenizer_name = None if tokenizer is None else str(tokenizer)
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.task = task
        self.counts: dict[str, dict[str, int]] = {}
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._rows: dict[str, Dataset] = {}
        self._warnings: list[str] = []
        self._epoch_tokens: tuple[int, np.ndarray] = (-1, np.zeros(0))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded or trained; there is one after ``setup``."""
        assert self._tokenizer is not None, "The tokenizer is known after setup."
        return self._tokenizer

    def prepare_data(self) -> None:
        """Fills datasets' caches from one process, so that the others read them."""
        self._prepare()

    def setup(self, stage: str) -> None:
        """Reads and tokenizes both splits.

        Raises:
            UserError: the data or the tokenizer cannot be used, or all rows of a split were dropped.
        """
        self._prepare()
        for split, counts in self.counts.items():
            rank_zero_info(_summary(self.source.name, split, counts))
        for sentence in dict.fromkeys(self._warnings):
            rank_zero_info(sentence)

        if stage == TrainerFn.FITTING:
            rank_zero_info(self._epoch_line())

    def _epoch_line(self) -> str:
        """Return a sentence on an epoch's batches, and on the rows that processes cannot share evenly."""
        assert self.trainer is not None
        ranks, rows = self.trainer.world_size, len(self._rows["train"])
        size, left = self.batch_size * ranks, len(self._rows["validation"]) % ranks
        last = rows % size
        whole = f"An epoch: {-(-rows // size)} batches of {size} rows"
        parts = [f"the last has {last} rows"] * (last > 0)
        parts += [f"{-rows % ranks} rows come twice, for {ranks} processes"] * (rows % ranks > 0)
        parts += [f"{left} validation rows are left out"] * (left > 0)
        return f"{'; '.join([whole, *parts])}."

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the rows of a step: options, and a hash of the rows in their order."""
        if self.trainer is None or not self._rows:
            return {}
        return {
            "max_length": self.max_length,
            "rows of a batch over all processes": self.batch_size * self.trainer.world_size,
            "seed": self.seed,
            "training rows": self._rows_digest,
        }

    @cached_property
    def _rows_digest(self) -> str:
        """Hash of the training rows; made once, since each checkpoint holds it."""
        return tokens_digest(self._rows["train"], *_COLUMNS)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a resumed fit goes on with the rows that it began with.

        Raises:
            UserError: training is resumed with other rows, or in another order.
        """
        assert self.trainer is not None
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        now = self.state_dict()
        for name, value in state_dict.items():
            if now[name] != value:
                raise UserError(
                    f"The checkpoint has {name} {value}, but this run has {now[name]}; resume with the same "
                    "data, tokenizer and data options, or start a new run in another folder."
                )

    def _prepare(self) -> None:
        if self._rows:
            return
        texts = {split: self.source.load(split) for split in ("train", "validation")}
        if self.tokenizer_name is not None:
            self._tokenizer = load_tokenizer(self.tokenizer_name)
        else:
            assert self.vocab_size is not None  # one of the two was given
            rows = zip(texts["train"]["prompt"], texts["train"]["completion"], strict=True)
            self._tokenizer = train_tokenizer((text for row in rows for text in row if text), self.vocab_size)
        for split, rows in texts.items():
            self._rows[split], self.counts[split] = tokenize_completions(
                rows, self._tokenizer, self.max_length
            )
            self._warnings += token_warnings(
                self._tokenizer, rows, self.counts[split], f"{self.source.name}, {split}"
            )

    def train_dataloader(self) -> DataLoader[dict[str, list[int]]]:
        """Shuffled batches of this rank; the order depends on ``seed`` and the epoch alone."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, list[int]]]:
        """Batches of this rank in the rows' own order.

        No row comes twice; with several ranks, the last few rows that not every rank would get are left out.
        """
        return self._loader("validation", shuffle=False)

    def _loader(self, split: str, shuffle: bool) -> DataLoader[dict[str, list[int]]]:
        assert self.trainer is not None
        return StepLoader(
            self._rows[split],
            batch_size=self.batch_size,
            sampler=self._sampler(
                split, shuffle, self.trainer.global_rank, self._rows_done if shuffle else lambda: 0
            ),
            collate_fn=self._collate,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def _sampler(self, split: str, shuffle: bool, rank: int, done: Callable[[], int]) -> RowsLeft:
        assert self.trainer is not None
        ranks = {"num_replicas": self.trainer.world_size, "rank": rank}
        # False repeats a few rows instead, which matters in validation only.
        options = {"shuffle": shuffle, "seed": self.seed, "drop_last": not shuffle}
        return RowsLeft(self._rows[split], done, **ranks, **options)

    def check_model(self, name: str, model: PreTrainedModel) -> None:
        """Check that a model can read the rows of both splits.

        Raises:
            UserError: it has too few positions, or too few embeddings for the tokenizer.
        """
        for rows in self._rows.values():
            lengths, largest = extent(rows, _COLUMNS, np.add)
            check_tokens(name, model, lengths, max(largest, self.tokenizer.pad_token_id))

    def longest(self) -> tuple[int, int]:
        """Return the tokens of the longest training row, and of the longest completion."""
        lengths, _ = extent(self._rows["train"], _COLUMNS, np.add)
        return int(lengths.max()), int(self._response_tokens.max())

    @cached_property
    def _response_tokens(self) -> np.ndarray:
        """(N,) of the training rows."""
        return np.array([len(tokens) for tokens in self._rows["train"]["completion_ids"]])

    def update_tokens(self, batch: int) -> int:
        """Response tokens of the update that a batch of the epoch is a part of, all ranks together.

        Args:
            batch: its number in the trainer's current epoch, from 0 on.
        """
        assert self.trainer is not None
        epoch, every = self.trainer.current_epoch, self.trainer.accumulate_grad_batches
        if self._epoch_tokens[0] != epoch:
            totals = []
            for rank in range(self.trainer.world_size):
                sampler = self._sampler("train", True, rank, lambda: 0)
                sampler.set_epoch(epoch)
                own = self._response_tokens[list(sampler)]
                totals.append(np.add.reduceat(own, np.arange(0, len(own), self.batch_size)))
            self._epoch_tokens = (epoch, np.sum(totals, axis=0))
        first = batch - batch % every
        # The epoch's last update takes the batches that are left.
        last = min(first + every, int(self.trainer.num_training_batches))
        return int(self._epoch_tokens[1][first:last].sum())

    def _rows_done(self) -> int:
        """Rows that this rank has had in the epoch that goes on; above 0 after a resume only."""
        assert self.trainer is not None
        return self.batch_size * self.trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def _collate(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        length = max(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
        shape = (len(rows), length)
        input_ids = torch.full(shape, self.tokenizer.pad_token_id, dtype=torch.long)
        attention_mask = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, IGNORED, dtype=torch.long)
        for i, row in enumerate(rows):
            start = len(row["prompt_ids"])
            tokens = torch.tensor(row["prompt_ids"] + row["completion_ids"], dtype=torch.long)
            input_ids[i, : len(tokens)] = tokens
            attention_mask[i, : len(tokens)] = 1
            labels[i, start : len(tokens)] = tokens[start:]
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def tokenize_completions(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[Dataset, dict[str, int]]:
    """Token ids of the rows that can be trained on.

    Args:
        rows: as ``read_sft`` makes them.
        tokenizer: has EOS.
        max_length: tokens; a row whose prompt and completion (EOS included) exceed it is dropped.

    Returns:
        The kept rows with ``prompt_ids`` (BOS first if the tokenizer adds one) and ``completion_ids`` (no
        BOS, exactly one EOS at the end); and how many rows there were, were kept and were dropped for each
        reason.

    Raises:
        UserError: all rows were dropped.
    """
    say_what_the_template_leaves_out(tokenizer, rows)
    key = f"sft:{_LAYOUT}:{rows._fingerprint}:{tokenizer_digest(tokenizer)}:{max_length}"
    tokenized = rows.map(
        _tokenize_batch,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length},
        remove_columns=rows.column_names,
        features=_FEATURES,
        # Given because a pickled tokenizer changes with use and between processes.
        new_fingerprint=hashlib.sha256(key.encode()).hexdigest()[:16],
        desc="Tokenizing",
    )
    reasons = tokenized["drop"][:]
    kept = [i for i, reason in enumerate(reasons) if reason is None]
    drops = Counter(reasons)
    counts = {"rows": len(reasons), "kept": len(kept)} | {r: drops[r] for r in _REASONS if drops[r]}
    if not kept:
        found = ", ".join(f"{counts[reason]} {reason}" for reason in _REASONS if reason in counts)
        raise UserError(
            f"None of the {len(reasons)} rows can be used at max_length {max_length} ({found}); raise "
            "max_length or give other rows."
        )
    tokenized = tokenized.select(kept, keep_in_memory=True)
    counts |= count_oddities(tokenized["odd"][:])
    return tokenized.remove_columns(["odd", "drop"]), counts


def _tokenize_batch(
    rows: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, list[Any]]:
    """What ``Dataset.map`` calls: columns in, columns out."""
    names = ("prompt", "completion", "chat")
    splits = [split_completion(*row) for row in zip(*(rows[name] for name in names), strict=True)]
    options = map(template_options, rows["tools"], rows["chat_template_kwargs"])
    texts = [
        render(tokenizer, decode_messages(split.prompt), split.message, option)
        if chat and split.reason is None
        else Rendered(split.prompt, split.completion, [])
        for split, chat, option in zip(splits, rows["chat"], options, strict=True)
    ]
    prompt_texts = [text.prompt for text in texts]
    prompts = prompt_tokens(tokenizer, prompt_texts, rows["chat"])
    completions = response_tokens(tokenizer, prompt_texts, [text.response for text in texts])
    drops: list[str | None] = []
    for prompt, completion, split in zip(prompts, completions, splits, strict=True):
        # One token is EOS alone: the tokenizer made nothing of the text.
        if split.reason or not split.completion.strip() or len(completion) == 1:
            drops.append(split.reason or "empty completion")
        elif not prompt:
            drops.append("empty prompt")
        else:
            drops.append("too long" if len(prompt) + len(completion) > max_length else None)
    odd = [oddities(tokenizer, ids, text.left_out) for ids, text in zip(prompts, texts, strict=True)]
    return {"prompt_ids": prompts, "completion_ids": completions, "odd": odd, "drop": drops}


def _summary(name: str, split: str, counts: dict[str, int]) -> str:
    dropped = ", ".join(f"{counts[reason]} {reason}" for reason in _REASONS if reason in counts)
    kept = f"{name}, {split}: {counts['kept']} of {counts['rows']} rows kept"
    return f"{kept}; dropped: {dropped}" if dropped else kept
