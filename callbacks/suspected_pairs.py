"""Callback that shows the pairs with the lowest weights so far."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from pacmr_lightning.batch import Segment
from pacmr_lightning.errors import UserError, check_at_least
from pacmr_lightning.modules.datamodule import datamodule
from pacmr_lightning.ranks import on_all_ranks

from .interval import Interval
from .to_loggers import log_texts
from .visits import record_of

LONGEST = 400
"""Maximum length of a text, in characters."""
LABELS = {1: "flipped", 0: "not flipped", -1: "unknown"}
Pair = tuple[float, float, int, int, str]


class SuspectedPairs(Callback):
    """The pairs with the lowest weights so far, which are suspected label errors, with their texts.

    A pair is ranked by its lowest weight at any visit; equal weights, as in DPO, are ranked by u. After the
    run ``pacmr audit`` ranks all pairs by a better score.

    Tags: the text ``suspected_pairs``, with weight, u, update, label (flipped or not, if known), prompt and
    responses. Files: none. Cost: 0.02 ms per update, and about 5 ms each time.

    Args:
        pairs: number of pairs.
        every: updates between two times, or a share of the run; see ``Interval``. The end is always shown.

    Raises:
        UserError: an option is out of range, the data has no ``train_pairs``, or the module no record.
    """

    def __init__(self, pairs: int = 10, every: int | float | None = 0.25):
        super().__init__()
        check_at_least(1, pairs=pairs)
        self.pairs = pairs
        self.interval = Interval(every)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run; a checkpoint is loaded after this."""
        if stage != "fit":
            return
        if getattr(datamodule(trainer), "train_pairs", None) is None:
            raise UserError(
                "SuspectedPairs shows training pairs, but this run's data has no train_pairs; use "
                "PreferenceDataModule, or remove SuspectedPairs from trainer.callbacks."
            )
        self._lowest: list[Pair] = []
        self._new: list[tuple[int, list[str], Tensor]] = []
        self._shown: int | None = None
        self._places: dict[str, int] = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the lowest weights over all ranks."""
        checkpoint[type(self).__name__] = self._gathered()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the lowest weights, on any number of ranks."""
        self._lowest = list(checkpoint.get(type(self).__name__, ()))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Add the step's pairs, and log if due."""
        record = record_of(outputs)
        numbers = torch.stack([record.weight.float(), record.u.float(), record.flipped.float()]).detach()
        self._new.append((trainer.global_step, record.ids, numbers))
        if self.interval.is_due(trainer):
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Log at the end."""
        if self._shown != trainer.global_step:
            self._log(trainer)

    def _gathered(self) -> list[Pair]:
        """Return the lowest pairs over all ranks; all ranks call it."""
        found = list(self._lowest)
        for step, ids, numbers in self._new:
            rows = zip(numbers.T.tolist(), ids, strict=True)
            found += [(weight, u, step, int(flipped), name) for (weight, u, flipped), name in rows]
        self._new = []
        self._lowest = self._first(on_all_ranks(self._first(found)))
        return self._lowest

    def _first(self, found: list[Pair]) -> list[Pair]:
        """Return the first ``pairs`` pairs, each with its lowest visit."""
        by_id: dict[str, Pair] = {}
        for pair in sorted(found):
            by_id.setdefault(pair[-1], pair)
        return list(by_id.values())[: self.pairs]

    def _log(self, trainer: Trainer) -> None:
        lowest, self._shown = self._gathered(), trainer.global_step
        if trainer.is_global_zero and trainer.loggers and lowest:
            log_texts(trainer, "suspected_pairs", self._texts(trainer, lowest))

    def _texts(self, trainer: Trainer, lowest: list[Pair]) -> dict[str, dict[str, str]]:
        """Return the heading and text of each column, by id."""
        data = datamodule(trainer)
        if not self._places:
            self._places = {name: i for i, name in enumerate(data.train_pairs.rows["id"][:])}
        rows = {}
        for weight, u, step, flipped, name in lowest:
            batch = data.train_pairs.batch([self._places[name]])
            rows[name] = {
                "Weight": f"{weight:.3f}",
                "u": f"{u:.2f}",
                "Update": f"{step:,}",
                "Label": LABELS[flipped],
                **{
                    part.name.capitalize(): _shortened(
                        data.tokenizer.decode(
                            batch.input_ids[batch.segment_ids == part].tolist(), skip_special_tokens=True
                        )
                    )
                    for part in (Segment.PROMPT, Segment.CHOSEN, Segment.REJECTED)
                },
            }
        return rows


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
