"""The table of judges-and-decisions.md is that of its kept numbers."""

import re

import pytest

from .test_numbers import kept_runs, notebook, table

KINDS = {"one judge, errors 10%": "errors 10%", "one judge, errors 20%": "errors 20%"}
KINDS |= {"one judge, errors 30%": "errors 30%", "three judges, errors 20%": "three, errors 20%"}


def cell_of(name):
    """Kind, judges, choice and number of a row."""
    if name in ("no votes", "no decisions"):
        return "alone", None, None, 0
    number = int(re.search(r"([\d,]+) (pairs|decisions|random)", name)[1].replace(",", ""))
    if "decisions" in name:
        use = "sample" if "as a sample" in name else "anchors"
        return "decisions", use, next(c for c in ("random", "suspicious", "uncertain") if c in name), number
    judges = name.rpartition(", ")[0]
    return "judges", KINDS.get(judges, judges), "default", number


@pytest.mark.parametrize(("evidence", "count", "seeds"), [("judges", 12, 3), ("decisions", 9, 10)])
def test_judges_and_decisions(evidence, count, seeds):
    first = (
        f"| {evidence} besides u | average precision at 20, 30, 40% | estimated noise rate "
        "| intervals that hold the truth |"
    )
    rows = table(notebook("judges-and-decisions"), f"{first}\n")
    assert len(rows) == count
    numbers = kept_runs("judged-audit").fillna({"judges": "", "choice": ""})
    for name, (precision, rate, held) in rows.items():
        kind, judges, choice, number = cell_of(name)
        found = numbers[(numbers["kind"] == kind) & (numbers["number"] == number)]
        found = found[(found["judges"] == (judges or "")) & (found["choice"] == (choice or ""))]
        found = found[found["seed"] < seeds]
        assert sorted(zip(found["noise"], found["seed"], strict=True)) == [
            (noise, seed) for noise in (0.2, 0.3, 0.4) for seed in range(seeds)
        ], name
        means = found.groupby("noise")[["ap_gold", "rate"]].mean()
        assert means["ap_gold"].tolist() == pytest.approx(list(map(float, precision.split(", "))), abs=6e-4)
        known = found.groupby("noise")["identified"].all().tolist()
        for value, mean, identified in zip(rate.split(", "), means["rate"], known, strict=True):
            assert (value == "–") != identified
            assert not identified or float(value[:-1]) == pytest.approx(100 * mean, abs=0.06), name
        inside = found["identified"] & found["true_gold"].between(found["low"], found["high"])
        assert held == f"{inside.sum()} of {3 * seeds}", name


def test_second_passes():
    rows = table(notebook("judges-and-decisions"), "| evidence besides u | gold reward |\n")
    numbers = kept_runs("judged-second").fillna({"evidence": ""}).sort_values("seed")
    assert len(rows) == 4
    for name, (cells,) in rows.items():
        number = int(m[1].replace(",", "")) if (m := re.search(r"([\d,]+) (pairs|random)", name)) else 0
        evidence = (
            "decisions" if "decisions" in name else name.rpartition(", ")[0].removeprefix("one judge, ")
        )
        found = numbers[(numbers["evidence"] == evidence) & (numbers["number"] == number)]
        columns = zip(found["gold_reward"], found["sequence_kl"], found["gold_accuracy"], strict=True)
        assert cells == ", ".join(f"{reward:.2f} ({kl:.2f}; {right:.2f})" for reward, kl, right in columns)
