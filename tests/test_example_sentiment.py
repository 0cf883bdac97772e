"""examples/sentiment.py: a lexicon's reward, and pairs with labels drawn from it that a run reads."""

import math
import subprocess
from collections import Counter
from types import SimpleNamespace

import pytest

from examples.sentiment import LexiconReward, sentiment
from pacmr_lightning import cli
from pacmr_lightning.command_line.parser import run_tool
from pacmr_lightning.errors import UserError

from .conftest import read_lines, write_lines


@pytest.fixture
def folder(inside):
    """Responses of two models to 2,000 prompts, the prompts' categories, and the lexicon good = 1."""
    (inside / "lexicon.txt").write_text("good\t1\n")
    categories = [{"prompt": f"prompt {i}", "category": str(i % 3)} for i in reversed(range(2500))]
    write_lines(inside / "reviews.jsonl", categories)
    for name, responses in (("1", [" good"]), ("2", [" plain", " good", " ", " bare"])):
        texts = (responses[i % len(responses)] for i in range(2000))
        rows = [{"id": f"p{i}", "prompt": f"prompt {i}", "response": text} for i, text in enumerate(texts)]
        write_lines(inside / f"responses-{name}.jsonl", rows)
    return inside


def label(*options, output="."):
    words = [f"--output={output}", "--reviews=reviews.jsonl", "--lexicon=lexicon.txt", *options]
    run_tool("sentiment", sentiment, words)
    return read_lines(f"{output}/pairs.jsonl")


def test_labels_are_bradley_terry_draws(folder, capsys):
    rows = label()
    assert len(rows) == 1000  # equal and empty responses are left out
    p = 1 / (1 + math.exp(-1))
    for row in rows:
        assert row["eta"] == pytest.approx(p if row["chosen"] == " good" else 1 - p)
        assert row["category"] == str(int(row["prompt"].split()[1]) % 3)
    right = Counter(row["chosen"] for row in rows)[" good"]
    assert abs(right - 1000 * p) < 4 * math.sqrt(1000 * p * (1 - p))
    said = capsys.readouterr().out
    assert f"{1 - right / 1000:.1%} of the labels against it" in said
    assert "1,000 pairs with equal or empty responses were dropped" in said
    assert label() == rows != label("--seed=1")
    (folder / "responses-2.jsonl").write_bytes((folder / "responses-1.jsonl").read_bytes())
    with pytest.raises(UserError, match="have no prompt with two different responses"):
        label()


def test_the_model_responds(folder, tiny_llama, monkeypatch):
    """With the command line of each ``pacmr predict``, here in this process."""

    def run(command, check):
        assert command[1:3] == ["-m", "pacmr_lightning"]
        cli.main([*command[3:], "--model.max_new_tokens", "3", "--trainer.accelerator", "cpu"])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    tiny_llama("model")
    rows = label("--model=model", "--prompts=6", output="out")
    files = [read_lines(f"out/responses-{number}.jsonl") for number in (1, 2)]
    assert [row["prompt"] for row in files[0]] == [row["prompt"] for row in files[1]] and len(files[0]) == 6
    assert [row["response"] for row in files[0]] != [row["response"] for row in files[1]]
    assert {row["prompt"] for row in rows} <= {row["prompt"] for row in files[0]}
    monkeypatch.setattr(subprocess, "run", lambda *_, **options: SimpleNamespace(returncode=3))
    with pytest.raises(UserError, match="pacmr predict ended with status 3; see above"):
        label(output="failed")


def test_words_count_once(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("good\t2.5\t0.1\nbad\t-1.5\ncan't stand\t-3\nWon't\t-0.5\n\n")
    reward = LexiconReward(str(file))
    assert reward("good", " Good, good GOOD! it won’t be-bad_1") == 2.5 - 1.5 - 0.5
    assert reward("good", "goods; ungood") == 0
    assert reward("good", "") == 0
    file.write_text("good\t1\nbad 1\n")
    with pytest.raises(UserError, match="line 2: 'bad 1' is no word with its valence; put a tab between"):
        LexiconReward(str(file))
    with pytest.raises(UserError, match="nowhere, which is no file; name one, or vader or afinn"):
        LexiconReward("nowhere")


@pytest.mark.parametrize(("lexicon", "good", "bad"), [("vader", 3.1, -2.5), ("afinn", 3, -3)])
def test_packages(lexicon, good, bad, monkeypatch):
    reward = LexiconReward(lexicon)
    assert (reward("", "great"), reward("", "a bad film")) == (good, bad)
    monkeypatch.setattr("examples.sentiment.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r'which is missing; install "pacmr-lightning\[examples\]"'):
        LexiconReward(lexicon)
