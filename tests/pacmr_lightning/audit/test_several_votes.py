"""Several votes on a pair, ties, and annotators: their counts, p of them, and how reliable they are."""

import numpy as np
import pandas as pd
import pytest

from pacmr_lightning import cli

from ...conftest import read_lines, write_lines
from .test_audit_model import by_one_word


def audited(finished, folder, rows, *words):
    path = write_lines(folder / "pairs.jsonl", rows)
    model = str(finished.parent / "model")
    cli.main(["audit", model, "--data", str(path), "--output", str(folder / "found"), *words])
    return pd.read_parquet(folder / "found" / "pairs.parquet").set_index("id")


def test_counts_and_ties(finished, tmp_path):
    rows = [by_one_word(i, wrong=i % 4 == 0) for i in range(240)]
    for i, row in enumerate(rows):
        if i % 4 in (0, 1):
            row |= {"votes_for": "1" if i % 4 == 0 else 3, "votes_against": 4 if i % 4 == 0 else 0}
        if i % 8 == 2:  # half of them a golden response that was rejected: the most doubtful ones
            row |= {"label": "tie"} | (by_one_word(i, True) if i % 16 == 2 else {})
    table = audited(finished, tmp_path, rows, "--cleaned", str(tmp_path / "clean.jsonl"), "--action", "swap")
    single, ties = table.index.map(lambda i: int(i) % 4 == 3), table.index.map(lambda i: int(i) % 8 == 2)
    assert (table.loc[single, ["votes_for", "votes_against"]] == [1, 0]).all(axis=None)
    assert (table.loc[ties, ["votes_for", "votes_against"]] == 0.5).all(axis=None)
    wrong = table.index.map(lambda i: int(i) % 4 == 0)
    assert (table.loc[wrong, ["votes_for", "votes_against"]] == [1, 4]).all(axis=None)
    assert (table["suggested"] == "swap").tolist() == wrong.tolist() and table.loc[ties, "p"].min() < 0.5
    [changed] = [row for row in read_lines(tmp_path / "clean.jsonl") if row["id"] == "4"]
    assert changed["chosen"] == rows[4]["rejected"]
    assert (changed["votes_for"], changed["votes_against"]) == (4, "1")
    page = (tmp_path / "found" / "report.html").read_text()
    assert "120 of 240 labels are of pairs with several votes, which p uses" in page
    assert "30 labels are ties: half a vote for each response, and never suspected" in page


def test_the_same_pair_once_per_annotator(finished, tmp_path):
    """Three annotators judge each pair, the third in the other order and often wrongly."""
    rng = np.random.default_rng(0)
    rows, right = [], {}
    for i in range(200):
        for name, errs in (("ann", 0.05), ("bob", 0.1), ("eve", 0.4)):
            wrong = bool(rng.random() < errs)
            row = by_one_word(i, wrong) | {"id": f"{i}-{name}", "annotator": name}
            rows.append(row)
            right[row["id"]] = not wrong
    rows.append(rows[0] | {"id": "again"})  # the same annotator once more, so the same vote
    table = audited(finished, tmp_path, rows)
    for i in range(200):
        votes = [right[f"{i}-{name}"] for name in ("ann", "bob", "eve")]
        for name, own in zip(("ann", "bob", "eve"), votes, strict=True):
            found = table.loc[f"{i}-{name}"]
            assert (found["votes_for"], found["votes_against"]) == (votes.count(own), votes.count(not own))
    assert table.at["again", "p"] == table.at["0-ann", "p"]
    groups = pd.read_csv(tmp_path / "found" / "groups.csv").set_index("group")
    by_name = pd.Series(right).groupby(lambda name: name.partition("-")[2]).mean()
    for name, share in by_name.items():
        assert groups.at[name, "reliability"] == pytest.approx(share, abs=0.04)
    page = (tmp_path / "found" / "report.html").read_text()
    assert "Dawid and Skene" in page and "<th>reliability</th>" in page
