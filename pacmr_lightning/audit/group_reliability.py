"""How often another annotator would contradict the labels of each category and annotator."""

import numpy as np
import pandas as pd

from ..analysis.standard_error import clustered_standard_error

GROUPINGS = ("category", "annotator")
"""Columns of groups."""
LEAST = 20
"""Pairs of a group for an interval."""


def group_reliability(pairs: pd.DataFrame, reliability: pd.Series | None = None) -> pd.DataFrame:
    """Return one row per group of the pairs of ``Findings``, the most contradicted first.

    Columns: ``grouping``, ``group`` (NA for none), ``pairs``, ``suspected``, ``suspected_share``,
    ``contradicted`` (expected fraction of labels that another annotator would contradict, the mean of 1 - p;
    NaN without p) with 95% interval ``low`` to ``high`` over pairs (NaN for small groups), ``flipped``
    (fraction of known labels that are wrong), and perhaps ``reliability`` (of annotators, as given by name).
    """
    tables = []
    for grouping in (name for name in GROUPINGS if name in pairs):
        frame = pd.DataFrame(
            {
                "group": pairs[grouping].astype("string"),
                "suspect": pairs["suggested"].eq("swap"),
                "contradicted": 1 - pairs["p"],
                "known": pairs["flipped"].astype("Float64"),
            }
        )
        numbers = frame.groupby("group", dropna=False, sort=True)
        table = numbers.agg(
            pairs=("suspect", "size"),
            suspected=("suspect", "sum"),
            suspected_share=("suspect", "mean"),
            contradicted=("contradicted", "mean"),
            flipped=("known", "mean"),
        ).reset_index()
        errors = np.full(len(table), np.nan)
        for place, rows in enumerate(numbers.indices.values()):
            if len(rows) >= LEAST:
                values, prompts = frame["contradicted"].to_numpy()[rows], pairs["prompt"].to_numpy()[rows]
                errors[place] = clustered_standard_error(values, prompts)
        table.insert(5, "low", (table["contradicted"] - 1.96 * errors).clip(lower=0))
        table.insert(6, "high", (table["contradicted"] + 1.96 * errors).clip(upper=1))
        table.insert(0, "grouping", grouping)
        if reliability is not None:
            table["reliability"] = table["group"].map(reliability) if grouping == "annotator" else np.nan
        tables.append(
            table.sort_values(["contradicted", "suspected_share", "pairs"], ascending=False, kind="stable")
        )
    return pd.concat(tables, ignore_index=True)
