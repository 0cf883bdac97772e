"""Tags and files of each public callback, alone, from YAML, in a plain Trainer."""

import re

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, Trainer
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

from pacmr_lightning import callbacks
from pacmr_lightning.weighting import VNetWeighting

from .conftest import train

SAMPLED = {f"val/{name}" for name in ("sequence_kl", "response_tokens", "response_repetition")}
LEFT = {
    "Dashboard": ({"custom_scalars__config__"}, set()),
    "GenerationWriter": (set(), {"generations.jsonl", "generations.jsonl.answers.sqlite"}),
    "GoldReward": (SAMPLED | {"val/gold_reward"}, {"samples.jsonl"}),
    "Health": (set(), set()),
    "KLGuard": ({"val/guard/kl"}, set()),
    "LogProgress": (set(), set()),
    "NoiseMask": (set(), {"noise_mask.parquet"}),
    "RunCheckpoint": (set(), {"checkpoints/last.ckpt"}),
    "RunSummary": (set(), {"summary.json"}),
    "SampleResponses": ({"responses/text_summary"}, {"responses.jsonl"}),
    "SequenceKL": (SAMPLED, set()),
    "Throughput": ({"wall_clock/train/device/samples_per_sec"}, set()),
    "VNetSurfaces": (
        {f"pair_weights/{name}" for name in ("heat_maps", "weight_function", "surfaces")},
        {f"analysis/surfaces-step-00003.{ending}" for ending in ("png", "pdf", "csv", "npz")}
        | {f"analysis/heat-maps-step-00003.{ending}" for ending in ("png", "pdf")},
    ),
    "WeightDistributions": (
        {"pair_weights/distributions", "pair_weights/flipped/u", "flips"},
        {f"analysis/weight-distributions-step-00003.{ending}" for ending in ("png", "pdf")},
    ),
    "WeightGap": ({"pair_weights/probe_gap", "pair_weights/probe_auroc"}, {"analysis/weight-gap.csv"}),
    "WeightRecorder": (set(), {"weights/part-000-00000.parquet"}),
}
"""Some of the tags, and all files, of each callback."""
OPTIONS = {
    "GoldReward": {"samples": 4, "max_new_tokens": 3},
    "RunCheckpoint": {"every_n_train_steps": 9},
    "SampleResponses": {"prompts": 1, "max_new_tokens": 3},
    "SequenceKL": {"samples": 4, "max_new_tokens": 3},
    "Throughput": {"window_size": 2},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_llama):
    """Train three updates, or predict, with one callback; return tags and files."""
    model = tiny_llama(tmp_path_factory.mktemp("model"))

    def run(callback=None):
        folder = tmp_path_factory.mktemp("run")
        start = Trainer.predict if isinstance(callback, callbacks.GenerationWriter) else Trainer.fit
        options = {"start": start, "max_steps": 3, "limit_predict_batches": 1}
        train(folder, model, [callback] if callback else [], weighting=VNetWeighting(every=1), **options)
        board = EventMultiplexer({folder.name: str(folder)}).Reload()
        tags = set(board.Runs().get(folder.name, {}).get("tensors", ()))
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        return tags, {name for name in files if "tfevents" not in name}

    return run


@pytest.fixture(scope="module")
def bare(run):
    tags, files = run()
    assert {"train/loss", "train/meta/d_norm"} <= tags
    return tags, files


@pytest.mark.parametrize("name", [name for name, kind in vars(callbacks).items() if isinstance(kind, type)])
def test_alone(run, bare, name):
    options = {"class_path": f"pacmr_lightning.callbacks.{name}", "init_args": OPTIONS.get(name, {})}
    parser = ArgumentParser()
    parser.add_argument("--callback", type=Callback)
    parsed = parser.parse_args(["--callback", yaml.safe_dump(options)])
    callback = parser.instantiate(parsed).callback
    tags, files = run(callback)
    expected, left = LEFT[name]
    new = tags - bare[0]
    assert expected <= new and bool(expected) == bool(new), new
    assert files - bare[1] == left
    # Each tag in whole, or its last part in a list of a group; a parent's docstring counts.
    documented = "".join(kind.__doc__ or "" for kind in type(callback).__mro__[:2])
    heads = ("Tags", "Files", "Cost")
    assert all(head in documented for head in heads), documented
    for tag in new if name != "Dashboard" else ():  # its docstring names the page
        word = tag.removesuffix("/text_summary").split("/")[-1]
        assert word.removeprefix("probe_") in documented, tag
    for file in left:
        assert re.split(r"-step|-\d", file.split("/")[-1])[0] in documented, file
