"""Batches as a function of the global step: who asks for step 1234 gets the same pairs, resumed or not.

Nothing here has a position. A batch depends on (seed, step, rank, world size) alone, so a resumed run goes on
with the right batch by asking for the right step, and meta batches come when the step says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data import Dataset as TorchDataset

from pacmr_lightning.batch import PairBatch, PairedBatch
from pacmr_lightning.errors import UserError

from .pairs import Pairs


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, kind: str, number: int) -> list[int]:
    """The ``number``-th permutation of ``count`` rows; ``kind`` keeps train and meta batches independent."""
    digest = hashlib.blake2b(f"{kind}:{seed}:{number}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randperm(count, generator=generator).tolist()


def _block(count: int, size: int, seed: int, kind: str, number: int) -> list[int]:
    """The ``number``-th block of ``size`` rows out of permutations, each without its incomplete rest."""
    permutation, place = divmod(number, count // size)
    return _permutation(count, seed, kind, permutation)[place * size : (place + 1) * size]


@dataclass(eq=False)
class TrainingStream(TorchDataset[PairedBatch]):
    """Train batches, and meta batches when they are due, by global step.

    ``batches[step]`` is this rank's share of optimizer step ``step``, for any step from 0 on: the rows are
    permuted anew in each epoch, and an epoch's last incomplete batch is dropped. Where ``meta_every`` divides
    the step there is a meta batch, with the same pairs ``augmented``, in blocks of permutations of the rows
    that have a second view; its pairs keep the order that the noise left them in, so it tells nothing of
    labels.

    Raises:
        UserError: a batch size cannot be shared evenly, there are fewer pairs than ``global_batch_size``, or
            fewer pairs with a second view than ``meta_batch_size``.
    """

    pairs: Pairs
    """The training pairs."""
    global_batch_size: int
    """Pairs of a step, over all ranks."""
    _: KW_ONLY
    seed: int
    """Of the order."""
    meta_every: int | None = None
    """Steps between two meta batches; None for none at all."""
    meta_batch_size: int = 64
    """Pairs of a meta batch, over all ranks."""
    rank: int = 0
    """This process."""
    world_size: int = 1
    """Number of processes; it must divide both batch sizes."""
    clean_meta: Pairs | None = None
    """Pairs with clean labels for the meta batches instead, without second views."""
    shuffle: bool = True
    """Permute the rows; otherwise each epoch has them in their own order."""

    def __post_init__(self) -> None:
        pairs, clean_meta, world_size = self.pairs, self.clean_meta, self.world_size
        global_batch_size, meta_batch_size = self.global_batch_size, self.meta_batch_size
        check_shares("global_batch_size", global_batch_size, world_size)
        if len(pairs) < global_batch_size:
            raise UserError(
                f"Only {len(pairs)} training pairs are left, fewer than one batch; give more data, "
                f"raise max_length or lower global_batch_size, which is {global_batch_size}."
            )
        if self.meta_every is None:
            return
        check_shares("meta_batch_size", meta_batch_size, world_size)
        self.eligible = list(range(len(clean_meta))) if clean_meta else pairs.with_second_view
        if len(self.eligible) < meta_batch_size and clean_meta:
            raise UserError(
                f"clean_meta has {len(clean_meta)} pairs, fewer than meta_batch_size {meta_batch_size}; give "
                "more clean pairs or lower meta_batch_size."
            )
        if len(self.eligible) < meta_batch_size:
            raise UserError(
                f"Only {len(self.eligible)} of the {len(pairs)} training pairs have a second view of their "
                f"prompt, fewer than meta_batch_size {meta_batch_size}; make more with pacmr augment, give "
                "the rows an augmented_prompt, or lower meta_batch_size."
            )

    def __len__(self) -> int:
        """Steps of an epoch."""
        return len(self.pairs) // self.global_batch_size

    def __getitem__(self, step: int) -> PairedBatch:
        if step < 0:
            raise IndexError(f"There is no step {step}.")
        if self.shuffle:
            rows = _block(len(self.pairs), self.global_batch_size, self.seed, "train", step)
        else:
            start = step % len(self) * self.global_batch_size
            rows = list(range(start, start + self.global_batch_size))
        return PairedBatch(train=self.pairs.batch(self._share(rows)), meta=self._meta(step))

    def _meta(self, step: int) -> PairBatch | None:
        if self.meta_every is None or step % self.meta_every:
            return None
        number = step // self.meta_every
        rows = _block(len(self.eligible), self.meta_batch_size, self.seed, "meta", number)
        indices = [self.eligible[i] for i in self._share(rows)]
        pairs = self.clean_meta or self.pairs
        return pairs.batch(indices, augmented=self.clean_meta is None)

    def _share(self, rows: list[int]) -> list[int]:
        return rows[self.rank :: self.world_size]


def check_shares(option: str, size: int, world_size: int) -> None:
    """Raises UserError unless ``size`` pairs can be shared evenly, on which averages over ranks rely."""
    if size % world_size:
        raise UserError(
            f"{option} is {size}, which {world_size} processes cannot share evenly; use a multiple of "
            f"{world_size}, or other trainer.devices."
        )


class EvaluationStream(TorchDataset[PairBatch]):
    """Consecutive batches of pairs for evaluation: no pair twice, none left out, something for each rank.

    A batch has ``global_batch_size`` pairs over all ranks. A rest that is too small to give each rank a pair
    joins the batch before it.

    Raises:
        UserError: there are more processes than pairs in a batch, or than pairs.
    """

    def __init__(self, pairs: Pairs, global_batch_size: int, rank: int = 0, world_size: int = 1):
        self.pairs = pairs
        if min(global_batch_size, len(pairs)) < world_size:
            raise UserError(
                f"validation_batch_size is {global_batch_size} and there are {len(pairs)} validation pairs, "
                f"but each of {world_size} processes needs one; use fewer processes."
            )
        starts = list(range(0, len(pairs), global_batch_size))
        if len(pairs) - starts[-1] < world_size:
            starts.pop()
        ends = [*starts[1:], len(pairs)]
        self._shares = [range(start + rank, end, world_size) for start, end in zip(starts, ends, strict=True)]

    def __len__(self) -> int:
        return len(self._shares)

    def __getitem__(self, number: int) -> PairBatch:
        return self.pairs.batch(self._shares[number])


class RankSteps(DistributedSampler[int]):
    """Consecutive steps, the same on every rank: the datasets of this file know the ranks themselves.

    It is a DistributedSampler because Lightning then does not put one of its own around it, which would give
    each rank other steps.

    ``first_step`` is asked whenever an iterator starts. For training it is the trainer's global step, so that
    data and optimizer cannot get out of step: not on resuming in mid-epoch, and not where an epoch is cut
    short (``limit_train_batches``). The trainer itself stops at the end of an epoch.
    """

    def __init__(self, length: int, first_step: Callable[[], int]):
        # Any sequence will do, but torch asks for a Dataset in its types.
        super().__init__(range(length), num_replicas=1, rank=0, shuffle=False)  # type: ignore[arg-type]
        self.length = length
        self.first_step = first_step

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        start = self.first_step()
        return iter(range(start, start + self.length))


class RemainingRows(DistributedSampler[int]):
    """The rows of an epoch that this rank has not had yet: ``done`` says how many it has had."""

    def __init__(self, dataset: TorchDataset[Any], done: Callable[[], int], **options: Any):
        super().__init__(dataset, **options)
        self.done = done

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.done(), None)


def check_resumed(
    trainer: Trainer, saved: dict[str, Any], now: dict[str, Any], hashes: dict[str, str]
) -> None:
    """Check that a resumed fit goes on with the data that it began with; other stages may have others.

    ``saved`` and ``now`` are the ``state_dict`` of the datamodule then and now; ``hashes`` says which names
    in them are hashes, and of what.

    Raises:
        UserError: something has changed.
    """
    for name, value in saved.items() if trainer.state.fn == TrainerFn.FITTING else ():
        if now[name] != value:
            found = f"The checkpoint has {name} {value}, but this run has {now[name]}"
            if name in hashes:
                found = f"The {hashes[name]} are not those of the checkpoint"
            raise UserError(
                f"{found}; resume with the data, tokenizer and data options that it was trained with, or "
                "start a new run in another folder."
            )


class StepLoader(DataLoader[Any]):
    """A DataLoader that can go on in mid-epoch, as its ``state_dict`` tells Lightning."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is what the trainer has done, which the samplers ask it for."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""
