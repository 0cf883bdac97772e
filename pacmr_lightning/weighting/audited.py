"""Weights from an audit of an earlier run: the second of two passes over the same labels."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..batch import PairBatch
from ..errors import UserError, first_line
from ..rewards import Rewards
from .base import Weighting, Weights

if TYPE_CHECKING:
    import pandas as pd


class AuditedWeights(Weighting):
    """g = P(the label is right), by ``pacmr audit`` of an earlier run.

    Under symmetric flips this posterior is Theorem 1's optimum. Unlike ``SigmoidPrior``'s it comes from a
    finished policy (which has not seen the label, if cross-fitted), so it does not change in training, and
    errors cannot reinforce themselves.

    ``soft_labels`` and ``hard`` make four second passes: soft labels, weights, suspected label errors swapped
    (both) and suspected label errors dropped (``hard`` alone). A pair that was dropped by hand has weight 0,
    and one half with soft labels.

    Args:
        audit: ``pairs.parquet`` of an audit of a run on the same pairs with the same labels.
        mean_one: divide the weights of an optimizer-step batch by their mean.
        soft_labels: loss p l(u) + (1 - p) l(-u).
        hard: take P(the label is right) as 1 where it is at least one half, and as 0 elsewhere.
    """

    def __init__(self, audit: str, mean_one: bool = False, soft_labels: bool = False, hard: bool = False):
        self.audit = audit
        self.mean_one = mean_one
        self.soft_labels = soft_labels
        self.hard = hard

    def check_pairs(self, pairs: Any) -> None:
        """Refuse a table that is not of these pairs with these labels."""
        _ = self._right  # reports a table without probabilities first
        self._table.check(pairs)

    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Return (N,) weights."""
        unknown = [name for name in batch.ids if name not in self._right]
        if unknown:
            raise UserError(f"The audit {self.audit} lacks the pair {unknown[0]}; audit a run on it.")
        return Weights(rewards.u.new_tensor([self._right[name] for name in batch.ids]))

    @cached_property
    def _table(self) -> AuditTable:
        return AuditTable(self.audit, "p_wrong")

    @cached_property
    def _right(self) -> dict[str, float]:
        """P(right) by id."""
        table = self._table.rows
        right = 1 - table["p_wrong"]
        if right.isna().any():
            raise UserError(
                f"The audit {self.audit} could not estimate the noise rate, so it has no "
                "probabilities; audit again with --noise_rate (0.45 if unknown), with another "
                "--scorer, or a run that has learned more."
            )
        if self.hard:
            right = right.ge(0.5).astype(float)
        if "decision" in table:
            right = right.mask(table["decision"].eq("drop").fillna(False), 0.5 if self.soft_labels else 0.0)
        return dict(zip(table["id"], right.tolist(), strict=True))


class AuditTable:
    """``pairs.parquet`` of an audit: ids, observed labels, another column, and decisions if any."""

    rows: pd.DataFrame

    def __init__(self, path: str, column: str):
        import pandas as pd  # a slow import
        import pyarrow.parquet as pq

        self.path = path
        if not Path(path).is_file():
            raise UserError(f"There is no file {path}; pacmr audit RUN writes such a file, pairs.parquet.")
        try:
            decided = {"decision"} & set(pq.read_schema(path).names)
            self.rows = pd.read_parquet(path, columns=["id", column, "observed", "texts", *decided])
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} is no table of pacmr audit ({first_line(error)}); give the pairs.parquet that it "
                "wrote."
            ) from None

    def check(self, pairs: Any) -> None:
        """Raise a UserError if training pairs are missing, or had other texts or the other label."""
        ids = pairs.rows["id"][:]
        swapped = dict(zip(self.rows["id"], self.rows["observed"].eq("rejected"), strict=True))
        unknown = [name for name in ids if name not in swapped]
        if unknown:
            raise UserError(
                f"The audit {self.path} lacks {len(unknown)} of {len(ids)} training pairs "
                f"({unknown[0]} for one); audit a run on the same data."
            )
        texts = dict(zip(self.rows["id"], self.rows["texts"], strict=True))
        changed = [name for name, key in zip(ids, pairs.rows["texts"][:], strict=True) if texts[name] != key]
        if changed:
            raise UserError(
                f"The audit {self.path} saw {len(changed)} of {len(ids)} training pairs with other texts "
                f"({changed[0]} for one); audit a run on these data."
            )
        other = sum(swapped[name] != bool(swap) for name, swap in zip(ids, pairs.swapped, strict=True))
        if other:
            raise UserError(
                f"The audit {self.path} saw {other} of {len(ids)} training pairs with the other label; "
                "audit a run with the same noise."
            )
