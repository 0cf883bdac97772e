"""Weights from an audit of an earlier run: the second of two passes over the same labels."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..batch import PairBatch
from ..errors import UserError, first_line
from ..files import local_path
from ..rewards import Rewards
from .base import Weighting, Weights

if TYPE_CHECKING:
    import pandas as pd


class AuditedWeights(Weighting):
    """g = P(most annotators would agree with the label), ``p_majority`` of ``pacmr audit``.

    Unlike ``SigmoidPrior``'s weight it comes from a finished audit, so it does not change in training, and
    errors cannot reinforce themselves. With a given rate of random flips it is the probability that the label
    is right, Theorem 1's optimum.

    ``soft_labels`` and ``hard`` make four second passes: soft labels, weights, suspected label errors swapped
    (both) and suspected label errors dropped (``hard`` alone). A pair that was dropped by hand has weight 0,
    and one half with soft labels.

    Args:
        audit: ``pairs.parquet`` of an audit of a run on the same pairs with the same labels.
        mean_one: divide the weights of an optimizer-step batch by their mean.
        soft_labels: loss p l(u) + (1 - p) l(-u).
        hard: take the probability as 1 where it is at least one half, and as 0 elsewhere.
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
        return AuditTable(self.audit, "p_majority")

    @cached_property
    def _right(self) -> dict[str, float]:
        """``p_majority`` by id."""
        table = self._table.rows
        right = table["p_majority"]
        if right.isna().any():
            raise UserError(
                f"The audit {self.audit} could not predict the labels, so it has no probabilities; audit "
                "again with another --scorer or a run that has learned more, or with --noise_rate."
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

        self.path = local_path(path)
        if not self.path.is_file():
            raise UserError(f"There is no file {path}; pacmr audit RUN writes such a file, pairs.parquet.")
        try:
            decided = {"decision"} & set(pq.read_schema(self.path).names)
            self.rows = pd.read_parquet(self.path, columns=["id", column, "observed", "texts", *decided])
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
