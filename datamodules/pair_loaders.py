"""Loaders of preference pairs, which go on with the right pairs where a run does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypedDict

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from pacmr_lightning.batch import PairBatch, PairedBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.answer_store import content_key

from .pairs import Pairs
from .reference_cache import TEXTS, tokens_digest
from .stream import PairBatches, PairedBatches, RankSteps, StepLoader

OPTIONS = (
    "max_length",
    "global_batch_size",
    "meta_every",
    "meta_batch_size",
    "noise_rate",
    "noise_seed",
    "seed",
)
"""Options of the datamodule that a resumed fit must share with its checkpoint."""
VALIDATION = "validation pairs"
"""Name of the validation pairs' hash in a checkpoint; these may change."""
_DIGESTED = {
    "texts": "texts of the training pairs",
    "label noise": "flipped labels of the training pairs",
    "training pairs": "ids, labels, order or augmented prompts of the training pairs",
    "meta pairs": "pairs of clean_meta",
}


class _Ranks(TypedDict):
    rank: int
    world_size: int


class PairLoaders:
    """Which pairs a step gets; a base of ``PreferenceDataModule``, which has these:"""

    trainer: Trainer | None
    train_pairs: Pairs | None
    validation_pairs: Pairs | None
    clean_pairs: Pairs | None
    global_batch_size: int
    validation_batch_size: int
    meta_every: int | None
    meta_batch_size: int
    noise_rate: float | None
    noise_seed: int
    seed: int
    curriculum: str | None
    num_workers: int
    texts_digest: Callable[[], str]
    """Hash of the texts of all training pairs, after ``setup``."""

    @property
    def _ranks(self) -> _Ranks:
        """This process among the trainer's; alone without a trainer (tools that look at the data)."""
        if self.trainer is None:
            return {"rank": 0, "world_size": 1}
        return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}

    def _global_step(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_step

    def train_dataloader(self) -> DataLoader[PairedBatch]:
        """``PairedBatch`` of this rank, beginning at the trainer's global step."""
        assert self.train_pairs is not None, "The training pairs are there after setup."
        batches = PairedBatches(
            self.train_pairs,
            self.global_batch_size,
            seed=self.seed,
            meta_every=self.meta_every,
            meta_batch_size=self.meta_batch_size,
            clean_meta=self.clean_pairs,
            shuffle=self.curriculum is None,
            **self._ranks,
        )
        return self._loader(batches, RankSteps(len(batches), self._global_step))

    def _epoch_line(self) -> str:
        """Return a sentence on an epoch's updates, and the pairs that incomplete batches leave out."""
        assert self.train_pairs is not None
        pairs, size = len(self.train_pairs), self.global_batch_size
        line = f"An epoch: {_batches(pairs, size, 'update')}"
        if self.meta_every is not None:
            meta = len(self.clean_pairs or self.train_pairs.with_second_view)
            line += f"; a pass over the meta pairs: {_batches(meta, self.meta_batch_size, 'batch')}"
        return f"{line}."

    def val_dataloader(self) -> DataLoader[PairBatch]:
        """``PairBatch`` of this rank, validation pairs in their own order."""
        assert self.validation_pairs is not None, "The validation pairs are there after setup."
        batches = PairBatches(self.validation_pairs, self.validation_batch_size, **self._ranks)
        return self._loader(batches, RankSteps(len(batches), lambda: 0))

    def test_dataloader(self) -> DataLoader[PairBatch]:
        """The same batches as for validation."""
        return self.val_dataloader()

    def _loader(self, batches: PairedBatches | PairBatches, steps: RankSteps) -> DataLoader[Any]:
        return StepLoader(
            batches,
            batch_size=None,
            sampler=steps,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the pairs of a step: options, and hashes of the pairs in their order.

        The position is no part of it: it is the trainer's global step.
        """
        return {name: self.__dict__[name] for name in OPTIONS} | self._digests if self.train_pairs else {}

    @cached_property
    def _digests(self) -> dict[str, str | None]:
        pairs = self.train_pairs
        assert pairs is not None
        rewords = self.meta_every is not None and self.clean_pairs is None
        labels = [list(pairs.rows[name]) for name in ("id", "flipped", "eta")]
        return {
            "texts": self.texts_digest(),
            "label noise": content_key(pairs.swapped),
            "training pairs": content_key(
                labels, pairs.annotators, tokens_digest(pairs.rows, "augmented_ids") if rewords else None
            ),
            "meta pairs": None if self.clean_pairs is None else tokens_digest(self.clean_pairs.rows, *TEXTS),
            VALIDATION: None
            if self.validation_pairs is None
            else tokens_digest(self.validation_pairs.rows, *TEXTS),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a resumed run goes on with the pairs that it began with; warn of other validation pairs.

        Raises:
            UserError: training is resumed with other pairs, another order or other noise.
        """
        assert self.trainer is not None
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        now = self.state_dict()
        for name, value in state_dict.items():
            if now[name] == value:
                continue
            if name in OPTIONS:
                raise UserError(
                    f"The checkpoint has {name} {value}, but this run has {now[name]}; resume with "
                    "the same data options, or start a new run."
                )
            if name != VALIDATION:
                raise UserError(
                    f"The {_DIGESTED[name]} are not those of the checkpoint; resume with the data, tokenizer "
                    "and data options that it was trained with, or start a new run in another folder."
                )
            rank_zero_warn(
                "The validation pairs have changed since the checkpoint was made: metrics val/... before and "
                f"after update {self.trainer.global_step} are of different pairs."
            )


def _batches(pairs: int, size: int, name: str) -> str:
    whole, left = divmod(pairs, size)
    counted = f"{whole} {name}{('' if whole == 1 else 's' if name == 'update' else 'es')} of {size} pairs"
    return f"{counted}, {left} of {pairs} pairs left out" if left else counted
