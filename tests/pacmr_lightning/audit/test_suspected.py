"""Ranks, suspected labels, groups of pairs, and the quality of a score against truth that is known."""

import numpy as np
import pandas as pd
import pytest

from pacmr_lightning.audit.agreement import Votes, agreement
from pacmr_lightning.audit.annotators import LEAST, annotator_reliability, group_reliability
from pacmr_lightning.audit.scorers import SCORES
from pacmr_lightning.audit.suspected import detection_quality, find
from pacmr_lightning.audit.words import groups_table, verdict

from .test_agreement import scores


def test_quality_by_hand():
    u, suspected = -np.array([5.0, 4, 3, 2, 1, 9]), np.array([True, True, False, False, False, True])
    flags = pd.Series([True, False, True, False, False, None], dtype="boolean")
    found = detection_quality(u, suspected, flags)
    # The last pair's truth is unknown: 2 of the 5 others are suspect, one of them and 2 in all are wrong.
    assert (found["suspected"], found["precision"], found["recall"]) == (3, 0.5, 0.5)
    # Wrong ones at 5 and 3, right ones at 4, 2, 1: 5 of 6 comparisons are in order.
    assert found["auroc"] == pytest.approx(5 / 6)
    assert found["average_precision"] == pytest.approx((1 / 1 + 2 / 3) / 2)
    for flag in (None, False, True):
        found = detection_quality(u, np.zeros(6, bool), pd.Series([flag] * 6, dtype="boolean"))
        assert found["suspected"] == 0 and np.isnan(found["auroc"]) and np.isnan(found["precision"])


def find_with(pairs, scorer, known=None, threshold=0.5, votes=None):
    votes = votes or Votes.single(len(pairs))
    u, prompts = pairs[SCORES[scorer]].to_numpy(), pairs["prompt"].to_numpy()
    return find(pairs, scorer, agreement(u, prompts, votes, known), votes, threshold, scorer)


def frame(n=2000, rate=0.3, known=True):
    u, wrong, prompts = scores(n, rate, seed=1)
    rng = np.random.default_rng(7)
    columns = {
        "id": [f"pair-{i}" for i in range(n)],
        "prompt": prompts,
        "category": np.where(wrong & (rng.random(n) < 0.8), "bad", "good"),
        "observed": "chosen",
        "texts": [f"texts of {i}" for i in range(n)],
        "weight": 1 / (1 + np.exp(-0.7 * u)),
        **{"u": u, "delta": 0.0, "a": 0.7, "b": 0.0, "cross_fit_u": u},
        "loss": np.log1p(np.exp(-u)),
        **{"votes_for": 1.0, "votes_against": 0.0, "once": True, "tie": False, "pair": range(n), "side": 1},
        "flipped": pd.array(wrong if known else [None] * n, dtype="boolean"),
    }
    return pd.DataFrame(columns)


def test_suspected():
    pairs = frame()
    found = find_with(pairs, "dpo")
    score = found.pairs["cross_fit_u"]
    # Suspected labels are on one side of the cut and of the threshold.
    suspect = found.pairs["suggested"] == "swap"
    assert (suspect == (found.pairs["p"] < 0.5)).all() and (suspect == (score < found.cut)).all()
    assert 0 < found.suspected < len(pairs)
    share, low, high = found.contradicted
    assert low < share < high and share == pytest.approx(1 - found.pairs["p"][suspect].mean(), abs=1e-6)
    assert found.methods["method"][0] == "cross-fitted u"
    assert found.methods["precision"][0] > 0.6
    assert found.methods["contradicted"][0] == share
    stricter = find_with(pairs, "dpo", threshold=0.45)
    assert 0 < stricter.suspected < found.suspected and stricter.contradicted[0] > share
    said = f"{stricter.suspected:,} of 2,000 labels have p below 0.45. Of these"
    assert verdict(stricter).startswith(said) and "probably contradict" in verdict(found)
    known = verdict(find_with(pairs, "dpo", known=0.3, threshold=0.45))
    assert "labels have p below 0.45; " in known and "are expected to be wrong" in known


