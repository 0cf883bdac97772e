"""Weights from an audit of an earlier run: the second of two passes over the same labels."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from ..batch import PairBatch
from ..errors import UserError
from ..rewards import Rewards
from .base import Weighting, Weights

_COLUMNS = ["id", "p_wrong", "observed"]


class AuditedWeights(Weighting):
    """g = P(the label is right), as ``pacmr audit`` of an earlier run found it.

    Under symmetric flips this posterior is Theorem 1's optimum, like ``SigmoidPrior`` with the offset "auto".
    But here it comes from a policy that has finished learning and, with the audit's cross-fitted scores, has
    not seen the label. So it says as much at the first update as at the last, it stays as it is and no
    mistake can confirm itself. The audit estimates the rate of wrong labels, or is given it.

    ``soft_labels`` and ``hard`` make four second passes of one audit: soft labels, weights, suspects flipped
    (both) and suspects dropped (``hard`` alone).

    Args:
        audit: ``pairs.parquet`` of an audit of a run on the same pairs with the same labels.
        mean_one: divide the weights of an optimizer-step batch by their mean.
        soft_labels: what a weight leaves of 1 goes to the other label: p l(u) + (1 - p) l(-u).
        hard: take P(the label is right) as 1 where it is at least one half, and as 0 elsewhere.
    """

    def __init__(self, audit: str, mean_one: bool = False, soft_labels: bool = False, hard: bool = False):
        self.audit = audit
        self.mean_one = mean_one
        self.soft_labels = soft_labels
        self.hard = hard

    def check_pairs(self, pairs: Any) -> None:
        """Looks all training pairs up.

        Raises:
            UserError: the file is no audit's, or not of these pairs with these labels.
        """
        ids = pairs.rows["id"][:]
        unknown = [name for name in ids if name not in self._audited]
        if unknown:
            raise UserError(
                f"The audit {self.audit} does not know {len(unknown)} of {len(ids)} training pairs "
                f"({unknown[0]} for one); audit a run on the same data."
            )
        other = sum(
            self._audited[name][1] != swap for name, swap in zip(ids, map(bool, pairs.swapped), strict=True)
        )
        if other:
            raise UserError(
                f"The audit {self.audit} saw {other} of {len(ids)} training pairs with the other label; "
                "audit a run with the same noise."
            )

    def weights(self, rewards: Rewards, batch: PairBatch) -> Weights:
        """(N,) weights; they depend on the pairs alone.

        Raises:
            UserError: the audit does not know a pair.
        """
        unknown = [name for name in batch.ids if name not in self._audited]
        if unknown:
            raise UserError(f"The audit {self.audit} does not know the pair {unknown[0]}; audit a run on it.")
        return Weights(rewards.u.new_tensor([self._audited[name][0] for name in batch.ids]))

    @cached_property
    def _audited(self) -> dict[str, tuple[float, bool]]:
        """By pair: P(right), and whether the run's noise had exchanged its responses."""
        import pandas as pd  # takes a while, and other weightings do without

        path = Path(self.audit)
        if not path.is_file():
            raise UserError(f"There is no file {path}; pacmr audit RUN writes such a file, pairs.parquet.")
        try:
            table = pd.read_parquet(path, columns=_COLUMNS)
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise UserError(
                f"{path} is no table of pacmr audit ({reason}); give the pairs.parquet that it wrote."
            ) from None
        right = 1 - table["p_wrong"]
        if right.isna().any():
            raise UserError(
                f"The audit {path} could not tell the share of wrong labels, so it has no probabilities; "
                "give pacmr audit the --share, or audit a run that has learned more."
            )
        if self.hard:
            right = right.ge(0.5).astype(float)
        swapped = table["observed"].eq("rejected")
        return dict(zip(table["id"], zip(right.tolist(), swapped.tolist(), strict=True), strict=True))
