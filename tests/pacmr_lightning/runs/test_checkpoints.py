"""Checkpoint files: what is in them, which are taken, and what is said of those that cannot be."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pacmr_lightning import cli
from pacmr_lightning.errors import UserError
from pacmr_lightning.runs.checkpoints import CheckpointFiles, to_resume_from

from ...conftest import fails, short_fit

TO = "--trainer.default_root_dir"


def checkpoint(step: int) -> dict:
    keys = ("loops", "optimizer_states", "lr_schedulers", "callbacks")
    return {"global_step": step, "state_dict": {"a": torch.full((4000,), float(step))}} | dict.fromkeys(keys)


class Code:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "truncated": (half, "it is damaged"),
    "empty": (lambda path: path.write_bytes(b""), "it is empty"),
    "garbage": (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(range(256)) * 100), "it is damaged"),
    "one bit": (flip_a_bit, "it is damaged"),
    "a model": (lambda path: torch.save({"a": torch.zeros(3)}, path), "it is not a checkpoint of a run"),
    "code": (lambda path: torch.save(checkpoint(9) | {"x": Code()}, path), "it holds more than tensors"),
    "weights": (lambda path: torch.save(dict(list(checkpoint(9).items())[:3]), path), "weights only"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_passed_over(damage, inside):
    files, damaged = CheckpointFiles(), inside / "last.ckpt"
    for step, name in ((3, "snapshot-3.ckpt"), (6, "step-6.ckpt"), (9, "last.ckpt")):
        files.save_checkpoint(checkpoint(step), inside / name)
    assert to_resume_from("last", inside, training=True) == (str(damaged), 9)
    spoil, why = DAMAGES[damage]
    spoil(damaged)
    with pytest.warns(UserWarning, match=rf"last\.ckpt is skipped: .*{why}"):
        assert to_resume_from("last", inside, training=True) == (str(inside / "step-6.ckpt"), 6)
    with pytest.raises(UserError, match=rf"last\.ckpt cannot be used: .*{why}"):
        to_resume_from(str(damaged), inside, training=True)
    assert not Path("executed").exists()
    for path in inside.glob("*.ckpt"):
        shutil.copy(damaged, path) if path != damaged else None
    with pytest.warns(UserWarning), pytest.raises(UserError, match=r"None of the 3 checkpoints in .* delete"):
        to_resume_from("last", inside, training=True)


def test_a_run_that_went_back(tmp_path):
    """What it had left with more updates is not its own any more, unless there is nothing else."""
    files = CheckpointFiles()
    for step, name in ((300, "alarm-300.ckpt"), (150, "step-150.ckpt"), (150, "last.ckpt")):
        files.save_checkpoint(checkpoint(step), tmp_path / name)
    assert to_resume_from("last", tmp_path, training=True) == (str(tmp_path / "last.ckpt"), 150)
    named = str(tmp_path / "step-150.ckpt")
    assert to_resume_from(named, tmp_path, training=True) == (named, 150)
    (tmp_path / "last.ckpt").unlink()
    assert to_resume_from("last", tmp_path, training=True) == (str(tmp_path / "alarm-300.ckpt"), 300)


def test_none_at_all(tmp_path):
    assert to_resume_from(None, tmp_path, training=True) == (None, 0)
    assert to_resume_from("last", tmp_path / "nowhere", training=True) == (None, 0)
    with pytest.raises(UserError, match="no checkpoint in"):
        to_resume_from("last", tmp_path, training=False)
    with pytest.raises(UserError, match="best does not exist"):
        to_resume_from("best", tmp_path, training=False)


def test_what_a_kill_leaves_goes_with_the_next_save(tmp_path):
    left = tmp_path / ".last.ckpt.17.partial"
    left.write_bytes(b"PK")
    assert to_resume_from("last", tmp_path, training=True) == (None, 0)
    path = tmp_path / "last.ckpt"
    CheckpointFiles().save_checkpoint(checkpoint(1), path)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError, match="cannot pickle"):
        CheckpointFiles().save_checkpoint({"x": (number for number in ())}, path)
    assert list(tmp_path.iterdir()) == [path]
    assert CheckpointFiles().load_checkpoint(path)["global_step"] == 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_llama):
    """The words of runs of two updates by their kind, and their last checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    model = tiny_llama(folder / "model")
    world = "--data.source EmbeddedWorld --data.source.pairs 32 --data.source.validation_pairs 8"
    sizes = "--data.global_batch_size 8 --data.meta_batch_size 8 --trainer.limit_val_batches 0"
    pairs = short_fit(model, f"{world} {sizes} --trainer.max_steps 2")
    rows = f"""fit --model SFTModule --model.model {model} --data SFTDataModule --data.source WorldCompletions
        --data.source.rows 32 --data.source.validation_rows 8 --data.tokenizer {model}
        --data.batch_size 8 --trainer.accelerator cpu --trainer.max_steps 2"""
    words = {"pacmr": [*pairs, "--model.weighting", "VNetWeighting"], "dpo": pairs, "sft": rows.split()}
    for kind, its in words.items():
        cli.main([*its, TO, str(folder / kind)])
    return words, {kind: folder / kind / "checkpoints/last.ckpt" for kind in words}


def test_trainables_only(runs):
    checkpoint = runs[1]["pacmr"]
    found = torch.load(checkpoint, weights_only=True)
    assert set(found) == {
        *("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks"),
        *("optimizer_states", "lr_schedulers", "hparams_name", "hyper_parameters", "weighting", "objective"),
        *("metrics", "options", "reference", "began_trained"),
    }
    assert len(found["state_dict"]) == 14 and all(".lora_" in name for name in found["state_dict"])
    assert {len(state["state"]) for state in found["optimizer_states"]} == {14}
    model = AutoModelForCausalLM.from_pretrained(checkpoint.parents[2] / "model")
    base = sum(p.numel() for p in model.parameters())
    assert sum(value.numel() for value in found["state_dict"].values()) < base
    assert set(found["weighting"]) == {"vnet", "optimizer", "updates", "skipped"}


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("pacmr", "dpo", "weighting"),
        ("dpo", "pacmr", "weighting"),
        ("dpo", "sft", "does not fit this model's adapter"),
        ("sft", "pacmr", "lacks"),
    ],
)
def test_a_checkpoint_of_something_else(kind, other, message, runs, tmp_path, capsys):
    """Of another method or kind of run; other options of one method: modules/test_preference.py."""
    words, checkpoints = runs
    more = ["--trainer.max_steps", "3", TO, tmp_path / "new", "--ckpt_path", checkpoints[other]]
    assert message in fails(capsys, [*words[kind], *more])
    assert not (tmp_path / "new").exists()
