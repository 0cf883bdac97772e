"""examples/reward_model.py: the judge reads what it writes, and agrees with the pairs; its linear head."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import BertConfig, BertForSequenceClassification

from pacmr_lightning.command_line.parser import run_tool
from pacmr_lightning.datamodules.tokenizer import load_tokenizer, train_tokenizer
from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.judging import Comparison
from pacmr_lightning.evaluation.reward_model import RewardModelJudge

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def learn(inside, monkeypatch, capsys, tiny_llama, write_rows):
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


def test_reward_model(learn, store):
    options = ["--source", "Files", "--source.train", "pairs.jsonl", "--output", "judge"]
    said = learn.call(*options)
    assert "judge: learned from 120 pairs; on prompts it has not seen it agrees with" in said
    pairs = [Comparison(row["prompt"], row["chosen"], row["rejected"]) for row in learn.rows[:20]]
    verdicts = RewardModelJudge("judge", max_length=200).compare(pairs, store)
    assert np.mean([verdict.preferred == "first" for verdict in verdicts]) > 0.8
    with pytest.raises(UserError, match="judge exists already"):
        learn.call(*options)
    options[-1] = "other"
    with pytest.raises(UserError, match="batch_size is 0, but it must be at least 1"):
        learn.call(*options, "--batch_size", "0")
    with pytest.raises(UserError, match="0 prompts have pairs of 500 to 1024 tokens"):
        learn.call(*options, "--min_length", "500")
    bert = {"vocab_size": 400, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    sentences = "has no linear head named score", "model cannot be loaded as a sequence classifier"
    for labels, sentence in enumerate(sentences, 1):
        BertForSequenceClassification(BertConfig(**bert, num_labels=labels)).save_pretrained("model")
        with pytest.raises(UserError, match=sentence):
            learn.call(*options)
    tokenizer = load_tokenizer("model")
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    tokenizer.save_pretrained("model")
    with pytest.raises(UserError, match=r"The chat template refuses pair .* \(no system\); take it out"):
        learn.call(*options)
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
