"""How often labels of each annotator and category would be contradicted."""

import numpy as np
import pandas as pd

from pacmr_lightning.audit.agreement import agreement
from pacmr_lightning.audit.annotators import LEAST, group_reliability
from pacmr_lightning.audit.words import groups_table

from .test_agreement import scores


def world(rates, size):
    """Annotators who flip different shares of their labels, and the table of their reliability."""
    parts = [scores(size, rate, seed=i)[:2] for i, rate in enumerate(rates)]
    u, wrong = (np.concatenate(part) for part in zip(*parts, strict=True))
    p = agreement(u, np.arange(len(u)), resamples=0).p
    pairs = pd.DataFrame(
        {
            "annotator": np.repeat([f"a{i}" for i in range(len(rates))], size),
            "prompt": np.arange(len(u)),
            "suggested": np.where(p < 0.5, "swap", "keep"),
            "flipped": pd.array(wrong, dtype="boolean"),
            "p": p,
        }
    )
    return group_reliability(pairs), pairs


def test_each_annotator():
    rates = [0.1, 0.4, 0.05, 0.25]
    table, pairs = world(rates, 800)
    assert table["group"].tolist() == ["a1", "a3", "a0", "a2"], "the most contradicted first"
    assert (table["grouping"] == "annotator").all() and (table["pairs"] == 800).all()
    table = table.set_index("group").sort_index()
    by_group = pairs.groupby("annotator")
    np.testing.assert_allclose(table["contradicted"], 1 - by_group["p"].mean())
    half = 1.96 * by_group["p"].std() / np.sqrt(800)
    np.testing.assert_allclose(table["low"], table["contradicted"] - half, rtol=1e-6)
    np.testing.assert_allclose(table["high"], table["contradicted"] + half, rtol=1e-6)
    np.testing.assert_allclose(table["flipped"].astype(float), by_group["flipped"].mean().astype(float))
    np.testing.assert_array_equal(
        table["suspected"], by_group["suggested"].apply(lambda words: words.eq("swap").sum())
    )
    page = groups_table(table.reset_index(), True)
    assert page.rows[1][3] == f"{table['contradicted']['a1']:.1%}" and page.rows[1][-1].endswith("%")
    # The same pairs four times over say no more, since those of a prompt count together.
    again = group_reliability(pd.concat([pairs] * 4)).set_index("group").sort_index()
    ends = ["contradicted", "low", "high"]
    np.testing.assert_allclose(again[ends], table[ends], rtol=1e-3)


def test_order_small_groups_and_nobody():
    _, pairs = world([0.1, 0.4], 1000)
    pairs.loc[: LEAST - 2, "annotator"] = "seldom"
    pairs.loc[LEAST - 1 : 2 * LEAST - 2, "annotator"] = None
    pairs["category"] = "all"
    table = group_reliability(pairs)
    assert table["grouping"].unique().tolist() == ["category", "annotator"]
    annotators = table[table["grouping"] == "annotator"].set_index(table["group"].fillna("nobody")[1:])
    assert annotators["contradicted"].is_monotonic_decreasing
    assert annotators["low"].isna().to_dict() == {"a0": False, "a1": False, "seldom": True, "nobody": False}
    assert annotators["pairs"]["nobody"] == LEAST and annotators["pairs"]["seldom"] == LEAST - 1
    unknown = group_reliability(pairs.assign(p=np.nan, suggested="keep"))
    assert unknown[["contradicted", "low", "high"]].isna().all(axis=None) and unknown["pairs"].sum() == 4000
