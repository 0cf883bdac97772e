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
from pacmr_lightning.rewards import PairRecord, Rewards
from pacmr_lightning.runs.folder import ALL_CATEGORIES, ANALYSIS, WEIGHT_GAP_TABLE
from pacmr_lightning.strategies.ranks import on_all_ranks
from pacmr_lightning.weighting import VNet

from ..modules.metrics import WEIGHT_GAP, weight_gap
from .to_loggers import PAIR_WEIGHTS, log_numbers
from .visits import VisitsCallback

COLUMNS = ("u", "delta", "a", "b", "weight", "swapped_weight", "flipped")
MICRO_BATCH = 32
"""Pairs in one forward pass if the module sets no ``micro_batch_size``."""


class WeightGap(VisitsCallback):
    """Mean weights of unflipped and flipped pairs, the weight gap, and detection of flips by low weight.

    It has two sets of pairs: the last ``window`` visits, with the weights at the visit, and a probe set of
    training pairs, the same for all runs, with the current weights.

    - Files: ``analysis/weight-gap.csv``, one row per step (policy updates done), set (``window`` or
      ``probe``) and category (``all``, and those of the rows): ``pairs``, ``mean`` (weight),
      ``mean_unflipped``, ``mean_flipped``, ``gap``, ``auroc`` and ``average_precision`` of low weight for
      flips, empty if flips are unknown. For probe pairs under VNet also ``mean_swapped``, the mean weight
      with the responses swapped (-u), and ``rising``, the share of pairs with
      g(Delta, abs(u)) > g(Delta, -abs(u)).
    - Files: ``analysis/probe-NNNNN.parquet`` for step NNNNN: u, Delta, a, b and weights of each probe pair.
    - Tags: the table's values over all pairs, as ``pair_weights/window_gap``, ``pair_weights/probe_auroc``
      and so on.
    - Cost: 0.2 ms per update; each time one forward pass of policy and reference over the probe set.

    Args:
        window: number of last visits of the first set, in whole steps; see ``LastVisits``.
        probe_pairs: number of training pairs of the second set, at most all.
        every: updates between two rows of the table, or a share of the run; see ``Interval``. None for the
            end only.

    Raises:
        UserError: an option is out of range, the data has no ``train_pairs``, or the module no record.
    """

    def __init__(self, window: int = 2000, probe_pairs: int = 2000, every: int | float | None = None):
        super().__init__(window, 3, every)
        check_at_least(1, probe_pairs=probe_pairs)
        self.probe_pairs = probe_pairs

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the probe set."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        pairs = getattr(datamodule(trainer), "train_pairs", None)
        if pairs is None:
            raise UserError(
                "WeightGap needs training pairs, but this run's data has no train_pairs; use "
                "PreferenceDataModule, or remove WeightGap from trainer.callbacks."
            )
        ids, categories = list(pairs.rows["id"]), list(pairs.rows["category"])
        self._probe = probe_indices(ids, self.probe_pairs)
        self._names = sorted({name for name in categories if name is not None})
        number = {name: i for i, name in enumerate(self._names)}
        self._numbers = {
            pair: number.get(category, -1) for pair, category in zip(ids, categories, strict=True)
        }

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

    def columns_of(self, record: PairRecord) -> Sequence[Tensor]:
        """Return weight, flipped, and the index of the category, -1 for none."""
        category = torch.tensor([self._numbers.get(pair, -1) for pair in record.ids])
        return record.weight, record.flipped, category

    def look(self, trainer: Trainer, pl_module: PreferenceModule, rows: Tensor) -> None:
        """Compute and log on all ranks; write the files on rank 0."""
        step = trainer.global_step
        _, weight, flipped, category = rows.unbind(1)
        names = [None if number < 0 else self._names[number] for number in category.int().tolist()]
        window = pd.DataFrame({"category": pd.Series(names, dtype=object), "weight": weight.numpy()})
        window["flipped"] = _flags(flipped)
        pairs = probe(trainer, pl_module, self._probe)
        found = [
            {"step": step, "set": kind, **row}
            for kind, frame in (("window", window), ("probe", pairs))
            for row in gap_rows(frame)
        ]
        scalars = {
            f"{PAIR_WEIGHTS}/{row['set']}_{name}": row[name]
            for row in found
            for name in ("mean", *WEIGHT_GAP, "mean_swapped", "rising")
            if row["category"] == ALL_CATEGORIES and row[name] is not None
        }
        log_numbers(trainer, scalars)
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
    and ``b``, ``weight`` (before any division by the mean), ``swapped_weight`` (with the responses swapped;
    NaN without VNet) and ``flipped``.
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
    frame["flipped"] = _flags(rows[:, -1])
    return frame


def _numbers(pl_module: PreferenceModule, batch: PairBatch) -> Tensor:
    """Return the (N, 7) float32 ``COLUMNS`` of N pairs."""
    batch = batch.with_reference(pl_module.policy.reference_log_probs(batch))
    weighting = pl_module.weighting
    rewards = Rewards.of(pl_module.policy.log_probs(batch), batch, pl_module.objective.beta)
    weights = weighting.weights(rewards, batch)
    swapped = None
    if isinstance(pl_module.vnet, VNet):
        swapped = weighting.weights(rewards.exchanged(), batch).g
    unknown = torch.full_like(rewards.u, torch.nan, dtype=torch.float)
    columns = (rewards.u, rewards.delta, weights.a, weights.b, weights.g, swapped, batch.flipped)
    return torch.stack([unknown if column is None else column.float() for column in columns], dim=1)


def gap_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the table's values over all pairs and by category, of a frame with the columns of ``probe``."""
    groups = [(ALL_CATEGORIES, frame), *frame.groupby("category", sort=True)]
    return [{"category": name, **_gap(group)} for name, group in groups]


def _gap(frame: pd.DataFrame) -> dict[str, float | int | None]:
    weights = torch.tensor(frame["weight"].to_numpy())
    flipped = torch.tensor(frame["flipped"].astype("Int8").fillna(UNKNOWN).to_numpy(int))
    found = {
        "pairs": len(frame),
        "mean": float(weights.double().mean()),
        **weight_gap(weights, flipped),
        "mean_swapped": None,
        "rising": None,
    }
    if "swapped_weight" in frame and frame["swapped_weight"].notna().all():
        as_found = frame["weight"] > frame["swapped_weight"]
        other = frame["weight"] < frame["swapped_weight"]
        found["mean_swapped"] = float(frame["swapped_weight"].mean())
        found["rising"] = float(as_found.where(frame["u"] >= 0, other).mean())
    return found


def _flags(flipped: Tensor) -> pd.Series:
    return pd.Series((flipped == 1).numpy()).astype("boolean").mask((flipped == UNKNOWN).numpy())


def _read(path: Path) -> pd.DataFrame:
    # The default parser of pandas before 3.1 rounds some values wrongly.
    return pd.read_csv(path, engine="pyarrow")
