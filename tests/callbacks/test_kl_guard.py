"""A run that goes too far stops, and its model is the last one that did not; others are as without it."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from pacmr_lightning import cli
from pacmr_lightning.runs.finished_run import find_run, load_run

from ..conftest import files, short_fit, with_callback, write_lines


@pytest.fixture
def fit(tiny_llama, pair_rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_llama("model", initializer_range=0.5)
    write_lines("pairs.jsonl", (row | {"id": str(i)} for i, row in enumerate(pair_rows(64))))

    def run(folder, more):
        words = f"""{files("pairs.jsonl")} --data.global_batch_size 8 --data.meta_batch_size 4
            --model.learning_rate 0.003 --trainer.max_epochs 2 --trainer.log_every_n_steps 1
            --trainer.default_root_dir {folder} {more} {with_callback("RunSummary")}"""
        cli.main(short_fit("model", words))
        return torch.load(Path(folder) / "checkpoints/last.ckpt", weights_only=False)

    return run


def adapters_are_equal(one, other):
    return all(torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items())


def test_a_run_that_goes_too_far(fit, recwarn):
    vnet = "--model.weighting VNetWeighting --model.weighting.every 1"
    sampled = with_callback("SequenceKL", samples=4, max_new_tokens=4, every=2)
    last = fit("run", f"{vnet} {sampled} {with_callback('KLGuard', pairs=4, every=2, warn=1e-4, stop=0.3)}")
    said = [str(w.message) for w in recwarn if "nats per token away" in str(w.message)]
    assert "KLGuard ends the training: after" in said[-1] and last["global_step"] < 16
    kept = int(said[-1].rpartition("the policy of update ")[2].partition(".")[0])
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["metrics"]["val/guard/restored_step"] == kept < summary["steps"]
    # What was measured last is of the model that was kept, although the measuring callback comes first.
    measured = pd.read_csv("run/metrics.csv").set_index("step")["val/sequence_kl"].dropna()
    assert measured.iloc[-1] == (measured[kept - 1] if kept else 0)
    assert summary["metrics"]["val/sequence_kl"] == measured.iloc[-1]
    # The same run without a guard is there after as many updates.
    fit("free", f"{vnet} {with_callback('Snapshots', steps=[kept])}")
    [path] = Path("free/checkpoints").glob(f"*{kept}.ckpt")
    free = torch.load(path, weights_only=False)
    assert adapters_are_equal(last, free)
    for name, value in free["weighting"]["vnet"].items():
        assert torch.equal(value, last["weighting"]["vnet"][name])


def test_the_number_it_stops_by(fit):
    """KL per token of a finished run, against the sum over the vocabulary with one pair at a time."""
    fit("run", with_callback("KLGuard", pairs=3, every=16, warn=100, stop="null"))
    summary = json.loads(Path("run/summary.json").read_text())
    module, data, _ = load_run(find_run("run", "last"), as_trained=True)
    data.setup("fit")
    policy, values = module.policy, []
    policy.build()
    module.load_state_dict(torch.load("run/checkpoints/last.ckpt", weights_only=False)["state_dict"], False)
    for i in range(3):
        row = data.validation_pairs.rows[i]
        pair, tokens = [], 0
        for side in ("chosen_ids", "rejected_ids"):
            ids = torch.tensor([row["prompt_ids"] + row[side]])
            start = len(row["prompt_ids"]) - 1
            with torch.no_grad():
                p = policy.peft(input_ids=ids).logits.log_softmax(-1)[0, start:-1]
                with policy.peft.disable_adapter():
                    q = policy.peft(input_ids=ids).logits.log_softmax(-1)[0, start:-1]
            pair.append((p.exp() * (p - q)).sum())
            tokens += len(row[side])
        values.append(sum(pair) / tokens)
    assert summary["metrics"]["val/guard/kl"] == pytest.approx(float(sum(values) / 3), rel=1e-3)
