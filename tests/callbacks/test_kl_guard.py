"""A run that goes too far stops, and its model is the last one that did not; others are as without it."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from pacmr_lightning import cli
from pacmr_lightning.runs.finished_run import find_run, load_run

from ..conftest import write_lines

GUARD = "pacmr_lightning.callbacks.KLGuard"


@pytest.fixture
def fit(tiny_llama, pair_rows, tmp_path, monkeypatch, preference_config):
    monkeypatch.chdir(tmp_path)
    tiny_llama("model", initializer_range=0.5)
    write_lines(tmp_path / "pairs.jsonl", [row | {"id": str(i)} for i, row in enumerate(pair_rows(64))])

    def run(folder, guard, rate, method=None):
        callbacks = [{"class_path": name, "init_args": options} for name, options in guard]
        callbacks.append({"class_path": "RunSummary"})
        module = {"learning_rate": rate, **(method or {})}
        config = preference_config(
            "model", "pairs.jsonl", module, callbacks=callbacks, max_epochs=2, default_root_dir=folder
        )
        Path("config.yaml").write_text(yaml.safe_dump(config))
        cli.main(["fit", "--config", "config.yaml"])
        return torch.load(Path(folder) / "checkpoints/last.ckpt", weights_only=False)

    return run


def adapters_are_equal(one, other):
    return all(torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items())


def test_a_run_that_goes_too_far(fit, recwarn):
    vnet = {"weighting": {"class_path": "VNetWeighting", "init_args": {"every": 1}}}
    options = {"pairs": 4, "every": 2, "warn": 1e-4, "stop": 0.3}
    sampled = ("SequenceKL", {"samples": 4, "max_new_tokens": 4, "every": 2})
    last = fit("run", [sampled, (GUARD, options)], 0.003, vnet)
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
    snapshots = ("Snapshots", {"steps": [kept]})
    fit("free", [snapshots], 0.003, vnet)
    [path] = Path("free/checkpoints").glob(f"*{kept}.ckpt")
    free = torch.load(path, weights_only=False)
    assert adapters_are_equal(last, free)
    for name, value in free["weighting"]["vnet"].items():
        assert torch.equal(value, last["weighting"]["vnet"][name])


def test_the_number_it_stops_by(fit):
    """KL per token of a finished run, against the sum over the vocabulary with one pair at a time."""
    fit("run", [(GUARD, {"pairs": 3, "every": 16, "warn": 100, "stop": None})], 0.003)
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
