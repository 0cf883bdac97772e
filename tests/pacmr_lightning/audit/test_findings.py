"""Precision, recall and confident learning against truth that is known."""

import sys

import numpy as np
import pandas as pd
import pytest

from pacmr_lightning.audit.findings import Detector, confident_learning, detection_quality, find, same_number
from pacmr_lightning.audit.noise_rate import rate_by

from .test_noise_rate import scores


def table(flags, methods):
    return detection_quality(methods, pd.Series(flags, dtype="boolean")).set_index("method")


def test_compare_by_hand():
    suspicion = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 9.0])
    suspected = np.array([True, True, False, False, False, True])
    method = Detector("m", suspicion, suspected, 0.4, 0.1)
    found = table([True, False, True, False, False, None], [method]).loc["m"]
    # The last pair's truth is unknown: 2 of the 5 others are suspect, one of them and 2 in all are wrong.
    assert found["suspected"] == 3 and found["precision"] == 0.5 and found["recall"] == 0.5
    # Wrong ones at 5 and 3, right ones at 4, 2, 1: 5 of 6 comparisons are in order.
    assert found["auroc"] == pytest.approx(5 / 6)
    assert found["average_precision"] == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert found["expected"] == 0.4 and found["expected_stderr"] == 0.1


@pytest.mark.parametrize("flags", [[None] * 3, [False] * 3, [True] * 3])
def test_nothing_to_divide_by(flags):
    found = table(flags, [same_number("m", np.arange(3.0), 0)]).loc["m"]
    assert found["suspected"] == 0 and np.isnan(found["auroc"]) and np.isnan(found["precision"])


def test_same_number():
    method = same_number("m", np.array([1.0, 3.0, 2.0, 3.0]), 2)
    assert method.suspected.tolist() == [False, True, False, True]


def test_confident_learning():
    pytest.importorskip("cleanlab")
    u, wrong, _ = scores(3000, 0.2, slope=1.0)
    ids = [f"pair-{i}" for i in range(len(u))]
    found = confident_learning("cleanlab", u, ids)
    # u is surer of the right side than of the label, so it suspected too many, but not blindly.
    assert wrong[found.suspected].mean() > 0.4
    assert wrong[found.suspected].sum() / wrong.sum() > 0.5
    assert 0.1 < found.expected < 0.45
    # One order for all pairs would be one class, with which it cannot work.
    assert confident_learning("cleanlab", u[:1], ids[:1]) is None


def test_without_cleanlab(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "cleanlab"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cleanlab", None)
    assert confident_learning("cleanlab", np.ones(3), ["a", "b", "c"]) is None


def find_with(pairs, scorer, known=None, threshold=0.5):
    return find(pairs, scorer, rate_by(pairs, scorer, known), threshold, varies=True)


def frame(n=2000, rate=0.3, known=True):
    u, wrong, prompts = scores(n, rate, seed=1)
    rng = np.random.default_rng(7)
    cross, *_ = scores(n, rate, seed=1)
    return pd.DataFrame(
        {
            "id": [f"pair-{i}" for i in range(n)],
            "prompt": prompts,
            "category": np.where(wrong & (rng.random(n) < 0.8), "bad", "good"),
            "observed": "chosen",
            "texts": [f"texts of {i}" for i in range(n)],
            "weight": 1 / (1 + np.exp(-0.7 * u)),
            "u": u,
            "unpulled_u": u,
            "delta": 0.0,
            "a": 0.7,
            "b": 0.0,
            "loss": np.log1p(np.exp(-u)),
            "cross_fit_u": cross,
            "flipped": pd.array(wrong if known else [None] * n, dtype="boolean"),
        }
    )


@pytest.mark.parametrize("scorer", ["vnet", "dpo"])
def test_findings(scorer):
    pairs = frame()
    found = find_with(pairs, scorer)
    score = found.pairs["weight" if scorer == "vnet" else "cross_fit_u"]
    assert score.is_monotonic_increasing and found.pairs["rank"].tolist() == list(range(1, len(pairs) + 1))
    # Suspects are the first ranks, on one side of the cut and of the threshold.
    assert found.pairs["p_wrong"].is_monotonic_decreasing
    suspect = found.pairs["suggested"] == "swap"
    assert (suspect == (found.pairs["p_wrong"] > 0.5)).all() and (suspect == (score < found.cut)).all()
    assert 0 < found.suspected < len(pairs)
    assert found.pairs["p_wrong"].mean() == pytest.approx(found.rate.rate, abs=0.01)
    methods = found.methods["method"].tolist()
    assert methods[0] == ("weight" if scorer == "vnet" else "cross-fitted u") and {"loss", "u"} < set(methods)
    assert found.methods["precision"].gt(0.6).sum() >= 4
    stricter = find_with(pairs, scorer, threshold=0.8)
    assert 0 < stricter.suspected < found.suspected


def test_nothing_is_suspect_where_the_share_is_not_identified():
    found = find_with(frame(rate=0.0), "vnet")
    assert not found.rate.identified and found.suspected == 0 and found.cut is None
    assert found.pairs["p_wrong"].isna().all() and found.pairs["u"].is_monotonic_increasing
