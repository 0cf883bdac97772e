"""docs/coming_from_trl.md: both sides of its table exist."""

import dataclasses
import re
from pathlib import Path

import pytest

from pacmr_lightning import cli

TABLE = [
    line.split("|")[1:3]
    for line in (Path(__file__).parents[1] / "docs/coming_from_trl.md").read_text().splitlines()
    if line.startswith("| `")
]
VALUES = {
    "model.objective": "RDPO",
    "model.objective.beta": "0.2",
    "model.objective.label_noise": "0.2",
    "model.learning_rate": "0.001",
    "model.min_lr_ratio": "0.5",
    "model.warmup_ratio": "0.1",
    "model.weight_decay": "0.1",
    "model.max_grad_norm": "0.5",
    "model.micro_batch_size": "2",
    "data.global_batch_size": "16",
    "trainer.max_epochs": "2",
    "trainer.max_steps": "9",
    "data.max_length": "99",
    "data.reference": "cached",
    "model.policy.dtype": "bfloat16",
    "model.policy.gradient_checkpointing": "true",
    "model.policy.layout": "packed",
    "trainer.log_every_n_steps": "5",
    "trainer.val_check_interval": "0.5",
    "checkpoint.every_n_train_steps": "7",
    "trainer.default_root_dir": "runs/other",
    "seed_everything": "7",
    "data.seed": "8",
    "trainer.logger": "false",
    "data.validation_batch_size": "16",
    "ckpt_path": "last",
}


def test_the_names_of_trl():
    trl = pytest.importorskip("trl", reason="TRL is in the extra oracle")
    known = {field.name for field in dataclasses.fields(trl.DPOConfig)}
    named = {name for theirs, _ in TABLE for name in re.findall(r"`(\w+)`", theirs)}
    assert len(named) > 20 and named <= known


def test_our_options(tmp_path, monkeypatch, capsys):
    named = {name for _, ours in TABLE for name in re.findall(r"--([\w.]+)", ours)}
    assert named - {"model.objective.length_normalize"} == set(VALUES)
    monkeypatch.chdir(tmp_path)
    given = [word for name, value in VALUES.items() for word in (f"--{name}", value)]
    base = ["--config", "preference", "--model.policy.model", "m", "--data.source.train", "pairs.jsonl"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", *base, *given, "--print_config"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for name, value in VALUES.items():
        key = name.rpartition(".")[2]
        assert name == "model.objective" or re.search(rf"\b{key}: '?{re.escape(value)}'?\n", printed), name
    for kind, option in (("IPO", "length_normalize"), ("CDPO", "label_noise")):
        with pytest.raises(SystemExit) as stop:
            words = [
                "--model.objective",
                kind,
                f"--model.objective.{option}",
                "0.1" if kind == "CDPO" else "true",
            ]
            cli.main(["fit", *base, *words, "--print_config"])
        assert stop.value.code == 0
