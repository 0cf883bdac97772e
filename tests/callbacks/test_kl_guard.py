"""A run that goes too far stops, and its model is the last one that did not; others are as without it."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from pacmr_lightning import cli
from pacmr_lightning.runs.finished_run import find_run, load_run, ready

from ..conftest import files, short_fit, with_callback, write_lines
from ..pacmr_lightning.policy.test_logprobs import plain_kl


@pytest.fixture
def fit(tiny_llama, pair_rows, inside):
    tiny_llama("model", initializer_range=0.5)
    write_lines("pairs.jsonl", (row | {"id": str(i)} for i, row in enumerate(pair_rows(64))))

    def run(folder, more):
        words = f"""{files("pairs.jsonl")} --data.global_batch_size 8 --data.meta_batch_size 4
            --model.learning_rate 0.003 --trainer.max_epochs 2 --trainer.log_every_n_steps 1
            --trainer.default_root_dir {folder} {more} {with_callback("RunSummary")}"""
        cli.main(short_fit("model", words))
        return torch.load(Path(folder) / "checkpoints/last.ckpt", weights_only=False)

    return run


def test_a_run_that_goes_too_far(fit, recwarn, capsys):
    vnet = "--model.weighting VNetWeighting --model.weighting.every 1"
    watched = with_callback("WeightGap"), with_callback("SampleResponses", prompts=2, max_new_tokens=2)
    sampled = with_callback("SequenceKL", samples=4, max_new_tokens=4, every=2)
    each = "--checkpoint.every_n_train_steps 1 --checkpoint.save_top_k -1"
    guard = with_callback("KLGuard", pairs=4, every=2, warn=1e-4, stop=0.3)
    run = f"{vnet} {sampled} {guard} {' '.join(watched)} {each} --trainer.min_epochs 2"
    last = fit("run", run)
    said = [str(w.message) for w in recwarn if "nats per token away" in str(w.message)]
    assert "KLGuard ends the training: after" in said[-1] and last["global_step"] < 16
    assert "from its reference on 4 held-out pairs." in said[-1]
    kept = int(said[-1].rpartition("the policy of update ")[2].partition(".")[0])
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["metrics"]["val/guard/restored_step"] == kept < summary["steps"]
    cli.main(["export", "run", "adapter"])
    assert f"an adapter after {kept} updates" in capsys.readouterr().err
    cli.main(["compare", "run"])
    assert f"update {summary['steps']}; policy of update {kept}\n" in capsys.readouterr().err
    # What was measured last is of the model that was kept, although the measuring callback comes first.
    measured = pd.read_csv("run/metrics.csv").set_index("step")["val/sequence_kl"].dropna()
    assert measured.iloc[-1] == (measured[kept - 1] if kept else 0)
    assert summary["metrics"]["val/sequence_kl"] == measured.iloc[-1]
    # The same run without a guard is there after as many updates.
    fit("free", f"{vnet} {each}")
    free = torch.load(Path("free/checkpoints", f"step-{kept}.ckpt"), weights_only=False)
    # So is one that went on after the last check below.
    again = fit("again", f"{vnet} {sampled} {guard} --ckpt_path run/checkpoints/step-{kept + 1}.ckpt")
    for found in (last, again):
        torch.testing.assert_close(found["state_dict"], free["state_dict"], rtol=0, atol=0)
        torch.testing.assert_close(found["weighting"]["vnet"], free["weighting"]["vnet"], rtol=0, atol=0)
    recwarn.clear()
    assert fit("run", f"{run} --ckpt_path last")["global_step"] == last["global_step"]
    ended = f"KLGuard has ended this run; its policy is that of update {kept}. Start"
    assert ended in str(recwarn[-1].message)
    assert load_run(find_run("run", "last"))[2] == kept
    for table in ("analysis/weight-gap.csv", "responses.jsonl"):  # nothing is there twice
        rows = (Path("run") / table).read_text().splitlines()
        assert len(set(rows)) == len(rows) > 1
    went_on = fit("run", f"{run.replace('stop 0.3', 'stop null')} --ckpt_path last")
    assert went_on["global_step"] == 16
    assert "val/guard/restored_step" not in json.loads(Path("run/summary.json").read_text())["metrics"]


def test_the_number_it_stops_by(fit):
    """KL per token of held-out pairs at even distances; the validation has that of all."""
    guard = with_callback("KLGuard", pairs=3, every=100, warn=100, stop="null")  # then after the last update
    fit("run", f"{guard} --data.validation_sample 40")
    module, data, _ = load_run(find_run("run", "last"), as_trained=True)
    data.setup("fit")
    with torch.no_grad():
        expected = plain_kl(ready(module), data.validation_pairs.batch(range(40)))
    summary = json.loads(Path("run/summary.json").read_text())
    metrics = summary["metrics"]
    assert summary["val_pairs"] == 40 < summary["counts"]["validation"]["kept"]
    assert metrics["val/guard/kl"] == pytest.approx(float(expected[[0, 13, 26]].mean()), rel=1e-5)
    assert metrics["val/kl"] == pytest.approx(float(expected.mean()), rel=1e-5) and metrics["val/kl"] > 0.01
