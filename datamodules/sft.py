"""The LightningDataModule for supervised fine-tuning."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError, check_at_least, check_choice, check_is
from pacmr_lightning.files import expanded
from pacmr_lightning.modules.sft import IGNORED
from pacmr_lightning.policy.positions import check_tokens

from .sources import Completions
from .stream import RemainingRows, StepLoader
from .token_report import summary_line, token_warnings
from .tokenization import Tokenization, tokenize_completions
from .tokenized_pairs import largest_token, part_lengths, tokens_digest
from .tokenizer import load_tokenizer, train_tokenizer

_COLUMNS = ("prompt_ids", "completion_ids")


class SFTDataModule(LightningDataModule):
    """Prompts and their completions as batches with a loss on the completion only.

    Batches are dicts of (N, L) int64 tensors: ``input_ids`` (prompt, completion, one EOS, padding on the
    right), ``attention_mask`` (1 on tokens, 0 on padding) and ``labels`` (the token on the completion and its
    EOS, -100 elsewhere; not shifted). Rows that do not fit ``max_length`` are dropped and counted.

    Args:
        source: where the rows come from.
        tokenizer: a model's folder or Hub id. None: a byte-level BPE tokenizer is trained on the training
            rows, for a model that is trained from scratch.
        vocab_size: tokens of the trained tokenizer at most, at least 259; given exactly where ``tokenizer``
            is None.
        max_length: tokens of a prompt with its completion and EOS.
        tokenization: "openrlhf" for OpenRLHF's rules: no BOS but that of a text or template, a space and EOS
            after a completion, long completions cut at max_length, prompts over max_length - 3 dropped.
        batch_size: rows of a batch, per step and rank.
        seed: order of the training rows, which are shuffled anew in each epoch.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        task: a name for the run's folder and summary.

    Raises:
        UserError: an option is out of range. Later: the data or the tokenizer cannot be used.
    """

    trainer: Trainer

    def __init__(
        self,
        source: Completions,
        tokenizer: str | None = None,
        vocab_size: int | None = None,
        max_length: int = 768,
        tokenization: Tokenization = "default",
        batch_size: int = 32,
        seed: int = 42,
        num_workers: int = 0,
        task: str = "sft",
    ):
        super().__init__()
        check_at_least(2, max_length=max_length)
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, num_workers=num_workers)
        if (tokenizer is None) == (vocab_size is None):
            raise UserError(
                f"tokenizer is {tokenizer!r} and vocab_size is {vocab_size}; give the one to use a model's "
                "tokenizer or the other to train a new one."
            )
        self.source = source
        self.tokenizer_name: str | None = expanded(tokenizer)
        self.vocab_size = vocab_size
        self.max_length = max_length
        check_choice(Tokenization, tokenization=tokenization)
        check_is(Completions, "a source of completions, such as CompletionFiles", source=source)
        self.tokenization = tokenization
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.task = task
        self.counts: dict[str, dict[str, int]] = {}
        """After ``setup``, by split: ``rows``, ``kept``, and dropped rows by reason."""
        self._epoch_tokens: tuple[int, np.ndarray] = (-1, np.zeros(0))

    @cached_property
    def _texts(self) -> dict[str, Dataset]:
        return {split: self.source.load(split) for split in ("train", "validation")}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded or trained on first access."""
        if self.vocab_size is None:
            assert self.tokenizer_name is not None  # one of the two was given
            return load_tokenizer(self.tokenizer_name)
        rows = zip(*(self._texts["train"][name] for name in ("prompt", "completion")), strict=True)
        return train_tokenizer((text for row in rows for text in row if text), self.vocab_size)

    @cached_property
    def _rows(self) -> dict[str, Dataset]:
        rows, options = {}, (self.tokenizer, self.max_length, self.tokenization)
        for split, texts in self._texts.items():
            rows[split], self.counts[split] = tokenize_completions(texts, *options, f"{split} rows")
        return rows

    def prepare_data(self) -> None:
        """Fill datasets' caches from one process, so that the others read them."""
        assert self._rows

    def setup(self, stage: str) -> None:
        """Read and tokenize both splits."""
        name = self.source.name
        warnings: list[str] = []
        for split, rows in self._rows.items():
            rank_zero_info(summary_line(name, split, self.counts[split], "rows"))
            warnings += token_warnings(self.tokenizer, self._texts[split], rows, f"{name}, {split}")
        for sentence in dict.fromkeys(warnings):
            rank_zero_info(sentence)
        if stage == TrainerFn.FITTING:
            left, ranks = len(self._rows["validation"]), self.trainer.world_size
            if left < ranks:
                raise UserError(
                    f"There are {left} validation rows, but each of {ranks} processes needs one; use fewer "
                    "processes, or give more rows."
                )
            rank_zero_info(self._epoch_line())

    def _epoch_line(self) -> str:
        ranks, rows = self.trainer.world_size, len(self._rows["train"])
        size, left = self.batch_size * ranks, len(self._rows["validation"]) % ranks
        last = rows % size
        parts = [f"An epoch: {-(-rows // size)} batches of {size} rows"]
        parts += [f"the last has {last} rows"] * (last > 0)
        parts += [f"{-rows % ranks} rows come twice, for {ranks} processes"] * (rows % ranks > 0)
        parts += [f"{left} validation rows are left out"] * (left > 0)
        return f"{'; '.join(parts)}."

    def fit_options(self) -> dict[str, Any]:
        """Return the options and the hash that determine the rows of a step."""
        return {
            "data.max_length": self.max_length,
            "rows of a batch over all processes": self.batch_size * self.trainer.world_size,
            "data.seed": self.seed,
            "training rows": tokens_digest(self._rows["train"], *_COLUMNS)[:12],
        }

    def train_dataloader(self) -> DataLoader[dict[str, list[int]]]:
        """Return shuffled batches of this rank; the order depends on ``seed`` and the epoch only."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, list[int]]]:
        """Return batches of this rank in order; last rows that not every rank would get are left out."""
        return self._loader("validation", shuffle=False)

    def _loader(self, split: str, shuffle: bool) -> DataLoader[dict[str, list[int]]]:
        progress, size = self.trainer.fit_loop.epoch_loop.batch_progress, self.batch_size
        # Rows of this epoch that this rank has had; above 0 only after a resume.
        done = (lambda: size * progress.current.ready) if shuffle else lambda: 0
        return StepLoader(
            self._rows[split],
            batch_size=self.batch_size,
            sampler=self._sampler(split, shuffle, self.trainer.global_rank, done),
            collate_fn=self._collate,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def _sampler(self, split: str, shuffle: bool, rank: int, done: Callable[[], int]) -> RemainingRows:
        sampler = RemainingRows(
            self._rows[split],
            done,
            num_replicas=self.trainer.world_size,
            rank=rank,
            shuffle=shuffle,
            seed=self.seed,
            # False repeats a few rows, which matters in validation only.
            drop_last=not shuffle,
        )
        sampler.set_epoch(self.trainer.current_epoch)  # with workers, it is read before Lightning does so
        return sampler

    def check_model(self, name: str, model: PreTrainedModel) -> None:
        """Raise a UserError if a model has too few positions or embeddings for the rows."""
        for rows in self._rows.values():
            largest = max(self.tokenizer.pad_token_id, largest_token(rows, *_COLUMNS))
            check_tokens(name, model, part_lengths(rows, *_COLUMNS).sum(0), largest)

    def update_tokens(self, batch: int) -> int:
        """Return the response tokens, over all ranks, of the update with the epoch's batch ``batch``."""
        epoch, every = self.trainer.current_epoch, self.trainer.accumulate_grad_batches
        if self._epoch_tokens[0] != epoch:
            totals, [tokens] = [], part_lengths(self._rows["train"], "completion_ids")
            for rank in range(self.trainer.world_size):
                own = tokens[list(self._sampler("train", True, rank, lambda: 0))]
                totals.append(np.add.reduceat(own, np.arange(0, len(own), self.batch_size)))
            self._epoch_tokens = (epoch, np.sum(totals, axis=0))
        first = batch - batch % every
        # The epoch's last update takes the batches that are left.
        last = min(first + every, int(self.trainer.num_training_batches))
        return int(self._epoch_tokens[1][first:last].sum())

    def _collate(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        texts = [torch.tensor(row["prompt_ids"] + row["completion_ids"]) for row in rows]
        labels = [text.clone() for text in texts]
        for label, row in zip(labels, rows, strict=True):
            label[: len(row["prompt_ids"])] = IGNORED
        return {
            "input_ids": pad_sequence(texts, True, self.tokenizer.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(text) for text in texts], True, 0),
            "labels": pad_sequence(labels, True, IGNORED),
        }
