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

from pacmr_lightning.batch import UNKNOWN, PairBatch
from pacmr_lightning.errors import UserError, check_at_least
from pacmr_lightning.files import write_frame
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.datamodule import datamodule
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.runs.folder import ALL_CATEGORIES, ANALYSIS, WEIGHT_GAP_TABLE
from pacmr_lightning.strategies.ranks import on_all_ranks

from ..modules.metrics import WEIGHT_GAP, weight_gap
from .interval import Recurring
from .to_loggers import PAIR_WEIGHTS, log_numbers

COLUMNS = ("u", "delta", "a", "b", "weight", "flipped")
MICRO_BATCH = 32
"""Pairs in one forward pass if the module sets no ``micro_batch_size``."""


class WeightGap(Recurring):
    """Mean weights of unflipped and flipped pairs, the weight gap, and detection of flips by low weight.

    They are the current weights of a probe set: training pairs, the same for all runs. ``RunSummary`` has
    those of the last visits.

    - Files: ``analysis/weight-gap.csv``, one row per step (policy updates done) and category (``all``, and
      those of the rows): ``pairs``, ``mean`` (weight), ``mean_unflipped``, ``mean_flipped``, ``gap``,
      ``auroc`` and ``average_precision`` of low weight for flips, empty if flips are unknown.
    - Files: ``analysis/probe-NNNNN.parquet`` for step NNNNN: u, Delta, a, b and weight of each probe pair.
    - Tags: the table's values over all pairs, as ``pair_weights/probe_gap`` and so on.
    - Cost: each time one forward pass of policy and reference over the probe set.

    Args:
        probe_pairs: number of training pairs in the set, at most all.
        every: updates between two rows of the table, or a share of the run; see ``Interval``. None for the
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
        """Remove rows and files of steps that this fit will repeat."""
        folder = Path(trainer.default_root_dir)
        if not trainer.is_global_zero:
            return
        for file in (folder / ANALYSIS).glob("probe-*.parquet"):
            if int(file.stem.split("-")[1]) > trainer.global_step:
                file.unlink()
        if (folder / WEIGHT_GAP_TABLE).exists():
            table = _read(folder / WEIGHT_GAP_TABLE)
            write_frame(folder / WEIGHT_GAP_TABLE, table[table["step"] <= trainer.global_step])

    def look(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        """Compute and log on all ranks; write the files on rank 0."""
        step = trainer.global_step
        pairs = probe(trainer, pl_module, self._probe)
        found = [{"step": step, **row} for row in gap_rows(pairs)]
        known = {name: value for name in ("mean", *WEIGHT_GAP) if (value := found[0][name]) is not None}
        log_numbers(trainer, {f"{PAIR_WEIGHTS}/probe_{name}": value for name, value in known.items()})
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        write_frame(folder / ANALYSIS / f"probe-{step:05d}.parquet", pairs)
        # Not pd.concat: an all-empty column in one table would change the types.
        table = folder / WEIGHT_GAP_TABLE
        earlier = _read(table).to_dict("records") if table.exists() else []
        write_frame(table, pd.DataFrame([*earlier, *found]))


def probe_indices(ids: Sequence[str], count: int) -> list[int]:
    """Return indices of the ``count`` of N ids with the smallest hashes, whatever their order."""

    def place(index: int) -> bytes:
        # Its own prefix, since label noise and splits hash ids too.
        return hashlib.blake2b(f"probe:{ids[index]}".encode(), digest_size=16).digest()

    return sorted(range(len(ids)), key=place)[:count]


@torch.no_grad()
def probe(trainer: Trainer, pl_module: PreferenceModule, indices: Sequence[int]) -> pd.DataFrame:
    """Compute the weights of the training pairs at ``indices``, shared among the ranks.

    Return on all ranks one row per pair: ``id``, ``category``, ``u`` and ``delta`` in nats times beta, ``a``
    and ``b``, ``weight`` (before any division by the mean) and ``flipped``.
    """
    pairs, ranks = datamodule(trainer).train_pairs, trainer.world_size
    share = -(-len(indices) // ranks)
    mine = list(islice(cycle(indices), share * ranks))[trainer.global_rank :: ranks]
    device = trainer.strategy.root_device
    size = pl_module.micro_batch_size or MICRO_BATCH
    parts = []
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        # Hooks run outside of autocast.
        trainer.precision_plugin.val_step_context(),
    ):
        for start in range(0, share, size):
            batch = move_data_to_device(pairs.batch(mine[start : start + size]), device)
            parts.append(_numbers(pl_module, batch))
    by_rank = on_all_ranks([torch.cat(parts).cpu()])
    rows = torch.stack(by_rank, dim=1).flatten(0, 1)[: len(indices)]
    frame = pd.DataFrame(rows.numpy(), columns=list(COLUMNS))
    known = pairs.rows.select_columns(["id", "category"])[list(indices)]
    frame.insert(0, "id", known["id"])
    frame.insert(1, "category", pd.Series(known["category"], dtype=object))
    flipped = rows[:, -1].numpy()
    frame["flipped"] = pd.Series(flipped == 1).astype("boolean").mask(flipped == UNKNOWN)
    return frame


def _numbers(pl_module: PreferenceModule, batch: PairBatch) -> Tensor:
    """Return the (N, 6) float32 ``COLUMNS`` of N pairs."""
    batch = batch.with_reference(pl_module.policy.reference_log_probs(batch))
    rewards = Rewards.of(pl_module.policy.log_probs(batch), batch, pl_module.objective.beta)
    weights = pl_module.weighting.weights(rewards, batch)
    unknown = torch.full_like(rewards.u, torch.nan, dtype=torch.float)
    columns = (rewards.u, rewards.delta, weights.a, weights.b, weights.g, batch.flipped)
    return torch.stack([unknown if column is None else column.float() for column in columns], dim=1)


def gap_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the table's values over all pairs and by category, of a frame with the columns of ``probe``."""
    groups = [(ALL_CATEGORIES, frame), *frame.groupby("category", sort=True)]
    return [{"category": name, **_gap(group)} for name, group in groups]


def _gap(frame: pd.DataFrame) -> dict[str, float | int | None]:
    weights = torch.tensor(frame["weight"].to_numpy())
    flipped = torch.tensor(frame["flipped"].astype("Int8").fillna(UNKNOWN).to_numpy(int))
    mean = float(weights.double().mean())
    return {"pairs": len(frame), "mean": mean, **weight_gap(weights, flipped)}


def _read(path: Path) -> pd.DataFrame:
    # The default parser of pandas before 3.1 rounds some values wrongly.
    return pd.read_csv(path, engine="pyarrow")
