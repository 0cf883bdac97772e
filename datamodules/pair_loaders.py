"""Loaders of preference pairs, which go on with the right pairs where a run does."""

from __future__ import annotations

import hashlib
from typing import Any, TypedDict

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from pacmr_lightning.batch import PairBatch, PairedBatch
from pacmr_lightning.errors import UserError

from .pairs import Pairs
from .stream import PairBatches, PairedBatches, RankSteps, StepLoader


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
        """What decides which pairs a step gets; not the position, which is the trainer's global step."""
        if self.train_pairs is None:
            return {}
        labels = zip(self.train_pairs.rows["id"][:], self.train_pairs.swapped, strict=True)
        ids = hashlib.sha256("\n".join(f"{name} {swap}" for name, swap in labels).encode()).hexdigest()
        names = ("global_batch_size", "meta_every", "meta_batch_size", "noise_rate", "noise_seed", "seed")
        return {name: self.__dict__[name] for name in names} | {"training pairs": ids[:16]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Checks that a resumed run goes on with the pairs that it began with.

        Raises:
            UserError: training is resumed with other pairs, another order or other noise.
        """
        assert self.trainer is not None
        now = self.state_dict()
        for name, value in state_dict.items():
            if self.trainer.state.fn == TrainerFn.FITTING and now[name] != value:
                raise UserError(
                    f"The checkpoint has {name} {value}, but this run has {now[name]}; resume with "
                    "the same data options, or start a new run."
                )
