"""The whole road on real TL;DR rows, by a user's commands: SFT, noise, two methods, responses, judges."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaForSequenceClassification

from pacmr_lightning import cli
from pacmr_lightning.runs.folder import SUMMARY, read_weights

from .conftest import read_lines, write_lines
from .pacmr_lightning.evaluation.faulty_server import FaultyServer, prefer_longer

ROOT = Path(__file__).parents[1]
TLDR, METHODS = ROOT / "configs" / "tldr", ROOT / "configs" / "methods"
UPDATES, PAIRS, PROMPTS = 8, 480, 12
CPU = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


@pytest.fixture
def rows(shared_data, tmp_path, monkeypatch):
    """The first rows of each file in an empty working directory, where a model takes them in in seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    found = {}
    for name, count in (("sft", 160), ("train", PAIRS), ("validation", 96)):
        found[name] = read_lines(shared_data / f"tldr/{name}.jsonl.gz")[:count]
        write_lines(f"{name}.jsonl", found[name])
    return found


def pacmr(words, *arguments):
    cli.main([*words.split(), *map(str, arguments)])


def train(method):
    """A run of a few updates under 30% noise, by the trial run's configs and the method's."""
    pacmr("fit --config", TLDR / "small_preference.yaml", "--config", METHODS / f"{method}.yaml", *CPU,
          *("--model.policy.model", "sft/model", "--model.learning_rate", "0.01"),
          *("--data.source.train", "train.jsonl", "--data.source.validation", "validation.jsonl"),
          *("--trainer.max_steps", UPDATES, "--trainer.limit_val_batches", 1),
          *("--trainer.default_root_dir", method))  # fmt: skip
    summary = json.loads((Path(method) / SUMMARY).read_text())
    assert (summary["method"], summary["steps"], summary["noise_rate"]) == (method, UPDATES, 0.3)
    return read_weights(method)


def predict(method):
    pacmr(f"predict --config {method}/config.yaml --ckpt_path last --data.predict_prompts {PROMPTS}",
          *("--model.max_new_tokens", 24, "--data.validation_batch_size", 6), *CPU)  # fmt: skip
    content = (Path(method) / "generations.jsonl").read_bytes()
    return [json.loads(line) for line in content.decode().splitlines()], content


def judge(output, *arguments):
    files = ("pacmr/generations.jsonl", "dpo/generations.jsonl")
    pacmr("judge", *files, "--output", output, *arguments)
    content = (Path(output) / "verdicts.jsonl").read_bytes()
    lines = content.decode().split("\n")[:-1]
    return json.loads((Path(output) / "summary.json").read_text()), [json.loads(x) for x in lines], content


def check(summary, verdicts, responses):
    """Every pair of responses has its verdict; the counts are those of the verdicts and add up."""
    assert [row["id"] for row in verdicts] == [row["id"] for row in responses[0]]
    assert [row["responses"] for row in verdicts] == [
        [one["response"], other["response"]] for one, other in zip(*responses, strict=True)
    ]
    for name, verdict in {"wins": "win", "ties": "tie", "losses": "loss"}.items():
        assert summary[name] == sum(row["verdict"] == verdict for row in verdicts)
    assert summary["wins"] + summary["ties"] + summary["losses"] == summary["pairs"] == PROMPTS
    assert (summary["invalid"], summary["unanswered"]) == (0, 0)


@pytest.mark.slow
def test_from_rows_to_verdicts(rows, tiny_llama):
    pacmr("fit --config", TLDR / "small_sft.yaml", *CPU, "--data.source.train", "sft.jsonl",
          *("--model.from_scratch.hidden_size", 48, "--model.from_scratch.intermediate_size", 64),
          *("--data.vocab_size", 1024, "--trainer.max_epochs", 1),
          *("--trainer.default_root_dir", "sft"))  # fmt: skip

    weights = {method: train(method) for method in ("dpo", "pacmr")}
    same = ["id", "flipped"]
    assert weights["dpo"][same].equals(weights["pacmr"][same]), "the same pairs and flips in one order"
    assert (weights["dpo"]["weight"] == 1).all() and weights["pacmr"]["weight"].std() > 0.01

    (first, content), (second, _) = predict("pacmr"), predict("dpo")
    prompts = {row["prompt"] for row in rows["validation"]}
    for one, other in zip(first, second, strict=True):
        assert (one["id"], one["prompt"]) == (other["id"], other["prompt"]) and one["prompt"] in prompts
    assert len({row["id"] for row in first}) == PROMPTS and predict("pacmr")[1] == content
    different = sum(one["response"] != other["response"] for one, other in zip(first, second, strict=True))
    assert different > 0, "or there is nothing to judge"

    tokenizer = AutoTokenizer.from_pretrained("sft/model")
    reward_model = {"model_class": LlamaForSequenceClassification, "num_labels": 1, "initializer_range": 0.3}
    tiny_llama("reward-model", tokenizer, vocab_size=len(tokenizer), **reward_model)
    by_scores = ["--judge", "RewardModelJudge", "--judge.model", "reward-model"]
    summary, verdicts, _ = judge("by-scores", *by_scores)
    check(summary, verdicts, (first, second))
    assert summary["flipped"] == 0

    with FaultyServer(prefer_longer) as server:
        endpoint = ["--judge", "EndpointJudge", "--judge.task", "tldr", "--judge.base_url", server.url]
        summary, verdicts, content = judge("by-endpoint", *endpoint)
        check(summary, verdicts, (first, second))
        for row in verdicts:
            a, b = (len(response.strip()) for response in row["responses"])
            assert a == b or row["verdict"] == ("win" if a > b else "loss"), "the stub prefers the longer one"
        assert judge("by-endpoint", *endpoint)[2] == content and len(server.requests) == 2 * different
