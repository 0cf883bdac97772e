"""Decisions belong to the texts of pairs, whatever their ids."""

import html
import json
import re
from pathlib import Path

import pandas as pd

from pacmr_lightning import cli

from ...conftest import write_lines
from .conftest import fit, refused


def rows_of(seed, count=60):
    """Numbered rows, a third of them without a category and an annotator."""
    rows = []
    for i in range(count):
        words = [f"{word} {(i * 7 + seed) % 13}" for word in ("calm", "wild")]
        row = {"id": str(i), "prompt": f"Describe the sea {i * seed % 9}:"}
        row |= {"chosen": f" {words[i % 2]}", "rejected": f" {words[1 - i % 2]} {seed}"}
        rows.append(row | ({"category": "xy"[i % 2], "annotator": i % 4} if i % 3 else {}))
    return rows


def test_decisions_on_other_texts(finished, tmp_path, monkeypatch, capsys):
    """Two data sets with the same ids: the page keeps their decisions apart, and --decisions refuses them."""
    monkeypatch.chdir(tmp_path)
    model = str(finished.parent / "model")

    def audit(seed, output, *options):
        data = ["--data", f"{seed}.jsonl", "--output", output, "--noise_rate", "0.2"]
        return ["audit", model, *data, *options]

    for seed in (1, 2):
        write_lines(tmp_path / f"{seed}.jsonl", rows_of(seed))
        cli.main(audit(seed, f"audit{seed}", "--sample", "5"))
    pages = [Path(f"audit{seed}/report.html").read_text() for seed in (1, 2)]
    first, second = (re.search('data-labels="(.*?)"', page)[1] for page in pages)
    assert first != second
    groups = pd.read_csv("audit1/groups.csv").dropna(subset="group")
    assert groups.groupby("grouping")["pairs"].sum().to_dict() == {"annotator": 40, "category": 40}

    listed = [json.loads(html.unescape(pair)) for pair in re.findall('data-pair="(.*?)"', pages[0])][:8]
    decided = write_lines(tmp_path / "decided.jsonl", [pair | {"decision": "unsure"} for pair in listed])
    capsys.readouterr()
    said = refused(capsys, *audit(2, "other", "--decisions", str(decided), "--cleaned", "cleaned.jsonl"))
    assert "but that pair has other texts here" in said and not Path("cleaned.jsonl").exists()
    cli.main(audit(1, "same", "--decisions", str(decided)))
    assert "name no hash" not in capsys.readouterr().err
    by_hand = [{"id": pair["id"], "decision": "unsure"} for pair in listed]
    cli.main(audit(2, "by hand", "--decisions", str(write_lines(tmp_path / "hand.jsonl", by_hand))))
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
