"""Weights from an audit of an earlier run: the second of two passes over the same labels."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..batch import PairBatch
from ..errors import UserError
from ..rewards import Rewards
from .base import Weighting, Weights

if TYPE_CHECKING:
    import pandas as pd


class AuditedWeights(Weighting):
    """g = P(the label is right), as ``pacmr audit`` of an earlier run found it.

    Under symmetric flips this posterior is Theorem 1's optimum, like ``SigmoidPrior`` with the offset "auto".
    But here it comes from a policy that has finished learning and, with the audit's cross-fitted scores, has
    not seen the label. So it says as much at the first update as at the last, it stays as it is and no
    mistake can confirm itself. The audit estimates the rate of wrong labels, or is given it.

    ``soft_labels`` and ``hard`` make four second passes of one audit: soft labels, weights, suspects flipped
    (both) and suspects dropped (``hard`` alone). A pair that a person has decided to drop weighs nothing;
    with soft labels, which share out a weight of 1, both of its orders weigh a half: neither is better.

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
        _check(self.audit, self._audited, pairs)

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
        table = _table(self.audit, "p_wrong")
        right = 1 - table["p_wrong"]
        if right.isna().any():
            raise UserError(
                f"The audit {self.audit} could not tell the share of wrong labels, so it has no "
                "probabilities; audit again with --share (0.45 where you do not know it), with another "
                "--scorer, or a run that has learned more."
            )
        if self.hard:
            right = right.ge(0.5).astype(float)
        if "decision" in table:
            right = right.mask(table["decision"].eq("drop").fillna(False), 0.5 if self.soft_labels else 0.0)
        return _by_pair(table, right)


def easiest_first(audit: str, pairs: Any) -> list[int]:
    """Indices of N training pairs by rising difficulty: DPO's loss of policies that have not seen the pair.

    Args:
        audit: ``pairs.parquet`` of an audit with ``--scorer dpo`` of a run on these pairs with these labels.
        pairs: the datamodule's.

    Raises:
        UserError: the file is no audit's, has no cross-fitted u, or is not of these pairs with these labels.
    """
    table = _table(audit, "cross_fit_u")
    found = _by_pair(table, table["cross_fit_u"])
    _check(audit, found, pairs)
    if table["cross_fit_u"].isna().any():
        raise UserError(
            f"The audit {audit} has no cross-fitted u, by which pairs are easy or difficult; audit the run "
            "with --scorer dpo."
        )
    # The loss of a pair falls with its u, so both have one order. Ties stay as they are in the data.
    u = [found[name][0] for name in pairs.rows["id"][:]]
    return sorted(range(len(u)), key=lambda i: -u[i])


def _table(path: str, value: str) -> pd.DataFrame:
    """The ids, observed labels and one more column of an audit, and any decisions."""
    import pandas as pd  # takes a while, and other weightings do without
    import pyarrow.parquet as pq

    if not Path(path).is_file():
        raise UserError(f"There is no file {path}; pacmr audit RUN writes such a file, pairs.parquet.")
    try:
        decided = {"decision"} & set(pq.read_schema(path).names)
        return pd.read_parquet(path, columns=["id", value, "observed", *decided])
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(
            f"{path} is no table of pacmr audit ({reason}); give the pairs.parquet that it wrote."
        ) from None


def _by_pair(table: pd.DataFrame, values: pd.Series) -> dict[str, tuple[float, bool]]:
    """By id: the value, and whether the run's noise had exchanged the responses."""
    swapped = table["observed"].eq("rejected")
    return dict(zip(table["id"], zip(values.tolist(), swapped.tolist(), strict=True), strict=True))


def _check(audit: str, audited: dict[str, tuple[float, bool]], pairs: Any) -> None:
    ids = pairs.rows["id"][:]
    unknown = [name for name in ids if name not in audited]
    if unknown:
        raise UserError(
            f"The audit {audit} does not know {len(unknown)} of {len(ids)} training pairs "
            f"({unknown[0]} for one); audit a run on the same data."
        )
    other = sum(audited[name][1] != bool(swap) for name, swap in zip(ids, pairs.swapped, strict=True))
    if other:
        raise UserError(
            f"The audit {audit} saw {other} of {len(ids)} training pairs with the other label; "
            "audit a run with the same noise."
        )
