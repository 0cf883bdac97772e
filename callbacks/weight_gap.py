"""Mean weights of flipped and unflipped pairs along a run, as in the paper's table of learned weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from pacmr_lightning.batch import UNKNOWN
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import replacing
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.datamodule import datamodule
from pacmr_lightning.runs.folder import ANALYSIS
from pacmr_lightning.weight_gap import NUMBERS, weight_gap

from .last_visits import LastVisits
from .probe_set import probe, probe_indices
from .records import record_of

TABLE = "weight-gap.csv"
"""File of the table inside that folder."""
ALL = "all"
"""Category of the rows over all pairs."""


class WeightGap(Callback):
    """Mean weights of unflipped and flipped pairs, their gap, and how well a low weight tells flipped pairs.

    It works with any weighting, over two sets of pairs: the last ``window`` visits on all ranks, in whole
    steps, each with the weight that it had then, and a probe set of ``probe_pairs`` training pairs, the same
    for all methods, orders and resumes, with the weights of the current policy and weighting.

    Files in the run's folder, written at the end of fit and every ``every`` policy updates:

    - ``analysis/weight-gap.csv``, one row a step (policy updates done), set (``window`` or ``probe``) and
      category (``all``, and each one that rows have): ``pairs``, ``mean`` (weight), ``mean_unflipped``,
      ``mean_flipped``, ``gap``, ``auroc`` and ``average_precision`` of "low weight = flipped". They are empty
      where flips are unknown; see ``pacmr_lightning.weight_gap``. For probe pairs under VNet the swap
      check: ``mean_swapped``, the mean weight with the responses of each pair exchanged (the same Delta, and
      -u), and ``rising``, the share of pairs with g(Delta, abs(u)) > g(Delta, -abs(u)).
    - ``analysis/probe-NNNNN.parquet`` for step NNNNN: u, Delta, a, b and weights of every probe pair.

    The loggers get the numbers over all pairs as ``weights/probe_gap``, ``weights/window_auroc`` and so on.
    A probe pair costs two forward passes without gradient: half of what a training pair costs.

    Args:
        window: visits that the first set looks back on; all visits of the earliest step count, see
            ``LastVisits``.
        probe_pairs: training pairs of the second set; all of them where there are fewer.
        every: policy updates between two rows of the table; None for the end of fit only.

    Raises:
        UserError: an option is under 1; at setup, the datamodule has no ``train_pairs``; at the first step,
            the module returns no record.
    """

    def __init__(self, window: int = 2000, probe_pairs: int = 2000, every: int | None = None):
        super().__init__()
        for name, value in (("probe_pairs", probe_pairs), ("every", every)):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}, but WeightGap needs at least 1.")
        self.probe_pairs = probe_pairs
        self.every = every
        # Of a visit: weight, flipped, and the number of its category, -1 where it has none.
        self._visits = LastVisits(window, columns=3)
        self._last_step: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Chooses the probe set; a checkpoint is loaded after this."""
        if stage != "fit":
            return
        pairs = getattr(datamodule(trainer), "train_pairs", None)
        if pairs is None:
            raise UserError(
                "WeightGap asks about training pairs, but this run's data has no train_pairs; use "
                "PreferenceDataModule, or take WeightGap out of trainer.callbacks."
            )
        ids, categories = list(pairs.rows["id"]), list(pairs.rows["category"])
        self._probe = probe_indices(ids, self.probe_pairs)
        self._names = sorted({name for name in categories if name is not None})
        number = {name: i for i, name in enumerate(self._names)}
        self._numbers = {
            pair: number.get(category, -1) for pair, category in zip(ids, categories, strict=True)
        }
        if trainer.global_step == 0:
            self._visits.clear()
        self._last_step = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the window of all ranks; ``state_dict`` would save that of rank 0 alone."""
        rows = self._visits.of_all_ranks(trainer.strategy.root_device)
        checkpoint[type(self).__name__] = {"visits": rows}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Goes on from a checkpoint, with this number of ranks or another."""
        state = checkpoint.get(type(self).__name__)
        if state is not None:
            self._visits.load(state["visits"], trainer.is_global_zero)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drops what an earlier run in this folder wrote at the steps that this fit is going to do."""
        folder = Path(trainer.default_root_dir) / ANALYSIS
        if not trainer.is_global_zero or not folder.is_dir():
            return
        for file in folder.glob("probe-*.parquet"):
            if int(file.stem.split("-")[1]) > trainer.global_step:
                file.unlink()
        if (folder / TABLE).exists():
            table = _read(folder / TABLE)
            _write(table[table["step"] <= trainer.global_step], folder / TABLE)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes the step's pairs, which stay where they are, and adds to the table where it is due."""
        record = record_of(outputs)
        category = torch.tensor([self._numbers.get(pair, -1) for pair in record.ids])
        # global_step has counted this step's policy update already.
        self._visits.add(trainer.global_step - 1, record.weight, record.flipped, category)
        if self.every and trainer.global_step % self.every == 0:
            self._measure(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """The last row of the table, while the ranks can still talk to each other."""
        if self._last_step != trainer.global_step:
            self._measure(trainer, pl_module)

    def _measure(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        """Asks on all ranks; logs on all of them, since each has the numbers; writes on rank 0."""
        step = self._last_step = trainer.global_step
        visits = self._visits.of_all_ranks(trainer.strategy.root_device)
        _, weight, flipped, category = visits.unbind(1)
        names = [None if number < 0 else self._names[number] for number in category.int().tolist()]
        window = pd.DataFrame({"category": pd.Series(names, dtype=object), "weight": weight.numpy()})
        window["flipped"] = (flipped == 1).numpy()
        window["flipped"] = window["flipped"].astype("boolean").mask((flipped == UNKNOWN).numpy())
        pairs = probe(trainer, pl_module, self._probe)
        rows = [
            {"step": step, "set": kind, **row}
            for kind, frame in (("window", window), ("probe", pairs))
            for row in gap_rows(frame)
        ]
        _log(trainer, rows)
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir) / ANALYSIS
        with replacing(folder / f"probe-{step:05d}.parquet") as temporary:
            pairs.to_parquet(temporary, index=False)
        table = pd.DataFrame(rows)
        if (folder / TABLE).exists():
            # Rows that are all empty in one of them must not decide on the columns' types.
            table = pd.DataFrame([*_read(folder / TABLE).to_dict("records"), *rows])
        _write(table, folder / TABLE)


def gap_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The table's numbers over all pairs and by category.

    Args:
        frame: N pairs with ``category``, ``weight`` and ``flipped`` (NA where unknown), and, for the swap
            check, ``u`` and ``swapped_weight``.
    """
    groups = [(ALL, frame), *frame.groupby("category", sort=True)]
    return [{"category": name, **_numbers(group)} for name, group in groups]


def _numbers(frame: pd.DataFrame) -> dict[str, float | int | None]:
    weights = torch.tensor(frame["weight"].to_numpy())
    flipped = torch.tensor(frame["flipped"].fillna(False).to_numpy(bool)).long()
    flipped[torch.tensor(frame["flipped"].isna().to_numpy())] = UNKNOWN
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


def _log(trainer: Trainer, rows: list[dict[str, Any]]) -> None:
    names = ("mean", *NUMBERS, "mean_swapped", "rising")
    scalars = {
        f"weights/{row['set']}_{name}": row[name]
        for row in rows
        for name in names
        if row["category"] == ALL and row[name] is not None
    }
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in scalars.items()})
    for logger in trainer.loggers:
        # The step of the training metrics, which count from 0: rows from there on are those of a resumed run.
        logger.log_metrics(scalars, step=trainer.global_step - 1)


def _read(path: Path) -> pd.DataFrame:
    # The default parser of pandas before 3.1 is off by a bit now and then, which adds up over rewritings.
    return pd.read_csv(path, engine="pyarrow")


def _write(table: pd.DataFrame, path: Path) -> None:
    with replacing(path) as temporary:
        table.to_csv(temporary, index=False)
