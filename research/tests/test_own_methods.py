"""PerpCorrect, Aligner and MetaPO, written as a user would: a few updates of each by its command."""

import random

import pandas as pd
import pytest
import torch
import yaml

from pacmr_lightning import cli
from pacmr_lightning.batch import Segment
from pacmr_lightning.embedded_world import World
from pacmr_lightning.runs.finished_run import find_run, load_run
from pacmr_lightning.runs.folder import read_weights
from research.perp_correct import main as perp_correct
from research.votes import state_differences
from tests.conftest import fails, short_fit, write_lines


def rows(count):
    """Good responses speak of books, bad ones of rain; every fourth label is wrong."""
    draw = random.Random(0)
    for i in range(count):
        sides = [" ".join(draw.choices(words.split(), k=4)) for words in ("book best calm", "rain sea mood")]
        good, bad = sides[:: -1 if i % 4 == 3 else 1]
        row = {"id": str(i), "prompt": f"What of {i} books?", "chosen": f" {good}", "rejected": f" {bad}"}
        yield row | {"flipped": i % 4 == 3}


@pytest.mark.slow
def test_perp_correct(tmp_path, tiny_llama, capsys):
    tiny_llama(tmp_path / "model", initializer_range=0.2)
    found = list(rows(96))
    clean = [row for row in found if not row["flipped"]][:24]
    for name, part in (("train", found), ("clean", clean)):
        write_lines(tmp_path / f"{name}.jsonl", part)
    options = f"""
        --model.learning_rate 0.001 --model.micro_batch_size 8 --data.global_batch_size 8
        --data.source Files --data.source.train {tmp_path}/train.jsonl
        --data.source.validation {tmp_path}/clean.jsonl --trainer.max_epochs 1 --trainer.limit_val_batches 0
        --trainer.callbacks+ RunSummary --trainer.default_root_dir {tmp_path}/first
    """
    cli.main(short_fit(tmp_path / "model", options))
    words = [f"{tmp_path}/first", "--clean", "Files", "--clean.train", f"{tmp_path}/clean.jsonl"]
    words += ["--rounds.count", "2", "--rounds.share", "0.1", "--rounds.learning_rate", "0.01"]
    perp_correct([*words, "--rounds.beta", "0.3"])
    folder = tmp_path / "first-corrected"
    table, pairs = pd.read_csv(folder / "rounds.csv"), pd.read_parquet(folder / "pairs.parquet")
    wrong = pairs["id"].astype(int) % 4 == 3
    assert ((pairs["suggested"] == "swap") != wrong).mean() < 0.5 * wrong.mean()
    assert table.loc[table["best"], "alpha"].item() == pytest.approx(0.75, abs=0.1)
    config = yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]
    assert config["method"] == "dpo-corrected" and config["weighting"]["init_args"]["soft_labels"]
    assert (folder / "summary.json").exists()
    seen = {path: path.stat().st_mtime_ns for path in folder.rglob("*.ckpt")}
    capsys.readouterr()
    perp_correct([*words, "--rounds.beta", "0.3"])
    assert "dpo-corrected" in capsys.readouterr().out and len(seen) > 2
    assert seen == {path: path.stat().st_mtime_ns for path in folder.rglob("*.ckpt")}
    write_lines(tmp_path / "clean.jsonl", clean[1:])
    for others, message in (
        ([*words, "--rounds.beta", "0.3"], "already holds a second pass with clean "),
        (words[:1], "has no clean pairs, which PerpCorrect needs"),
        ([*words, "--rounds.batch_size", "64"], "the number of clean pairs is 23"),
    ):
        with pytest.raises(SystemExit):
            perp_correct(others)
        assert message in " ".join(capsys.readouterr().err.split())


def test_kept_states_are_of_these_rows_and_this_model(tmp_path, tiny_llama):
    pairs = pd.DataFrame(rows(3))
    for seed, name in enumerate("ab"):
        tiny_llama(tmp_path / name / "model", seed=seed)
    first, turned, other = (
        state_differences(str(tmp_path / f"{name}/model"), part, str(tmp_path))
        for name, part in (("a", pairs), ("a", pairs[::-1]), ("b", pairs))
    )
    assert (first == turned[::-1]).all() and (first != other).any()


@pytest.mark.parametrize("method", ["aligner", "metapo_style"])
def test_other_features(method, tmp_path, tiny_llama, monkeypatch, capsys):
    tiny_llama(tmp_path / "model", initializer_range=0.3)
    write_lines(tmp_path / "clean.jsonl", World().preference_rows(8, 1))
    words = f"""
        fit --config quickstart/preference --config research/{method}.yaml --trainer.accelerator cpu
        --model.policy.model {tmp_path}/model --model.learning_rate 0.002 --model.weighting.every 1
        --model.weighting.learning_rate 0.1 --data.source.pairs 16 --data.source.validation_pairs 4
        --data.global_batch_size 8 --data.meta_batch_size 4 --data.clean_meta Files
        --data.clean_meta.train {tmp_path}/clean.jsonl --trainer.max_epochs 3 --trainer.limit_val_batches 0
        --trainer.callbacks+ WeightRecorder --trainer.default_root_dir {tmp_path}/run
    """.split()
    cli.main(words)
    weights = read_weights(tmp_path / "run")
    last = weights[weights["step"] == 5]
    assert len(weights) == 48 and last["weight"].std() > 1e-3 and last["a"].isna().all()
    module, data, step = load_run(find_run(str(tmp_path / "run"), "last"), as_trained=True)
    assert step == module.weighting.updates == 6
    if method == "metapo_style":
        assert "needs earlier visits" in fails(
            capsys, [*words[:-1], f"{tmp_path}/short", "--trainer.max_epochs", "1"]
        )
        first = weights.groupby("id")["u"].first()
        assert {name: seen[0] for name, seen in module.weighting.state_dict()["visits"].items()} == (
            pytest.approx(first.to_dict(), abs=1e-6)
        )
        return
    data.setup("fit")
    batch = data.train_pairs.batch([0, 1, 2])
    found = module.weighting._entropies(batch)
    for tokens, kinds, value in zip(batch.input_ids, batch.segment_ids, found, strict=True):
        prompt, chosen = (tokens[kinds == kind] for kind in (Segment.PROMPT, Segment.CHOSEN))
        with torch.no_grad():
            logits = module.policy.peft(input_ids=torch.cat([prompt, chosen])[None]).logits[0]
        entropies = torch.distributions.Categorical(logits=logits).entropy()[len(prompt) - 1 : -1]
        torch.testing.assert_close(value, entropies.mean(), rtol=1e-4, atol=1e-5)
