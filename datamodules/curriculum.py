"""Training pairs from easy to difficult, by an audit (Selective DPO)."""

from __future__ import annotations

from pacmr_lightning.errors import UserError
from pacmr_lightning.weighting.audited import AuditTable

from .pairs import Pairs


def easiest_first(audit: str, pairs: Pairs) -> list[int]:
    """Indices of N training pairs by rising difficulty: DPO's loss of policies that have not seen the pair.

    Args:
        audit: ``pairs.parquet`` of an audit with ``--scorer dpo`` of a run on these pairs with these labels.
        pairs: under the run's noise.

    Raises:
        UserError: the file is no audit's, has no cross-fitted u, or is not of these pairs with these labels.
    """
    table = AuditTable(audit, "cross_fit_u")
    table.check(pairs)
    found = table.rows.set_index("id")["cross_fit_u"]
    if found.isna().any():
        raise UserError(
            f"The audit {audit} has no cross-fitted u, by which pairs are easy or difficult; audit the run "
            "with --scorer dpo."
        )
    # The loss of a pair falls with its u, so both have one order. Ties stay as they are in the data.
    u = found.loc[pairs.rows["id"][:]].tolist()
    return sorted(range(len(u)), key=lambda i: -u[i])
