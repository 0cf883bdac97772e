"""The notebook's example of scores recorded wrongly: its program runs, and its table is what comes of it."""

import re
from pathlib import Path

import pandas as pd
import pytest

from pacmr_lightning import cli
from pacmr_lightning.datamodules import Files
from pacmr_lightning.embedded_world import World

from .conftest import read_lines

PAGE = (Path(__file__).parents[1] / "docs/data.md").read_text()
SECTION = (Path(__file__).parents[1] / "research/notebook/scores-recorded-wrongly.md").read_text()


@pytest.fixture
def rows(inside):
    (program,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    exec(compile(program, "scores.py", "exec"), {})
    return read_lines("scores.jsonl")


def table():
    """Numbers of a row: pairs, lowest and highest suspected share, wrong labels in percent."""
    lines = [line.split("|") for line in SECTION.splitlines() if "score" in line and line.startswith("| ")]
    return {
        cells[1].strip(): [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", "|".join(cells[2:]))]
        for cells in lines
    }


def test_the_wrong_labels(rows):
    reward = World().gold_reward
    wrong = [reward(row["prompt"], row["chosen"]) < reward(row["prompt"], row["rejected"]) for row in rows]
    tens = [row["category"] == "score 10" for row in rows]
    (pairs, _, share), (others, *_, of_others) = table().values()
    assert (pairs, others) == (sum(tens), len(rows) - sum(tens))
    assert sum(wrong) == sum(w for w, ten in zip(wrong, tens, strict=True) if ten)
    assert (share, of_others) == (round(100 * sum(wrong) / sum(tens)), 0)


@pytest.mark.slow
def test_the_audit(rows):
    for command in re.findall(r"^pacmr (.*?)(?: +#.*)?$", SECTION, re.MULTILINE):
        cli.main(command.split())
    found = pd.read_csv("audit/groups.csv").set_index("group").eval("100 * suspected / pairs")
    (_, tens, _), (_, low, high, _) = table().values()
    others = found.drop("score 10")
    assert abs(found["score 10"] - tens) < 3 and abs(others.min() - low) < 3 and abs(others.max() - high) < 3


def test_a_row_of_each_kind(tmp_path):
    section = PAGE.partition("**Votes, ties and weights**")[2].partition("| column |")[0]
    blocks = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    columns = ("votes_for votes_against annotator label", "p_right weight")
    for block, names in zip(blocks, columns, strict=True):
        (tmp_path / f"{names}.jsonl").write_text(block)
        found = Files(*[str(tmp_path / f"{names}.jsonl")] * 2).load("train").to_pandas().notna()
        assert found[names.split()].any().all()
        assert (found[["p_right", "weight"]].nunique() == 1).all(), "in every row or in none"
