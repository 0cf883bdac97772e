"""Dashboard and the TensorBoard files of a real run that is resumed once."""

import re

import numpy as np
import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata

from pacmr_lightning import cli
from pacmr_lightning.analysis.figures import draw_precision_recall
from pacmr_lightning.callbacks.dashboard import CHARTS, RESULTS

from ..conftest import short_fit, with_callback

UPDATES = 6


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_llama):
    """Return a folder with a run of six updates, resumed after four, and a DPO run."""
    folder = tmp_path_factory.mktemp("runs")
    model = tiny_llama(folder / "model")
    callbacks = [
        *map(with_callback, ("Dashboard", "WeightRecorder")),
        with_callback("WeightDistributions", every=2),
        with_callback("GoldReward", samples=4, max_new_tokens=3, every=2),
        with_callback("WeightGap", probe_pairs=8),
    ]
    vnet = """--model.method pacmr --model.weighting VNetWeighting --model.weighting.every 1
        --model.weighting.learning_rate 0.05 --trainer.max_steps"""
    for name, more in (
        ("pacmr", f"{vnet} 4"),
        ("pacmr", f"{vnet} {UPDATES} --ckpt_path last"),
        ("dpo", f"--trainer.max_steps {UPDATES}"),
    ):
        words = f"""--data.source EmbeddedWorld --data.source.pairs 24 --data.source.validation_pairs 8
            --data.global_batch_size 8 --data.meta_batch_size 4 --data.noise_rate 0.3 --model.policy.rank 2
            --trainer.val_check_interval 2 --trainer.log_every_n_steps 10 --trainer.max_epochs -1
            --trainer.default_root_dir {folder / name} {" ".join(callbacks)} {more}"""
        cli.main(short_fit(model, words))
    return folder


@pytest.fixture(scope="module")
def board(runs):
    """Return the runs as TensorBoard reads them."""
    found = EventMultiplexer(tensor_size_guidance={"tensors": 0})
    found.AddRunsFromDirectory(str(runs))
    return found.Reload()


def test_a_short_run_has_whole_curves(board):
    for run in ("pacmr", "dpo"):
        assert [event.step for event in board.Tensors(run, "train/loss")] == list(range(UPDATES))


def test_the_layout_names_curves_that_are_there(board):
    layout = layout_pb2.Layout()
    (event,) = board.Tensors("pacmr", "custom_scalars__config__")
    layout.ParseFromString(event.tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for chart in layout.category[0].chart}
    assert set(charts) == set(CHARTS)
    tags = board.Runs()["pacmr"]["tensors"]
    for title, patterns in charts.items():
        found = [tag for pattern in patterns for tag in tags if re.match(pattern, tag)]
        assert sorted(found) == sorted(CHARTS[title])


def test_hparams_compare_methods(runs, board):
    assert set(board.Runs()) == {"pacmr", "dpo"} and (runs / "pacmr/tensorboard/hparams.yaml").exists()
    found = {}
    for run in ("pacmr", "dpo"):
        content = board.SummaryMetadata(run, metadata.SESSION_START_INFO_TAG).plugin_data.content
        values = metadata.parse_session_start_info_plugin_data(content).hparams
        found[run] = {name: value.string_value or value.number_value for name, value in values.items()}
        content = board.SummaryMetadata(run, metadata.EXPERIMENT_TAG).plugin_data.content
        experiment = metadata.parse_experiment_plugin_data(content)
        assert {info.name for info in experiment.hparam_infos} == found[run].keys()
        metrics = [info.name.tag for info in experiment.metric_infos]
        assert metrics == list(RESULTS) and set(metrics) <= set(board.Runs()["pacmr"]["tensors"])
    assert found["pacmr"].items() >= {"method": "pacmr", "vnet_every": 1, "vnet_tau": 0.6}.items()
    assert found["dpo"]["method"] == "dpo" and not any(name.startswith("vnet") for name in found["dpo"])
    for name in ("noise_rate", "seed", "model", "beta"):
        assert found["pacmr"][name] == found["dpo"][name]
    assert found["dpo"].items() >= {"task": "preferences", "noise_rate": 0.3, "seed": 42}.items()


def test_precision_and_recall_of_flips(runs, board):
    assert [board.Tensors(run, "flips")[-1].step for run in ("pacmr", "dpo")] == [UPDATES - 1] * 2
    flipped, scores = np.array([True, False, True, False]), np.array([0.9, 0.8, 0.7, 0.1])
    [axis] = draw_precision_recall(flipped, {"low_u": scores}).axes
    recall, precision = axis.lines[0].get_data()
    assert recall.tolist() == [0.5, 0.5, 1, 1] and precision.tolist() == [1, 1 / 2, 2 / 3, 2 / 4]


def test_nothing_to_log_to(runs, tmp_path):
    words = f"fit --config {runs}/dpo/config.yaml --trainer.logger false --trainer.max_steps 1"
    cli.main([*words.split(), "--trainer.default_root_dir", str(tmp_path)])
    assert not list(tmp_path.rglob("*tfevents*"))