def test_votes_and_ties_decide_the_rank():
    pairs, rng = frame(), np.random.default_rng(0)
    votes = Votes(*rng.integers([[1], [0]], 5, (2, 2000)).astype(float), np.zeros((2000, 0)))
    found = find_with(pairs.assign(tie=pairs["u"] < -4), "dpo", votes=votes)
    # Injected noise exchanges ties, too, which are no wrong labels.
    assert found.pairs["flipped"][found.pairs["tie"]].isna().all() and pairs["flipped"].notna().all()
    ties = found.pairs["tie"].sum()
    assert found.pairs["p"][:-ties].is_monotonic_increasing and found.pairs["tie"][-ties:].all() and ties > 9
    assert found.pairs["suggested"].eq("swap")[: found.suspected].all() and found.cut is None


def test_other_scores_do_without_the_judges():
    pairs, wrong = frame(), frame()["flipped"].to_numpy(dtype=bool)
    votes = Votes(np.ones(2000), np.zeros(2000), np.where(wrong, -1.0, 1.0)[:, None])
    both = agreement(pairs["u"].to_numpy(), pairs["prompt"].to_numpy(), votes, 0.3, resamples=0)
    judged = find(pairs.assign(judged_u=both.margin), "judge", both, votes, 0.5, "dpo").methods
    own = find_with(pairs, "dpo", 0.3).methods.iloc[0]
    same = ["suspected", "precision", "recall"]
    assert judged["recall"][0] > own["recall"] and judged.iloc[1][same].equals(own[same])


@pytest.fixture
def pairs():
    """3,200 pairs of four annotators who err differently, each with a prompt of its own, by rank."""
    rates = np.tile([0.1, 0.4, 0.05, 0.25], 800)
    pairs = frame(3200, rates).assign(prompt=range(3200), annotator=["a0", "a1", "a2", "a3"] * 800)
    return find_with(pairs.drop(columns="category"), "policy").pairs


def test_each_annotator(pairs):
    table = group_reliability(pairs)
    assert table["group"].tolist() == ["a1", "a3", "a0", "a2"], "the most contradicted first"
    assert (table["grouping"] == "annotator").all() and (table["pairs"] == 800).all()
    table = table.set_index("group").sort_index()
    by_group = pairs.groupby("annotator")
    np.testing.assert_allclose(table["contradicted"], 1 - by_group["p"].mean())
    half = 1.96 * by_group["p"].std() / np.sqrt(800)
    np.testing.assert_allclose(table["low"], table["contradicted"] - half, rtol=1e-6)
    np.testing.assert_allclose(table["high"], table["contradicted"] + half, rtol=1e-6)
    np.testing.assert_allclose(table["flipped"].astype(float), by_group["flipped"].mean().astype(float))
    swaps = pairs["suggested"].eq("swap").groupby(pairs["annotator"]).sum()
    assert table["suspected"].tolist() == swaps.tolist()
    page = groups_table(table.reset_index(), True)
    assert page.rows[1][3] == f"{table['contradicted']['a1']:.1%}" and page.rows[1][-1].endswith("%")
    # The same pairs four times over say no more, since those of a prompt count together.
    again = group_reliability(pd.concat([pairs] * 4)).set_index("group").sort_index()
    ends = ["contradicted", "low", "high"]
    np.testing.assert_allclose(again[ends], table[ends], rtol=1e-3)


def test_order_small_groups_and_nobody(pairs):
    pairs.loc[: LEAST - 2, "annotator"] = "seldom"
    pairs.loc[LEAST - 1 : 2 * LEAST - 2, "annotator"] = None
    pairs["category"] = "all"
    table = group_reliability(pairs)
    assert table["grouping"].unique().tolist() == ["category", "annotator"]
    annotators = table[table["grouping"] == "annotator"].set_index(table["group"].fillna("nobody")[1:])
    assert annotators["contradicted"].is_monotonic_decreasing
    assert annotators.index[annotators["low"].isna()].tolist() == ["seldom"]
    assert annotators["pairs"]["nobody"] == LEAST and annotators["pairs"]["seldom"] == LEAST - 1
    unknown = group_reliability(pairs.assign(p=np.nan, suggested="keep"))
    assert unknown[["contradicted", "low", "high"]].isna().all(axis=None) and unknown["pairs"].sum() == 6400


def test_copies_of_a_label_are_evidence_once():
    pairs = pd.DataFrame({"annotator": "ann", "tie": False, "pair": range(200), "side": 1})
    margin = np.random.default_rng(0).normal(0.5, 1.5, 200)
    twice = annotator_reliability(pd.concat([pairs, pairs], ignore_index=True), np.tile(margin, 2))
    pd.testing.assert_series_equal(twice, annotator_reliability(pairs, margin))
