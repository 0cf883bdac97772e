"""Files of decisions, and the share of a random sample."""

import re

import numpy as np
import pytest
from scipy.stats import binom

from pacmr_lightning.audit.manual_review import random_sample, read_decisions, sample_estimate
from pacmr_lightning.errors import UserError

from ...conftest import write_lines


def test_what_a_sample_says():
    """The interval's ends are the shares at which what was seen has a tail of 2.5% (Clopper and Pearson)."""
    said = sample_estimate(["swap"] * 30 + ["keep"] * 70 + ["unsure"] * 3)
    low, high = (float(number) / 100 for number in re.search(r"interval (.*?)% to (.*?)%", said).groups())
    assert binom.sf(29, 100, low) == pytest.approx(0.025, abs=1e-3)
    assert binom.cdf(30, 100, high) == pytest.approx(0.025, abs=1e-3)
    start = "Of 100 randomly sampled labels that were reviewed by hand, 30 are wrong: 30.0% (95%"
    assert said.startswith(start)
    assert said.endswith("; 0 dropped and 3 unsure pairs are excluded.")
    assert sample_estimate(["drop"]) == ""


def test_the_sample_is_random_and_goes_on():
    ids = [f"p{i}" for i in range(1000)]
    drawn = random_sample(ids, 200)
    assert random_sample(ids, 50) == drawn[:50] and len(set(drawn)) == 200
    places = np.array([int(name[1:]) for name in drawn])
    assert abs(places.mean() - 499.5) < 3 * 289 / 200**0.5, "from all over the data"
    assert not np.array_equal(places, np.sort(places))


A = '{"id": "a", "decision": "keep"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no decisions; make some on the report's page"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "line 1 has no id with a decision"),
        ('{"id": "a", "decision": "flip"}\n', "has the decision 'flip'; it is one of keep, swap, "),
        (f'{A}, "observed": "left"}}\n', "has the observed 'left'; it is one of chosen, rejected"),
        (f'{A}, "sample": "yes"}}\n', "has the sample 'yes'; it is one of True, False"),
        (
            f"{A}}}\n\n{A.replace('keep', 'drop')}}}\n",
            "line 3 has the decision 'drop' for the pair 'a', and an earlier line 'keep'; remove one of them",
        ),
    ],
)
def test_files_that_are_none(text, message, tmp_path):
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        read_decisions(str(tmp_path / "d.jsonl"))
    path = write_lines(tmp_path / "d.jsonl", [{"id": 7, "decision": "keep", "sample": None, "texts": None}])
    assert read_decisions(path).rows == {"7": {"decision": "keep", "sample": False}}
    with pytest.raises(UserError, match=r"There is no file .*; make decisions on the report.html"):
        read_decisions(str(tmp_path / "nowhere.jsonl"))


def test_decisions_on_other_pairs(tmp_path):
    rows = [{"id": name, "decision": "keep", "observed": "chosen"} for name in "abc"]
    rows[2]["texts"] = "C"
    decisions = read_decisions(write_lines(tmp_path / "d.jsonl", rows))
    for names, swapped, texts, said in (
        ("zba", "z", "ZBA", r"on 'c', which is no training pair here \(1 of 3 are not\)"),
        ("cab", "b", "CAB", r"on 'b', but that pair has other noise on its label here \(1 of 3 pairs\)"),
        ("cab", "", "XAB", r"on 'c', but that pair has other texts here \(1 of 3 pairs\)"),
    ):
        with pytest.raises(UserError, match=said):
            decisions.check(names, [name in swapped for name in names], texts)
    [note] = decisions.check("zcab", [True, False, False, False], "ZCAB")
    assert note.startswith("2 of 3 decisions name no hash of their texts, so")
