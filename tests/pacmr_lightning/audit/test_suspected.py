"""Precision, recall and confident learning against truth that is known."""

import sys

import numpy as np
import pandas as pd
import pytest

from pacmr_lightning.audit.agreement import Votes, agreement
from pacmr_lightning.audit.scorers import NAMES, SCORES
from pacmr_lightning.audit.suspected import Detector, confident_learning, detection_quality, find

from .test_agreement import scores


def table(flags, methods):
    return detection_quality(methods, pd.Series(flags, dtype="boolean")).set_index("method")


def test_compare_by_hand():
    suspicion = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 9.0])
    suspected = np.array([True, True, False, False, False, True])
    method = Detector("m", suspicion, suspected, 0.4)
    found = table([True, False, True, False, False, None], [method]).loc["m"]
    # The last pair's truth is unknown: 2 of the 5 others are suspect, one of them and 2 in all are wrong.
    assert found["suspected"] == 3 and found["precision"] == 0.5 and found["recall"] == 0.5
    # Wrong ones at 5 and 3, right ones at 4, 2, 1: 5 of 6 comparisons are in order.
    assert found["auroc"] == pytest.approx(5 / 6)
    assert found["average_precision"] == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert found["contradicted"] == 0.4


@pytest.mark.parametrize("flags", [[None] * 3, [False] * 3, [True] * 3])
def test_nothing_to_divide_by(flags):
    found = table(flags, [Detector("m", np.arange(3.0), np.zeros(3, dtype=bool))]).loc["m"]
    assert found["suspected"] == 0 and np.isnan(found["auroc"]) and np.isnan(found["precision"])


def test_confident_learning():
    pytest.importorskip("cleanlab")
    u, wrong, _ = scores(3000, 0.2, slope=1.0)
    ids = [f"pair-{i}" for i in range(len(u))]
    found = confident_learning("cleanlab", u, ids)
    # u is surer of the right side than of the label, so it suspected too many, but not blindly.
    assert wrong[found.suspected].mean() > 0.4
    assert wrong[found.suspected].sum() / wrong.sum() > 0.5
    # One order for all pairs would be one class, with which it cannot work.
    assert confident_learning("cleanlab", u[:1], ids[:1]) is None


def test_without_cleanlab(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "cleanlab"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cleanlab", None)
    assert confident_learning("cleanlab", np.ones(3), ["a", "b", "c"]) is None


def find_with(pairs, scorer, known=None, threshold=0.5, votes=None):
    votes = votes or Votes.single(len(pairs))
    u, prompts = pairs[SCORES[scorer]].to_numpy(), pairs["prompt"].to_numpy()
    return find(pairs, scorer, agreement(u, prompts, votes, known), votes, threshold)


def frame(n=2000, rate=0.3, known=True):
    u, wrong, prompts = scores(n, rate, seed=1)
    rng = np.random.default_rng(7)
    return pd.DataFrame(
        {
            "id": [f"pair-{i}" for i in range(n)],
            "prompt": prompts,
            "category": np.where(wrong & (rng.random(n) < 0.8), "bad", "good"),
            "observed": "chosen",
            "texts": [f"texts of {i}" for i in range(n)],
            "weight": 1 / (1 + np.exp(-0.7 * u)),
            "u": u,
            "delta": 0.0,
            "a": 0.7,
            "b": 0.0,
            "loss": np.log1p(np.exp(-u)),
            "cross_fit_u": u,
            **{"votes_for": 1.0, "votes_against": 0.0, "tie": False, "pair": range(n), "side": 1},
            "flipped": pd.array(wrong if known else [None] * n, dtype="boolean"),
        }
    )


@pytest.mark.parametrize("scorer", ["policy", "dpo"])
def test_suspected(scorer):
    pairs = frame()
    found = find_with(pairs, scorer)
    score = found.pairs[SCORES[scorer]]
    assert score.is_monotonic_increasing and found.pairs["rank"].tolist() == list(range(1, len(pairs) + 1))
    # Suspected labels are the first ranks, on one side of the cut and of the threshold.
    assert found.pairs["p"].is_monotonic_increasing
    suspect = found.pairs["suggested"] == "swap"
    assert (suspect == (found.pairs["p"] < 0.5)).all() and (suspect == (score < found.cut)).all()
    assert 0 < found.suspected < len(pairs)
    share, low, high = found.contradicted
    assert low < share < high and share == pytest.approx(1 - found.pairs["p"][suspect].mean(), abs=1e-6)
    methods = found.methods["method"].tolist()
    assert methods[0] == NAMES[scorer] and "cross-fitted u" in methods
    assert found.methods["precision"][0] > 0.6
    assert found.methods["contradicted"][0] == share
    stricter = find_with(pairs, scorer, threshold=0.45)
    assert 0 < stricter.suspected < found.suspected and stricter.contradicted[0] > share


def test_a_given_rate_of_flips():
    """p is then the probability that a label is right."""
    pairs = frame()
    found, told = find_with(pairs, "dpo"), find_with(pairs, "dpo", 0.3)
    assert told.pairs["p"].mean() == pytest.approx(0.7, abs=0.02)
    wrong = told.pairs["flipped"][told.pairs["suggested"] == "swap"].mean()
    share, low, high = told.contradicted
    assert low < wrong < high
    assert share > found.contradicted[0], "a second annotator errs at random, too"


def test_scores_that_predict_nothing():
    pairs = frame().assign(cross_fit_u=np.random.default_rng(0).standard_normal(2000))
    found = find_with(pairs, "dpo")
    assert not found.agreement.usable and found.suspected == 0 and found.cut is None
    assert found.pairs["p"].isna().all() and found.pairs["cross_fit_u"].is_monotonic_increasing
    assert np.isnan(found.contradicted).all() and found.doubted[0] == "contradicted labels"
    assert found.methods["suspected"][0] == 0


def test_ties_are_never_suspected():
    """Half of the most doubtful pairs have one vote for each side, the others two against one."""
    pairs = frame()
    ties, most = np.arange(2000) % 2 == 0, np.full(2000, 3.0)
    right = np.where(ties, 1.5, np.where(pairs["flipped"], 1, 2))
    pairs["tie"] = ties
    found = find_with(pairs, "dpo", votes=Votes(right, most - right, np.zeros((2000, 0))))
    suspect = found.pairs.index[found.pairs["suggested"] == "swap"]
    names = set(pairs["id"][ties])
    assert len(suspect) > 100 and not names & set(found.pairs["id"][suspect])
    tied = found.pairs[found.pairs["id"].isin(names)]
    assert (tied["p"] < 0.5).any() and (found.pairs["p"][suspect] < 0.5).all()
