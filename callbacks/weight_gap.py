"""Callback for mean weights of flipped and unflipped pairs, as in Qu et al.'s table of learned weights."""

import hashlib
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor

from pacmr_lightning.errors import UserError, check_at_least
from pacmr_lightning.files import write_frame
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.metrics import PAIR_WEIGHTS, log_numbers, weight_gap
from pacmr_lightning.modules.schedule import datamodule
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.runs.folder import WEIGHT_GAP_TABLE
from pacmr_lightning.strategies.ranks import on_all_ranks

from .recurring import Recurring

MICRO_BATCH = 32
"""Pairs in one forward pass if the module sets no size of micro-batches."""


class WeightGap(Recurring):
    """Mean weights of unflipped and flipped pairs, the weight gap, and detection of flips by low weight.

    They are the current weights of a probe set: training pairs, the same for all runs. ``RunSummary`` has
    those of the last visits.

    - Files: ``analysis/weight-gap.csv``, one row per step (policy updates done): ``pairs``, ``mean`` (of the
      weights), ``mean_unflipped``, ``mean_flipped``, ``gap``, ``auroc`` and ``average_precision`` of low
      weight for flips, empty if flips are unknown.
    - Tags: the table's values, as ``pair_weights/probe_gap`` and so on.
    - Cost: each time one forward pass of policy and reference over the probe set.

    Args:
        probe_pairs: number of training pairs in the set, at most all.
        every: updates between two rows of the table, or a share of the run; see ``Recurring``. None for the
            end only.

    Raises:
        UserError: an option is out of range, or the data has no ``train_pairs``.
    """

    def __init__(self, probe_pairs: int = 2000, every: int | float | None = None):
        super().__init__(every)
        check_at_least(1, probe_pairs=probe_pairs)
        self.probe_pairs = probe_pairs

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the probe set."""
        if stage != "fit":
            return
        pairs = getattr(datamodule(trainer), "train_pairs", None)
        if pairs is None:
            raise UserError(
                "WeightGap needs training pairs, but this run's data has no train_pairs; use "
                "PreferenceDataModule, or remove WeightGap from trainer.callbacks."
            )
        self._probe = probe_indices(list(pairs.rows["id"]), self.probe_pairs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read an earlier fit's rows, without those of steps that this one will repeat."""
        self._path = Path(trainer.default_root_dir) / WEIGHT_GAP_TABLE
        self._rows: list[dict[Any, Any]] = []
        if trainer.is_global_zero and self._path.exists():
            # The default parser of pandas before 3.1 rounds some values wrongly.
            table = pd.read_csv(self._path, engine="pyarrow")
            self._rows = table[table["step"] <= trainer.global_step].to_dict("records")

    def look(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        """Compute and log on all ranks; write the table on rank 0."""
        weight, flipped = probe(trainer, pl_module, self._probe).unbind(1)
        row = {"mean": float(weight.double().mean()), **weight_gap(weight, flipped)}
        known = {f"{PAIR_WEIGHTS}/probe_{name}": value for name, value in row.items() if value is not None}
        log_numbers(trainer, known)
        if trainer.is_global_zero:
            step = trainer.global_step
            before = [known for known in self._rows if known["step"] != step]  # a run may be continued here
            self._rows = [*before, {"step": step, "pairs": len(weight), **row}]
            write_frame(self._path, pd.DataFrame(self._rows))


def probe_indices(ids: Sequence[str], count: int) -> list[int]:
    """Return indices of the ``count`` of N ids with the smallest hashes, whatever their order."""
    # A prefix of their own, since label noise and splits hash ids too.
    hashes = [hashlib.blake2b(f"probe:{name}".encode(), digest_size=16).digest() for name in ids]
    return sorted(range(len(ids)), key=hashes.__getitem__)[:count]


@torch.no_grad()
def probe(trainer: Trainer, pl_module: PreferenceModule, indices: Sequence[int]) -> Tensor:
    """Return (N, 2) weights and flips of the training pairs at N ``indices``; all ranks share the work.

    A flip is 1, 0, or -1 if unknown.
    """
    pairs, ranks, policy = datamodule(trainer).train_pairs, trainer.world_size, pl_module.policy
    share = -(-len(indices) // ranks)
    mine = list(islice(cycle(indices), share * ranks))[trainer.global_rank :: ranks]
    device = trainer.strategy.root_device
    parts = []
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        # Hooks run outside of autocast.
        trainer.precision_plugin.val_step_context(),
    ):
        for part in pairs.batch(mine).micro_batches(pl_module.micro_batch or MICRO_BATCH):
            batch = move_data_to_device(part, device)
            batch = batch.with_reference(policy.reference_log_probs(batch))
            rewards = Rewards.of(policy.log_probs(batch), batch, pl_module.objective.beta)
            weight = pl_module.weighting.weights(rewards, batch).g
            parts.append(torch.stack([weight.float(), batch.flipped.float()], dim=1))
    by_rank = on_all_ranks([torch.cat(parts).cpu()])
    return torch.stack(by_rank, dim=1).flatten(0, 1)[: len(indices)]
