"""Pairs with labels drawn from a reward, from files of responses to data that a run reads."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pacmr_lightning import cli
from pacmr_lightning.datamodules import CategoryNoise, Files, SymmetricNoise
from pacmr_lightning.datamodules.hashing import unit_hash

from ...conftest import fails, read_lines
from ...conftest import write_lines as write


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Responses of two models to 2,000 prompts, and the lexicon good = 1."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lexicon.txt").write_text("good\t1\n")

    for name, responses in (("a.jsonl", [" good"]), ("b.jsonl", [" plain", " good", " ", " bare"])):
        texts = (responses[i % len(responses)] for i in range(2000))
        rows = [{"id": f"p{i}", "prompt": f"prompt {i}", "response": text} for i, text in enumerate(texts)]
        write(tmp_path / name, rows)


def label(*options, files=("a.jsonl", "b.jsonl"), output="pairs.jsonl"):
    cli.main(words_of(*options, files=files, output=output))
    return read_lines(output)


def words_of(*options, files=("a.jsonl", "b.jsonl"), output="pairs.jsonl"):
    reward = ["--reward=LexiconReward", "--reward.lexicon=lexicon.txt"]
    return ["label", *files, *reward, f"--output={output}", *options]


def test_labels_are_bradley_terry_draws(files, tmp_path, capsys):
    rows = label("--temperature=0.5")
    assert len(rows) == 1000  # equal and empty responses are left out
    p = 1 / (1 + math.exp(-2))
    for row in rows:
        assert row["eta"] == pytest.approx(p if row["chosen"] == " good" else 1 - p)
    right = Counter(row["chosen"] for row in rows)[" good"]
    assert abs(right - 1000 * p) < 4 * math.sqrt(1000 * p * (1 - p))
    said = capsys.readouterr().out
    assert f"{1 - right / 1000:.1%} of the labels against it" in said
    assert "1,000 pairs with equal or empty responses were dropped" in said
    assert len(Files("pairs.jsonl").load_all()) == 1000
    assert label("--temperature=0.5") == rows != label("--temperature=0.5", "--seed=1")


def test_draws_of_one_seed_are_independent(files, tmp_path):
    """Of prompts that were drawn with the labels' seed, whose labels are flipped with that seed."""
    ids = sorted((f"p{i}" for i in range(20000)), key=lambda name: unit_hash(name, 42))[:2000]
    for name, text in (("a.jsonl", " good"), ("b.jsonl", " plain")):
        rows = [{"id": one, "prompt": f"prompt {one}", "response": text} for one in ids]
        write(tmp_path / name, rows)
    rows = label("--seed=42")
    right = np.array([row["chosen"] == " good" for row in rows])
    flips = SymmetricNoise(0.3).flips(Files("pairs.jsonl").load_all(), 42)
    flipped = np.array([flips[row["id"]] for row in rows])
    p = 1 / (1 + math.exp(-1))
    assert right.mean() == pytest.approx(p, abs=0.04) and flipped.mean() == pytest.approx(0.3, abs=0.04)
    assert right[flipped].mean() == pytest.approx(p, abs=0.06)


def test_labels_do_not_depend_on_the_files_order(files, tmp_path):
    for names in (("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl")):
        rows = label("--temperature=1e-3", files=names)
        assert {(row["chosen"], row["eta"]) for row in rows} == {(" good", 1.0)}


def test_chat_prompts_and_their_tools(files, tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    chat = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "x", "tool_call_id": "1"}]
    more = {"tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": False}}
    for name, text in (("a.jsonl", "good"), ("b.jsonl", "plain")):
        write(tmp_path / name, [{"id": "c", "prompt": chat, "response": text, **more}])
    [row] = label("--temperature=0.01")
    assert row["prompt"] == chat and row["chosen"] == [{"role": "assistant", "content": "good"}]
    assert {name: row[name] for name in more} == more
    [found] = Files("pairs.jsonl").load_all()
    assert found["chat"] and json.loads(found["prompt"]) == chat
    assert json.loads(found["tools"]) == more["tools"]


def test_categories_are_those_of_the_prompts(files, tmp_path):
    rows = [{"prompt": f"prompt {i}", "category": i % 3, "more": "not read"} for i in reversed(range(2500))]
    write(tmp_path / "prompts.jsonl", rows)
    label("--categories=prompts.jsonl")
    found = Files("pairs.jsonl").load_all()
    assert len(found) == 1000
    for name, category in zip(found["prompt"], found["category"], strict=True):
        assert category == str(int(name.split()[1]) % 3)
    flips = CategoryNoise({"1": 0.4}).flips(found, 42)
    flipped = [one for name, one in zip(found["id"], found["category"], strict=True) if flips[name]]
    assert set(flipped) == {"1"} and len(flipped) == pytest.approx(0.4 * 1000 / 3, abs=30)


def refused(capsys, *options, **names):
    said = fails(capsys, words_of(*options, **names))
    assert not list(Path().glob("pairs*"))
    return said


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"one": 1}, " has no category for 1000 of 1000 pairs, such as one with the prompt 'prompt 0'"),
        (
            {"easy": 1, "hard": 1},
            ", line 2: the prompt 'prompt 1' has the category 'hard', but 'easy'",
        ),
        ({("a", "b"): 1}, ", line 1: 'category' is ['a', 'b'], but it must be a text"),
        ({"easy": None}, ", line 1: 'prompt' is 7, but it must be a text"),
    ],
)
def test_categories_that_cannot_be_used(rows, message, files, tmp_path, capsys):
    prompts = ({"prompt": f"prompt {i}" if i else 7, "category": name} for name, i in rows.items())
    write(tmp_path / "prompts.jsonl", prompts)
    assert f"prompts.jsonl{message}" in refused(capsys, "--categories=prompts.jsonl")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--temperature=0", "temperature is 0.0, but it must be above 0"),
        ("--output=pairs.csv", "must be a file ending in .jsonl"),
        ("--reward.lexicon=nowhere", "nowhere, which is no file"),
        ("--categories=nowhere.jsonl", "There is no file nowhere.jsonl; check the path"),
    ],
)
def test_bad_options(files, option, message, capsys):
    assert message in refused(capsys, option)


def test_nothing_to_label(files, capsys):
    assert "no prompt with two different responses" in refused(capsys, files=("a.jsonl", "a.jsonl"))
