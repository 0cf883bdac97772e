"""Training pairs from easy to difficult, by an audit (Selective DPO)."""

from __future__ import annotations

from pacmr_lightning.errors import UserError
from pacmr_lightning.weighting.audited import AuditTable

from .tokenized_pairs import TokenizedPairs


def easiest_first(audit: str, pairs: TokenizedPairs) -> list[int]:
    """Return indices of N training pairs by rising DPO loss of policies that have not seen them."""
    table = AuditTable(audit, "cross_fit_u")
    table.check(pairs)
    found = table.rows.set_index("id")["cross_fit_u"]
    if found.isna().any():
        raise UserError(
            f"The audit {audit} has no cross-fitted u, by which pairs are easy or difficult; audit the run "
            "with --scorer dpo."
        )
    # The loss falls with u. Ties keep the order of the data.
    u = found.loc[pairs.rows["id"][:]].tolist()
    return sorted(range(len(u)), key=lambda i: -u[i])
