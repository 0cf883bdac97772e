"""examples/reward_model.py: the judge reads what it writes, and agrees with the pairs; its linear head."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pacmr_lightning.command_line.parser import run_tool
from pacmr_lightning.datamodules.tokenizer import train_tokenizer
from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.answer_store import AnswerStore
from pacmr_lightning.evaluation.judging import Comparison
from pacmr_lightning.evaluation.reward_model import RewardModelJudge

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def learn(tmp_path, monkeypatch, capsys, tiny_llama, write_rows):
    monkeypatch.chdir(tmp_path)
    rows = list(World().preference_rows(120, 0))
    words = ("golden", "grey")
    for number, row in enumerate(rows):
        row |= {"prompt": f"{row['prompt']} {number % 40}"}
        row["chosen"], row["rejected"] = (f" {word} {row['chosen'].strip()}" for word in words)
    write_rows(rows, "pairs.jsonl")
    texts = [row[name] for row in rows for name in ("prompt", "chosen", "rejected")]
    tokenizer = train_tokenizer(texts, vocab_size=400)
    tiny_llama("model", tokenizer, vocab_size=len(tokenizer), initializer_range=0.3)
    monkeypatch.syspath_prepend(EXAMPLES)
    example = import_module("reward_model")

    def call(*words):
        run_tool("reward_model", example.reward_model, ["model", *words])
        return capsys.readouterr().out

    return SimpleNamespace(call=call, rows=rows, fit_head=example.fit_head)


def test_reward_model(learn):
    options = ["--source", "Files", "--source.train", "pairs.jsonl", "--output", "judge"]
    said = learn.call(*options)
    assert "judge: learned from 120 pairs; on prompts it has not seen it agrees with" in said
    pairs = [Comparison(row["prompt"], row["chosen"], row["rejected"]) for row in learn.rows[:20]]
    with AnswerStore(Path("answers.sqlite")) as store:
        verdicts = RewardModelJudge("judge", max_length=200).compare(pairs, store)
    assert np.mean([verdict.preferred == "first" for verdict in verdicts]) > 0.8
    with pytest.raises(UserError, match="judge exists already"):
        learn.call(*options)
    with pytest.raises(UserError, match="0 prompts have pairs of 500 to 1024 tokens"):
        learn.call(*options[:-1], "other", "--min_length", "500")
    assert not Path("other").exists()


def test_head_of_a_reward_model(learn):
    """Pairs whose labels a known reward drew: its direction, and its accuracy on other prompts."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=8)
    differences = rng.normal(size=(4000, 8)) * np.array([1, 10, 1, 1, 0.1, 1, 1, 0])
    log_odds = differences @ truth
    differences *= np.where(rng.random(4000) < 1 / (1 + np.exp(-log_odds)), 1, -1)[:, None]
    head, accuracy = learn.fit_head(differences, rng.integers(0, 400, 4000))
    assert head[:4] == pytest.approx(truth[:4], abs=0.2) and head[7] == 0
    assert accuracy == pytest.approx((differences @ truth > 0).mean(), abs=0.01)
