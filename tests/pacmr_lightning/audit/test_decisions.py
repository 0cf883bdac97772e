"""Files of decisions, and the share of a random sample."""

import re
from math import comb

import numpy as np
import pandas as pd
import pytest

from pacmr_lightning.audit.decisions import (
    Decisions,
    SampleEstimate,
    random_sample,
    read_decisions,
)
from pacmr_lightning.errors import UserError

from ...conftest import write_lines as write


def row(name, decision, **other):
    return {"id": name, "decision": decision, **other}


def at_least(k, n, p):
    return sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))


def test_the_interval_is_clopper_and_pearsons():
    """Its ends are the shares at which what was seen has a tail of 2.5%."""
    share = SampleEstimate(wrong=15, right=35, dropped=2, unsure=1)
    assert share.read == 50
    assert at_least(15, 50, share.interval[0]) == pytest.approx(0.025, abs=1e-6)
    assert 1 - at_least(16, 50, share.interval[1]) == pytest.approx(0.025, abs=1e-6)
    clean = SampleEstimate(0, 50, 0, 0)
    assert clean.interval[0] == 0 and (1 - clean.interval[1]) ** 50 == pytest.approx(0.025)


def test_what_a_sample_says():
    said = SampleEstimate(30, 70, 0, 3).sentence()
    assert said == (
        "Of 100 randomly sampled labels that were reviewed by hand, 30 are wrong: 30.0% (95% interval 21.2% "
        "to 40.0%); 0 dropped and 3 unsure pairs are excluded."
    )
    assert SampleEstimate(0, 0, 1, 0).sentence() == ""


def test_p_follows_decisions():
    words = {"a": "keep", "b": "swap", "c": "drop", "d": "unsure"}
    table = pd.DataFrame({"id": list("dcbae"), "p": [0.1, 0.2, 0.3, 0.4, 0.5]})
    table["p_majority"] = table["p"] / 2
    found = Decisions("file", words, {}, set()).follow(table)
    assert found["p"].tolist() == [0.1, 0.2, 0.0, 1.0, 0.5]
    assert found["p_majority"].tolist() == [0.05, 0.1, 0.0, 1.0, 0.25]
    assert found["decision"].fillna("none").tolist() == ["unsure", "drop", "swap", "keep", "none"]


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
        ("id,decision\na,keep\n", "line 1 is not JSON (Expecting value at column 1)"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "line 1 has no id with a decision"),
        ('{"id": "a", "decision": "flip"}\n', "has the decision 'flip'; it is one of keep, swap, "),
        ('{"id": "a", "n": ' + "9" * 5000 + "}", "line 1 cannot be read (Exceeds the limit"),
        (
            f'{A}, "observed": "chosen"}}\n{A}, "observed": "rejected"}}\n',
            "line 2 has observed rejected for the pair 'a', and an earlier one chosen; give",
        ),
        (
            f"{A}}}\n\n{A.replace('keep', 'drop')}}}\n",
            "line 3 has drop for the pair 'a', and an earlier one keep; remove one of them",
        ),
        (f'{A}, "observed": "left"}}\n', "has observed 'left' and sample False"),
        (f'{A}, "sample": "yes"}}\n', "sample 'yes'; observed is chosen or"),
        ("[3]", "line 1"),
    ],
)
def test_files_that_are_none(text, message, tmp_path):
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        read_decisions(str(tmp_path / "d.jsonl"))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"There is no file .*; make decisions on the report.html"):
        read_decisions(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read_decisions(str(tmp_path / "d.jsonl"))


def test_pairs_that_the_run_does_not_have(tmp_path):
    path = write(tmp_path / "d.jsonl", [row("a", "keep", observed="chosen"), row("z", "keep")])
    decisions = read_decisions(path)
    with pytest.raises(
        UserError, match=r"a decision on 'z', which is no training pair here \(1 of 2 are not\)"
    ):
        decisions.check(["a", "b"], [False, False], ["ta", "tb"])
    with pytest.raises(UserError, match=r"a decision on 'a' with the other label .* the same label noise"):
        decisions.check(["a", "z"], [True, False], ["ta", "tz"])
    notes = decisions.check(["a", "z", "b"], [False, True, True], ["ta", "tz", "tb"])
    assert notes == ["2 of 2 decisions name no hash of their texts, so their pairs are found by id alone."]


def test_pairs_with_other_texts(tmp_path):
    rows = [row("a", "keep", texts="ta"), row("b", "swap", texts="tb")]
    decisions = read_decisions(write(tmp_path / "d.jsonl", rows))
    assert decisions.check(["a", "b"], [False, True], ["ta", "tb"]) == []
    with pytest.raises(UserError, match=r"on 'b', but that pair has other texts here \(1 of 2 pairs\); give"):
        decisions.check(["a", "b"], [False, True], ["ta", "other"])
    other = write(tmp_path / "other.jsonl", rows[::-1])
    assert read_decisions(other).content == decisions.content, "by what they say, not by the file"
    changed = write(tmp_path / "other.jsonl", [rows[0], rows[1] | {"decision": "drop"}])
    assert read_decisions(changed).content != decisions.content
    with pytest.raises(UserError, match="line 3 has other texts for the pair 'a' than an earlier decision"):
        read_decisions(write(tmp_path / "d.jsonl", [*rows, row("a", "keep", texts="tc")]))
