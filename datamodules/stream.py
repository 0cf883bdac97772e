"""Batches as a function of (seed, step, rank, world size), so that a resumed run gets the right ones."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data import Dataset as TorchDataset

from pacmr_lightning.batch import PairBatch, TrainingBatch
from pacmr_lightning.errors import UserError

from .tokenized_pairs import TokenizedPairs


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, kind: str, number: int) -> list[int]:
    """Return permutation ``number`` of the rows; ``kind`` keeps train and meta-batches independent."""
    digest = hashlib.blake2b(f"{kind}:{seed}:{number}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randperm(count, generator=generator).tolist()


def _block(count: int, size: int, seed: int, kind: str, number: int) -> list[int]:
    """Return block ``number`` of ``size`` rows of permutations, each without its incomplete rest."""
    permutation, place = divmod(number, count // size)
    return _permutation(count, seed, kind, permutation)[place * size : (place + 1) * size]


@dataclass(eq=False)
class TrainingStream(TorchDataset[TrainingBatch]):
    """Training batches, and meta-batches when they are due, by global step.

    ``batches[step]`` is this rank's share of optimizer step ``step``. Each epoch permutes the rows anew and
    drops its incomplete last batch. If ``meta_every`` divides the step there is a meta-batch, ``augmented``,
    from permutations of the rows with an augmented prompt. It keeps the order of chosen and rejected under
    noise, so it reveals no true label.
    """

    pairs: TokenizedPairs
    global_batch_size: int
    """Pairs of a step, over all ranks."""
    _: KW_ONLY
    seed: int
    meta_every: int | None = None
    """Steps between two meta-batches; None for none."""
    meta_batch_size: int = 64
    """Pairs of a meta-batch, over all ranks."""
    rank: int = 0
    world_size: int = 1
    """Number of processes; it must divide both batch sizes."""
    clean_meta: TokenizedPairs | None = None
    """Pairs with clean labels for the meta-batches instead, without augmented prompts."""
    shuffle: bool = True
    """False takes the rows in their order in each epoch."""

    def __post_init__(self) -> None:
        pairs, clean_meta, world_size = self.pairs, self.clean_meta, self.world_size
        global_batch_size, meta_batch_size = self.global_batch_size, self.meta_batch_size
        check_rank_shares("global_batch_size", global_batch_size, world_size)
        if len(pairs) < global_batch_size:
            raise UserError(
                f"Only {len(pairs)} training pairs are left, fewer than one batch; give more data, or lower "
                f"global_batch_size, which is {global_batch_size}."
            )
        if self.meta_every is None:
            return
        check_rank_shares("meta_batch_size", meta_batch_size, world_size)
        self.eligible = list(range(len(clean_meta))) if clean_meta else pairs.with_augmented_prompt
        if len(self.eligible) < meta_batch_size and clean_meta:
            raise UserError(
                f"clean_meta has {len(clean_meta)} pairs, fewer than meta_batch_size {meta_batch_size}; give "
                "more clean pairs or lower meta_batch_size."
            )
        if (known := len(self.eligible)) < meta_batch_size:
            smaller = f"lower --data.meta_batch_size to at most {known}, " if known else ""
            raise UserError(
                f"Only {known} of the {len(pairs)} training pairs have an augmented prompt, fewer than "
                f"meta_batch_size {meta_batch_size}: without a column augmented_prompt, rules reword the "
                f"prompts and change few of them; {smaller}write paraphrases with pacmr augment and give the "
                "file as --data.augmentations, or use a method without VNet, such as --method dpo."
            )

    def __len__(self) -> int:
        """Steps of an epoch."""
        return len(self.pairs) // self.global_batch_size

    def __getitem__(self, step: int) -> TrainingBatch:
        if step < 0:
            raise IndexError(f"There is no step {step}.")
        if self.shuffle:
            rows = _block(len(self.pairs), self.global_batch_size, self.seed, "train", step)
        else:
            start = step % len(self) * self.global_batch_size
            rows = list(range(start, start + self.global_batch_size))
        return TrainingBatch(self.pairs.batch(self._share(rows, self.pairs)), self._meta(step))

    def _meta(self, step: int) -> PairBatch | None:
        if self.meta_every is None or step % self.meta_every:
            return None
        number = step // self.meta_every
        block = _block(len(self.eligible), self.meta_batch_size, self.seed, "meta", number)
        pairs = self.clean_meta or self.pairs
        rows = self._share([self.eligible[i] for i in block], pairs)
        return pairs.batch(rows, augmented=self.clean_meta is None)

    def _share(self, rows: list[int], pairs: TokenizedPairs) -> list[int]:
        """Return this rank's rows, longest first, so that micro-batches need little padding."""
        return sorted(rows[self.rank :: self.world_size], key=lambda row: -pairs.row_lengths[row])


def check_rank_shares(option: str, size: int, world_size: int) -> None:
    """Raise a UserError unless ``size`` pairs can be shared evenly, as averages over ranks require."""
    if size % world_size:
        raise UserError(
            f"{option} is {size}, which {world_size} processes cannot share evenly; use a multiple of "
            f"{world_size}, or other trainer.devices."
        )


class EvaluationStream(TorchDataset[PairBatch]):
    """Consecutive batches of pairs for evaluation: each pair once, in each batch some for every rank."""

    def __init__(self, pairs: TokenizedPairs, global_batch_size: int, rank: int = 0, world_size: int = 1):
        self.pairs = pairs
        if min(global_batch_size, len(pairs)) < world_size:
            raise UserError(
                f"validation_batch_size is {global_batch_size} and there are {len(pairs)} validation pairs, "
                f"but each of {world_size} processes needs one; use fewer processes."
            )
        # A rest with fewer pairs than ranks joins the batch before it.
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
    """Consecutive steps, the same on every rank, as the datasets of this file apply the rank themselves.

    A DistributedSampler, so that Lightning does not wrap it in one. Each iterator calls ``first_step``, in
    training the trainer's global step, so that data and optimizer agree after a resume in mid-epoch or a
    short epoch (``limit_train_batches``).
    """

    def __init__(self, length: int, first_step: Callable[[], int]):
        # Any sequence works, but torch's types name a Dataset.
        super().__init__(range(length), num_replicas=1, rank=0, shuffle=False)  # type: ignore[arg-type]
        self.first_step = first_step

    def __iter__(self) -> Iterator[int]:
        start = self.first_step()
        return iter(range(start, start + len(self)))


class RemainingRows(DistributedSampler[int]):
    """Rows of an epoch that this rank has not had yet; ``done`` returns how many it has had."""

    def __init__(self, dataset: TorchDataset[Any], done: Callable[[], int], **options: Any):
        super().__init__(dataset, **options)
        self.done = done

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.done(), None)


class StepLoader(DataLoader[Any]):
    """DataLoader that can resume in mid-epoch; Lightning requires ``state_dict`` for that."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: samplers take the position from the trainer."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing."""
