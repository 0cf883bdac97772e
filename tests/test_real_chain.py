"""The whole road on real TL;DR rows, by a user's commands: SFT, noise, two methods, responses, a judge."""

import json
from pathlib import Path

import pytest

from pacmr_lightning import cli
from pacmr_lightning.runs.folder import read_weights

from .conftest import read_lines, write_lines
from .pacmr_lightning.evaluation.faulty_server import prefer_longer as reply  # noqa: F401, by the server

CONFIGS = Path(__file__).parents[1] / "configs"
CPU = "--trainer.accelerator cpu --trainer.enable_progress_bar false"


def pacmr(words):
    cli.main(words.split())


@pytest.mark.slow
def test_from_rows_to_verdicts(shared_data, server, inside):
    """On the first rows of each file, which a model takes in in seconds."""
    for name, count in (("sft", 160), ("train", 480), ("validation", 96)):
        write_lines(f"{name}.jsonl", read_lines(shared_data / f"tldr/{name}.jsonl.gz")[:count])
    pacmr(f"""
        fit --config {CONFIGS}/tldr/small_sft.yaml {CPU} --data.source.train sft.jsonl --data.vocab_size 1024
        --model.from_scratch.hidden_size 48 --model.from_scratch.intermediate_size 64
        --trainer.max_epochs 1 --trainer.default_root_dir sft
    """)
    weights, answers = [], []
    for method in ("dpo", "pacmr"):
        pacmr(f"""
            fit --config {CONFIGS}/tldr/small_preference.yaml --config {CONFIGS}/methods/{method}.yaml {CPU}
            --model.policy.model sft/model --model.learning_rate 0.01 --trainer.default_root_dir {method}
            --data.source.train train.jsonl --data.source.validation validation.jsonl
            --trainer.max_steps 8 --trainer.limit_val_batches 1
        """)
        summary = json.loads(Path(f"{method}/summary.json").read_text())
        assert (summary["method"], summary["steps"], summary["noise_rate"]) == (method, 8, 0.3)
        weights.append(read_weights(method))
        pacmr(f"""
            predict --config {method}/config.yaml --ckpt_path last {CPU} --data.predict_prompts 12
            --model.max_new_tokens 24 --data.validation_batch_size 6
        """)
        answers.append(read_lines(f"{method}/generations.jsonl"))
    dpo, learned = weights
    same = ["id", "flipped"]
    assert dpo[same].equals(learned[same]), "the same pairs and flips in one order"
    assert 0.2 < dpo["flipped"].mean() < 0.4
    assert (dpo["weight"] == 1).all() and learned["weight"].std() > 0.01

    endpoint = f"--judge EndpointJudge --judge.task tldr --judge.base_url {server.url}"
    pacmr(f"judge pacmr/generations.jsonl dpo/generations.jsonl --output judged {endpoint}")
    prompts = {row["prompt"] for row in read_lines("validation.jsonl")}
    for second, first, row in zip(*answers, read_lines("judged/verdicts.jsonl"), strict=True):
        assert first["id"] == second["id"] == row["id"] and first["prompt"] == second["prompt"] in prompts
        assert row["responses"] == [first["response"], second["response"]]
    summary = json.loads(Path("judged/summary.json").read_text())
    assert summary["pairs"] == 12 and summary["ties"] < 12, "or the responses are all alike"
    assert (summary["invalid"], summary["unanswered"]) == (0, 0)
