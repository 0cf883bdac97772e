"""The share of wrong labels of each annotator and category, from scores whose truth is known."""

import numpy as np
import pandas as pd
import pytest

from pacmr_lightning.audit.group_reliability import LEAST, group_reliability
from pacmr_lightning.audit.html_report import groups_table
from pacmr_lightning.audit.noise_rate import estimate_noise_rate

from .test_noise_rate import scores


def test_what_the_run_has_learned():
    table, pairs = world([0.1, 0.3], [400, 400])
    assert "learned" not in table
    pairs["learned_rate"] = pairs["annotator"].map({"a0": 0.08, "a1": 0.26})
    pairs["category"] = np.where(np.arange(800) % 4 == 0, "x", None)
    pairs.loc[:3, ["annotator", "learned_rate"]] = [None, 0.2]
    share = estimate_noise_rate(scores(800, 0.2)[0], pairs["prompt"].to_numpy(), resamples=2)
    table = group_reliability(pairs, scores(800, 0.2)[0], share, 2)
    found = table.set_index(table["group"].fillna("nobody") + " " + table["grouping"])["learned"]
    assert found["a0 annotator"] == pytest.approx(0.08) and found["a1 annotator"] == pytest.approx(0.26)
    assert found["nobody annotator"] == pytest.approx(0.2)
    mean = pairs["learned_rate"][pairs["category"] == "x"].mean()
    assert found["x category"] == pytest.approx(mean)
    page = str(groups_table(table[table["grouping"] == "annotator"], False))
    assert "'learned in the run'" in page and "'26.0%'" in page
    without = str(groups_table(table.drop(columns="learned"), False))
    assert "earned in the run" not in without


def world(rates, sizes, seed=0, spreads=None, known=None, column="annotator", resamples=40):
    parts = [
        scores(size, rate, spread=spread, seed=100 * seed + i)[:2]
        for i, (rate, size, spread) in enumerate(
            zip(rates, sizes, spreads or [2.0] * len(rates), strict=True)
        )
    ]
    u, wrong = (np.concatenate(part) for part in zip(*parts, strict=True))
    prompts = np.arange(len(u))
    share = estimate_noise_rate(u, prompts, known, resamples=5)
    p = share.wrong(u)
    pairs = pd.DataFrame(
        {
            column: np.repeat([f"a{i}" for i in range(len(rates))], sizes),
            "prompt": prompts,
            "suggested": np.where(p > 0.5, "swap", "keep"),
            "flipped": pd.array(wrong, dtype="boolean"),
            "p_wrong": p,
        }
    )
    return group_reliability(pairs, u, share, resamples).set_index("group").sort_index(), pairs


@pytest.mark.parametrize("known", [None, 0.2])
def test_finds_each_annotators_share(known):
    rates = np.array([0.05, 0.1, 0.2, 0.25, 0.4])
    table, pairs = world(rates, [1500] * 5, known=known)
    np.testing.assert_allclose(table["expected"], rates, atol=0.05)
    assert (table["low"] < table["expected"]).all() and (table["expected"] < table["high"]).all()
    assert ((table["low"] <= rates) & (rates <= table["high"])).sum() >= 4
    assert (table["grouping"] == "annotator").all() and table["pairs"].tolist() == [1500] * 5
    by_group = pairs.groupby("annotator")
    np.testing.assert_allclose(table["flipped"].astype(float), by_group["flipped"].mean().astype(float))
    np.testing.assert_allclose(table["suspected"], by_group["suggested"].apply(lambda s: s.eq("swap").sum()))
    np.testing.assert_allclose(table["suspected_share"], table["suspected"] / 1500)
    # Why it is not the mean of P(wrong), nor the share of suspected: both are drawn to the middle.
    drawn = by_group["p_wrong"].mean()
    assert drawn["a4"] < 0.35 and drawn["a0"] > 0.07 and table["suspected_share"]["a4"] < 0.33


def test_intervals_cover():
    """Of 60 intervals of groups of 300 pairs no more than 8 miss (P below 1% if they keep their promise)."""
    rates = np.array([0.05, 0.15, 0.15, 0.25, 0.4])
    hits = 0
    for seed in range(12):
        table, _ = world(rates, [300] * 5, seed=seed + 1, resamples=100)
        hits += ((table["low"] <= rates) & (rates <= table["high"])).sum()
    assert hits >= 52


def test_categories_that_the_policy_judges_less_surely():
    """A share per group and one slope are fitted together: otherwise hard categories would bend the curve."""
    table, _ = world([0.1, 0.4, 0.2], [4000] * 3, spreads=[2.5, 1.0, 1.5], column="category")
    np.testing.assert_allclose(table["expected"], [0.1, 0.4, 0.2], atol=0.06)
    assert (table["grouping"] == "category").all()


def test_order_small_groups_and_nobody():
    _, pairs = world([0.1, 0.4], [1000, 1000])
    pairs.loc[:4, "annotator"] = "seldom"
    pairs.loc[5 : LEAST + 4, "annotator"] = None
    pairs["category"] = "all"
    rng = np.random.default_rng(0)
    u, _, prompts = scores(2000, 0.3, seed=5)
    table = group_reliability(pairs, u, estimate_noise_rate(u, prompts, 0.3, resamples=2), 10)
    assert table["grouping"].unique().tolist() == ["category", "annotator"]
    annotators = table[table["grouping"] == "annotator"].set_index(table["group"].fillna("nobody")[1:])
    assert np.isnan(annotators["expected"]["seldom"]) and annotators["pairs"]["nobody"] == LEAST
    assert annotators.index[-1] == "seldom" and annotators["expected"].iloc[:-1].is_monotonic_decreasing
    coins = rng.standard_normal(2000)
    for known in (None, 0.3):
        unknown = group_reliability(pairs, coins, estimate_noise_rate(coins, prompts, known, resamples=2), 10)
        assert unknown["expected"].isna().all() and unknown["pairs"].sum() == 4000


def test_memorised_labels():
    """One annotator guesses and one never errs; a policy that agrees with both cannot tell them apart."""
    table, pairs = world([0.0, 0.499], [1500, 1500])
    u, _, prompts = scores(3000, 0.03, spread=2.0, seed=7)
    told = estimate_noise_rate(u, prompts, 0.45, resamples=5)
    assert told.identified and told.fit.refused
    found = group_reliability(pairs, u, told, 10)
    assert found[["expected", "low", "high"]].isna().all(axis=None)
    assert found["suspected"].sum() == table["suspected"].sum()
    assert "contradict a given or assumed rate" in str(groups_table(found, False))
