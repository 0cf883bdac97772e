"""What rows say of their labels: votes, ties and annotators; and decisions, which belong to their texts."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pacmr_lightning import cli
from pacmr_lightning.audit.agreement import Votes, agreement

from ...conftest import read_lines, write_lines
from .conftest import fit, pairs_on, refused
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
            row |= {"votes_for": "1" if i % 4 == 0 else 3, "votes_against": 4 if i % 4 == 0 else 3 * (i == 5)}
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
    assert "31 labels are ties (label &quot;tie&quot;, or as many votes for each), never suspected" in page


def test_ties_hide_no_shortcut(finished, tmp_path):
    rows = [by_one_word(i, i % 4 == 1) | ({"label": "tie"} if i % 2 else {}) for i in range(120)]
    audited(finished, tmp_path, rows)
    assert set(pd.read_csv(tmp_path / "found/shortcuts.csv")["trait"]) >= {"golden"}


def test_the_same_pair_once_per_annotator(finished, tmp_path):
    """Three annotators judge a pair, the third often wrongly; a decision holds for nobody's copies, too."""
    rng = np.random.default_rng(0)
    rows, right = [], {}
    for i in range(200):
        for name, errs in (("ann", 0.05), ("bob", 0.1), ("eve", 0.4)):
            wrong = bool(rng.random() < errs)
            row = by_one_word(i, wrong) | {"id": f"{i}-{name}", "annotator": name}
            rows.append(row)
            right[row["id"]] = not wrong
    k = next(i for i in range(1, 200) if right[f"{i}-ann"] and right[f"{i}-bob"] and not right[f"{i}-eve"])
    for name, place in (("bare", 3 * k), ("turned", 3 * k + 2)):
        rows.append(rows[place] | {"id": name, "annotator": None})
    rows.append(rows[0] | {"id": "again"})  # the same annotator once more, so the same vote
    decided = write_lines(tmp_path / "decided.jsonl", [{"id": "bare", "decision": "keep"}])
    table = audited(finished, tmp_path, rows, "--decisions", str(decided))
    kept = dict.fromkeys(("bare", f"{k}-ann", f"{k}-bob"), "keep")
    assert table["decision"].dropna().to_dict() == kept | {f"{k}-eve": "swap", "turned": "swap"}
    assert (table.loc[["bare", "turned"], ["votes_for", "votes_against"]] == [1, 0]).all(axis=None)
    for i in range(200):
        votes = [right[f"{i}-{name}"] for name in ("ann", "bob", "eve")]
        for name, own in zip(("ann", "bob", "eve"), votes, strict=True):
            found = table.loc[f"{i}-{name}"]
            assert (found["votes_for"], found["votes_against"]) == (votes.count(own), votes.count(not own))
    assert table.at["again", "p"] == table.at["0-ann", "p"]
    one = table.loc[[*(f"{i}-ann" for i in range(200)), "bare", "turned"]]  # the same votes as counts
    u, *votes = one[["probe_u", "votes_for", "votes_against"]].to_numpy().T
    counts = agreement(u, np.array([*range(200), k, k]), Votes(*votes, np.zeros((202, 0))), resamples=0)
    assert np.abs(one["p"] - counts.p)[one["decision"].isna()].max() < 1e-5
    groups = pd.read_csv(tmp_path / "found" / "groups.csv").set_index("group")
    of_eve = table[table["annotator"] == "eve"]
    assert groups.at["eve", "suspected"] == of_eve["suggested"].eq("swap").sum() - 1
    assert groups.at["eve", "contradicted"] == pytest.approx(1 - of_eve["p"].mean())
    by_name = pd.Series(right).groupby(lambda name: name.partition("-")[2]).mean()
    for name, share in by_name.items():
        assert groups.at[name, "reliability"] == pytest.approx(share, abs=0.04)
    page = (tmp_path / "found" / "report.html").read_text()
    assert "Dawid and Skene" in page and "<th>reliability</th>" in page


def rows_of(seed, count=60):
    """Numbered rows, a third of them without a category and an annotator."""
    rows = []
    for i in range(count):
        words = [f"{word} {(i * 7 + seed) % 13}" for word in ("calm", "wild")]
        row = {"id": str(i), "prompt": f"Describe the sea {i * seed % 9}:"}
        row |= {"chosen": f" {words[i % 2]}", "rejected": f" {words[1 - i % 2]} {seed}"}
        rows.append(row | ({"category": "xy"[i % 2], "annotator": i % 4} if i % 3 else {}))
    return rows


def test_decisions_on_other_texts(finished, inside, capsys):
    """Two data sets with the same ids: the page keeps their decisions apart, and --decisions refuses them."""
    model = str(finished.parent / "model")

    def audit(seed, output, *options):
        data = ["--data", f"{seed}.jsonl", "--output", output, "--noise_rate", "0.2"]
        return ["audit", model, *data, *options]

    for seed in (1, 2):
        write_lines(inside / f"{seed}.jsonl", rows_of(seed))
        cli.main(audit(seed, f"audit{seed}", "--sample", "5"))
    pages = [Path(f"audit{seed}/report.html").read_text() for seed in (1, 2)]
    first, second = (re.search('data-labels="(.*?)"', page)[1] for page in pages)
    assert first != second
    groups = pd.read_csv("audit1/groups.csv").dropna(subset="group")
    assert groups.groupby("grouping")["pairs"].sum().to_dict() == {"annotator": 40, "category": 40}

    listed = pairs_on(pages[0])[:8]
    decided = write_lines(inside / "decided.jsonl", [pair | {"decision": "unsure"} for pair in listed])
    capsys.readouterr()
    said = refused(capsys, *audit(2, "other", "--decisions", str(decided), "--cleaned", "cleaned.jsonl"))
    assert "but that pair has other texts here" in said and not Path("cleaned.jsonl").exists()
    cli.main(audit(1, "same", "--decisions", str(decided)))
    assert "name no hash" not in capsys.readouterr().err
    by_hand = [{"id": pair["id"], "decision": "unsure"} for pair in listed]
    cli.main(audit(2, "by hand", "--decisions", str(write_lines(inside / "hand.jsonl", by_hand))))
    said = " ".join(capsys.readouterr().err.split())
    assert "8 of 8 decisions name no hash of their texts" in said


def test_annotators_with_numbers_for_names(finished, tmp_path):
    """YAML reads the name 7 as a number, as JSON Lines do; both are the text."""
    rows = [row | {"annotator": 7 if i % 2 else 8.0} for i, row in enumerate(rows_of(1, 64))]
    data = write_lines(tmp_path / "pairs.jsonl", rows)
    options = ["--data.noise_rate", "0", "--data.noise", "AnnotatorNoise", "--trainer.max_epochs", "1"]
    options += ["--data.noise.reliabilities", "{7: 1.0, 8: 0.0}", "--data.source.train", str(data)]
    mask = pd.read_parquet(fit(finished, tmp_path / "run", *options) / "noise_mask.parquet").set_index("id")
    odd = mask.index.astype(int) % 2 == 1
    assert not mask["flipped"][odd].any() and mask["flipped"][~odd].all()
