"""Weights that are known before training: from an audit of an earlier run, or from columns of the rows."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from ..batch import PairBatch
from ..errors import UserError, first_line
from ..files import local_path
from ..rewards import Rewards, Weights
from .base import Weighting

if TYPE_CHECKING:
    import pandas as pd


class AuditedWeights(Weighting):
    """g = P(most annotators would agree with the label), ``p_majority`` of ``pacmr audit``, or a column.

    Unlike ``SigmoidPrior``'s weight it does not change in training, so errors cannot reinforce themselves.
    With a given rate of random flips it is the probability that the label is right, Theorem 1's optimum.

    Without an audit it is the rows' column ``weight``, else ``p_right``, else the share of votes for the
    label. ``soft_labels`` and ``hard`` need a probability and leave ``weight`` out.

    ``soft_labels`` and ``hard`` make four second passes: soft labels, weights, suspected label errors swapped
    (both) and suspected label errors dropped (``hard`` alone). A pair that was dropped by hand has weight 0,
    and one half with soft labels.

    Args:
        audit: ``pairs.parquet`` of an audit of a run on the same pairs with the same labels; None: columns.
        soft_labels: loss p l(u) + (1 - p) l(-u).
        hard: 0 for suspected label errors (without an audit: below 1/2), else 1; soft labels of ties are 1/2.
    """

    def __init__(self, audit: str | None = None, soft_labels: bool = False, hard: bool = False):
        self.audit = audit
        self.soft_labels = soft_labels
        self.hard = hard
        self._ties: set[str] = set()

    def check_pairs(self, pairs: Any) -> None:
        """Refuse a table that is not of these pairs with these labels, or rows without such a column."""
        if self.audit is None:
            self._known = self._of_columns(pairs)
        else:
            self._ties = {name for name, tie in zip(pairs.rows["id"][:], pairs.ties, strict=True) if tie}
            _ = self._known  # reports a table without probabilities first
            self._table.check(pairs)
            self.columns = ("votes_for",)  # p_majority uses the votes

    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """Return (N,) weights."""
        if unknown := [name for name in batch.ids if name not in self._known]:
            raise UserError(f"The audit {self.audit} lacks the pair {unknown[0]}; audit a run on it.")
        return Weights(rewards.u.new_tensor([self._known[name] for name in batch.ids]))

    def _of_columns(self, pairs: Any) -> dict[str, float]:
        """Weights by id from columns of the rows."""
        own = pairs.own_columns
        there = [name for name in own if name != "weight" or not (self.soft_labels or self.hard)]
        if not there:
            raise UserError(
                "AuditedWeights has no audit, and the rows have no column "
                f"{'p_right' if own else 'weight, p_right'} or votes_for; give such a column, or the "
                "pairs.parquet of an audit."
            )
        name, ids = there[0], pairs.rows["id"][:]
        self.columns = (name,)
        values = {
            "weight": pairs.rows["weight"][:],
            "p_right": pairs.p_right,
            "votes_for": pairs.vote_shares,
        }[name]
        if missing := [pair for pair, value in zip(ids, values, strict=True) if value is None]:
            raise UserError(
                f"{len(missing)} of {len(values)} rows have no {name} ({missing[0]} for one), from which "
                "AuditedWeights takes their weights; give each row a value."
            )
        weights = np.array(values, dtype=float)
        weights = np.where(pairs.ties & self.soft_labels, 0.5, weights >= 0.5) if self.hard else weights
        what = "Soft labels" if self.soft_labels else "Weights"
        rank_zero_info(f"{what} are the column {name} of the rows; their mean is {weights.mean():.3g}.")
        return dict(zip(ids, weights.tolist(), strict=True))

    @cached_property
    def _table(self) -> AuditTable:
        assert self.audit is not None, "check_pairs comes before weights without an audit."
        return AuditTable(self.audit, "p", "p_majority", *["suggested"] * self.hard)

    @cached_property
    def _known(self) -> dict[str, float]:
        """Weights by id; of an audit, its ``p_majority``."""
        table = self._table.rows
        right = table["p_majority"]
        if right.isna().any():
            raise UserError(
                f"The audit {self.audit} could not predict the labels, so it has no probabilities; audit "
                "again with another --scorer or a run that has learned more, or with --noise_rate."
            )
        if table["p"].isna().any():
            rank_zero_warn(
                f"The scores of the audit {self.audit} predict its labels no better than a coin, so its "
                "probabilities say little; audit again with another --scorer, a larger model or --noise_rate."
            )
        if self.hard:
            right = table["suggested"].eq("keep").where(table["p"].notna(), right.ge(0.5)).astype(float)
            right = right.mask(table["id"].isin(self._ties), 0.5 if self.soft_labels else 1.0)
        if "decision" in table:
            known = {"keep": 1.0, "swap": 0.0, "drop": 0.5 if self.soft_labels else 0.0}
            right = table["decision"].map(known).astype(float).fillna(right)
        return dict(zip(table["id"], right.tolist(), strict=True))


class AuditTable:
    """``pairs.parquet`` of an audit: ids, observed labels, other columns, and decisions if any."""

    rows: pd.DataFrame

    def __init__(self, path: str, *others: str):
        import pandas as pd  # a slow import
        import pyarrow.parquet as pq

        self.path = local_path(path)
        if not self.path.is_file():
            raise UserError(f"There is no file {path}; pacmr audit RUN writes such a file, pairs.parquet.")
        try:
            decided = {"decision"} & set(pq.read_schema(self.path).names)
            self.rows = pd.read_parquet(self.path, columns=["id", *others, "observed", "texts", *decided])
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
