"""Pairs with labels drawn from a reward, from files of responses to data that a run reads."""

import json
import math
from collections import Counter

import numpy as np
import pytest

from pacmr_lightning import cli
from pacmr_lightning.datamodules import CategoryNoise, Files, SymmetricNoise
from pacmr_lightning.datamodules.hashing import unit_hash


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Responses of two models to 2,000 prompts, and the lexicon good = 1."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lexicon.txt").write_text("good\t1\n")

    def write(name, response, prompts=2000):
        rows = [{"id": f"p{i}", "prompt": f"prompt {i}", "response": response(i)} for i in range(prompts)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("a.jsonl", lambda i: " good")
    write("b.jsonl", lambda i: (" plain", " good", " ", " bare")[i % 4])
    return write


def label(*options, files=("a.jsonl", "b.jsonl")):
    cli.main(["label", *files, "--reward=LexiconReward", "--reward.lexicon=lexicon.txt", *options])


def test_labels_are_bradley_terry_draws(files, tmp_path, capsys):
    label("--output=pairs.jsonl", "--temperature=0.5")
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) == 1000  # equal and empty responses are left out
    p = 1 / (1 + math.exp(-2))
    for row in rows:
        assert row["eta"] == pytest.approx(p if row["chosen"] == " good" else 1 - p)
    right = Counter(row["chosen"] for row in rows)[" good"]
    assert abs(right - 1000 * p) < 4 * math.sqrt(1000 * p * (1 - p))
    said = capsys.readouterr().out
    assert f"{1 - right / 1000:.1%} of the labels against it" in said
    assert "1,000 pairs with equal or empty responses are left out" in said
    assert len(Files("pairs.jsonl").load_all()) == 1000
    first = (tmp_path / "pairs.jsonl").read_bytes()
    label("--output=pairs.jsonl", "--temperature=0.5")
    assert (tmp_path / "pairs.jsonl").read_bytes() == first
    label("--output=pairs.jsonl", "--temperature=0.5", "--seed=1")
    assert (tmp_path / "pairs.jsonl").read_bytes() != first


def test_draws_of_one_seed_are_independent(files, tmp_path):
    """Of prompts that were drawn with the labels' seed, whose labels are flipped with that seed."""
    ids = sorted((f"p{i}" for i in range(20000)), key=lambda name: unit_hash(name, 42))[:2000]
    for name, text in (("a.jsonl", " good"), ("b.jsonl", " plain")):
        rows = [{"id": one, "prompt": f"prompt {one}", "response": text} for one in ids]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    label("--output=pairs.jsonl", "--seed=42")
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    right = np.array([row["chosen"] == " good" for row in rows])
    flips = SymmetricNoise(0.3).flips(Files("pairs.jsonl").load_all(), 42)
    flipped = np.array([flips[row["id"]] for row in rows])
    p = 1 / (1 + math.exp(-1))
    assert right.mean() == pytest.approx(p, abs=0.04) and flipped.mean() == pytest.approx(0.3, abs=0.04)
    assert right[flipped].mean() == pytest.approx(p, abs=0.06)


def test_labels_do_not_depend_on_the_files_order(files, tmp_path):
    """The probability belongs to the pair, and far rewards do not overflow."""
    label("--output=pairs.jsonl", "--temperature=1e-3")
    label("--output=turned.jsonl", "--temperature=1e-3", files=("b.jsonl", "a.jsonl"))
    for name in ("pairs.jsonl", "turned.jsonl"):
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert {(row["chosen"], row["eta"]) for row in rows} == {(" good", 1.0)}


def test_chat_prompts(files, tmp_path):
    chat = [{"role": "user", "content": "say something"}]
    for name, text in (("a.jsonl", "good"), ("b.jsonl", "plain")):
        (tmp_path / name).write_text(json.dumps({"id": "c", "prompt": chat, "response": text}) + "\n")
    label("--output=pairs.jsonl", "--temperature=0.01")
    (row,) = map(json.loads, (tmp_path / "pairs.jsonl").read_text().splitlines())
    assert row["prompt"] == chat and row["chosen"] == [{"role": "assistant", "content": "good"}]
    assert Files("pairs.jsonl").load_all()[0]["chat"]


def test_tools_stay_with_the_prompt(files, tmp_path):
    """The columns of a row of responses that a chat template reads, and messages that call tools."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    chat = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "x", "tool_call_id": "1"}]
    more = {"tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": False}}
    for name, text in (("a.jsonl", "good"), ("b.jsonl", "plain")):
        row = {"id": "c", "prompt": chat, "response": text, **more}
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    label("--output=pairs.jsonl", "--temperature=0.01")
    (row,) = map(json.loads, (tmp_path / "pairs.jsonl").read_text().splitlines())
    assert row["prompt"] == chat and {name: row[name] for name in more} == more
    [found] = Files("pairs.jsonl").load_all()
    assert json.loads(found["tools"]) == more["tools"] and json.loads(found["prompt"]) == chat


def test_categories_are_those_of_the_prompts(files, tmp_path):
    rows = [{"prompt": f"prompt {i}", "category": i % 3, "more": "not read"} for i in reversed(range(2500))]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    label("--output=pairs.jsonl", "--categories=prompts.jsonl")
    found = Files("pairs.jsonl").load_all()
    assert len(found) == 1000
    for name, category in zip(found["prompt"], found["category"], strict=True):
        assert category == str(int(name.split()[1]) % 3)
    flips = CategoryNoise({"1": 0.4}).flips(found, 42)
    flipped = [one for name, one in zip(found["id"], found["category"], strict=True) if flips[name]]
    assert set(flipped) == {"1"} and len(flipped) == pytest.approx(0.4 * 1000 / 3, abs=30)


def test_a_prompt_without_category(files, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "prompt 1", "category": "one"}) + "\n")
    with pytest.raises(SystemExit) as stop:
        label("--output=pairs.jsonl", "--categories=prompts.jsonl")
    assert stop.value.code == 2 and not (tmp_path / "pairs.jsonl").exists()
    said = " ".join(capsys.readouterr().err.split())
    assert "prompts.jsonl has no category for 1000 of 1000 pairs, such as one with the prompt 'prompt 0'" in (
        said
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"prompt": "prompt 1", "category": "easy"}, {"prompt": "prompt 1", "category": "hard"}],
            "prompts.jsonl, line 2: the prompt 'prompt 1' has the category 'hard', but 'easy' before",
        ),
        (
            [{"prompt": "prompt 1", "category": ["a", "b"]}],
            "prompts.jsonl, line 1: 'category' is ['a', 'b'], but it must be a text",
        ),
        ([{"prompt": 7, "category": "easy"}], "prompts.jsonl, line 1: 'prompt' is 7, but it must be a text"),
    ],
)
def test_categories_that_cannot_be_used(rows, message, files, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as stop:
        label("--output=pairs.jsonl", "--categories=prompts.jsonl")
    assert stop.value.code == 2 and not (tmp_path / "pairs.jsonl").exists()
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature=0"], "temperature is 0.0, but it must be a number above 0"),
        (["--output=pairs.csv"], "must be a file ending in .jsonl"),
        (["--reward.lexicon=nowhere"], "nowhere, which is no file"),
        (["--categories=nowhere.jsonl"], "There is no file nowhere.jsonl; check the path"),
    ],
)
def test_bad_options(files, options, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        label("--output=pairs.jsonl", *options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("pairs*"))


def test_nothing_to_label(files, capsys):
    files("b.jsonl", lambda i: " good")
    with pytest.raises(SystemExit):
        label("--output=pairs.jsonl")
    assert "no two different responses" in capsys.readouterr().err
