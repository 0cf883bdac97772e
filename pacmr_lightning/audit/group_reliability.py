"""How often another annotator would contradict the labels of each category and annotator."""

import numpy as np
import pandas as pd

from ..policy.numerics import clustered_standard_error

GROUPINGS = ("category", "annotator")
"""Columns of groups."""
LEAST = 20
"""Pairs of a group for an interval."""


def group_reliability(pairs: pd.DataFrame, reliability: pd.Series | None = None) -> pd.DataFrame:
    """Return one row per group of the pairs of ``Findings``, the most contradicted first.

    Columns: ``grouping``, ``group`` (NA for none), ``pairs``, ``suspected``, ``contradicted`` (expected
    fraction of labels that another annotator would contradict, the mean of 1 - p; NaN without p) with 95%
    interval ``low`` to ``high`` over prompts (NaN for small groups), ``flipped`` (fraction of known labels
    that are wrong), and perhaps ``reliability`` (of annotators, as given by name).
    """
    tables = []
    for grouping in (name for name in GROUPINGS if name in pairs):
        rows = []
        for name, part in pairs.groupby(pairs[grouping].astype("string"), dropna=False):
            doubt, prompts = 1 - part["p"].to_numpy(), part["prompt"].to_numpy()
            mean = doubt.mean()
            error = clustered_standard_error(doubt, prompts) if len(part) >= LEAST else np.nan
            rows.append(
                {
                    **{"grouping": grouping, "group": name, "pairs": len(part)},
                    **{"suspected": part["suggested"].eq("swap").sum(), "contradicted": mean},
                    **{"low": np.clip(mean - 1.96 * error, 0, 1), "high": np.clip(mean + 1.96 * error, 0, 1)},
                    "flipped": part["flipped"].astype("Float64").mean(),
                }
            )
        table = pd.DataFrame(rows)
        if reliability is not None:
            table["reliability"] = table["group"].map(reliability) if grouping == "annotator" else np.nan
        tables.append(table.sort_values(["contradicted", "pairs"], ascending=False, kind="stable"))
    return pd.concat(tables, ignore_index=True)
