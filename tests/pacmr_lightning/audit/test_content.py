"""Decisions and audits belong to the texts of pairs, whatever their ids and the names of files."""

import html
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from pacmr_lightning import cli
from pacmr_lightning.commands.refine import refine

from ...conftest import read_lines, write_lines
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


def test_refine_follows_the_decisions_and_not_their_file(first, capsys):
    file = first.with_name("decisions.jsonl")
    names = pd.read_parquet(first / "noise_mask.parquet")["id"][:10].tolist()
    decide = lambda word, path: write_lines(path, [{"id": name, "decision": word} for name in names])  # noqa: E731
    options = ["--scorer", "policy", "--noise_rate", "0.3"]
    decide("swap", file)
    cli.main(["audit", str(first), *options, "--decisions", str(file)])
    moved = Path(decide("swap", file.with_name("moved.jsonl")))
    capsys.readouterr()
    again = refine(
        str(first), str(first.with_name("a")), decisions=str(moved), scorer="policy", noise_rate=0.3
    )
    assert "is reused" in capsys.readouterr().err, "another file, but the same decisions"
    used = pd.read_parquet(again / "audit" / "pairs.parquet").set_index("id")["decision"]
    assert set(used[names]) == {"swap"}
    decide("keep", file)
    again = refine(
        str(first), str(first.with_name("b")), decisions=str(file), scorer="policy", noise_rate=0.3
    )
    assert "is reused" not in capsys.readouterr().err
    used = pd.read_parquet(again / "audit" / "pairs.parquet").set_index("id")["decision"]
    assert set(used[names]) == {"keep"}


def test_a_second_pass_on_changed_texts(finished, tmp_path, capsys):
    """An audit of a file does not fit what the file has become."""
    data = write_lines(tmp_path / "pairs.jsonl", rows_of(1, 64))
    run = fit(finished, tmp_path / "run", "--data.source.train", str(data), "--trainer.max_epochs", "1")
    cli.main(["audit", str(run), "--noise_rate", "0.3", "--scorer", "policy"])
    rows = read_lines(data)
    rows[5]["chosen"] += " and deep"
    write_lines(data, rows)
    table = [
        "--model.weighting",
        "AuditedWeights",
        "--model.weighting.audit",
        str(run / "audit/pairs.parquet"),
    ]
    with pytest.raises(SystemExit):
        fit(finished, tmp_path / "again", "--data.source.train", str(data), *table)
    assert "saw 1 of 64 training pairs with other texts (5 for one); audit a run" in capsys.readouterr().err
    assert not (tmp_path / "again" / "summary.json").exists()


def test_annotators_with_numbers_for_names(finished, tmp_path):
    """YAML reads the name 7 as a number, as JSON Lines do; both are the text."""
    rows = [row | {"annotator": 7 if i % 2 else 8.0} for i, row in enumerate(rows_of(1, 64))]
    data = write_lines(tmp_path / "pairs.jsonl", rows)
    options = ["--data.noise_rate", "0", "--data.noise", "AnnotatorNoise", "--trainer.max_epochs", "1"]
    options += ["--data.noise.reliabilities", "{7: 1.0, 8: 0.0}", "--data.source.train", str(data)]
    mask = pd.read_parquet(fit(finished, tmp_path / "run", *options) / "noise_mask.parquet").set_index("id")
    odd = mask.index.astype(int) % 2 == 1
    assert not mask["flipped"][odd].any() and mask["flipped"][~odd].all()
