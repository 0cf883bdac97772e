"""WeightDistributions: the distributions drawn, and their values."""

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.colors import to_rgb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pacmr_lightning.analysis.figures import BINS, GROUPS, draw_weight_distributions
from pacmr_lightning.callbacks import WeightRecorder
from pacmr_lightning.callbacks.weight_figures import WeightDistributions, log_histogram
from pacmr_lightning.files import save_figure
from pacmr_lightning.rewards import Visits
from pacmr_lightning.runs.folder import read_weights

from ..conftest import quiet_trainer
from .conftest import Data, Module, fit


def histograms(folder):
    events = EventAccumulator(str(folder / "tensorboard"), {"histograms": 0, "images": 0}).Reload()
    assert [event.step for event in events.Images("pair_weights/distributions")] == [2, 11]
    return {tag: events.Histograms(tag) for tag in events.Tags()["histograms"]}


def run_with(folder, *arguments):
    callbacks = [WeightRecorder(), WeightDistributions(steps=[3], window=16, every=None)]
    fit(folder, callbacks, *arguments, logger=TensorBoardLogger(folder, "tensorboard", ""))
    files = {path.name for path in (folder / "analysis").iterdir()}
    names = ("weight-distributions-step-00003", "weight-distributions-step-00012")
    assert files == {f"{name}.{ending}" for name in names for ending in ("png", "pdf")}


def test_both_labels_of_a_run(tmp_path):
    run_with(tmp_path)
    found = histograms(tmp_path)
    assert len(found) == 2 * 3
    rows = read_weights(tmp_path)
    for name, flipped in (("unflipped", False), ("flipped", True)):
        for column, recorded in (("g", "weight"), ("u", "u"), ("delta", "delta")):
            for event, first in zip(found[f"pair_weights/{name}/{column}"], (1, 10), strict=True):
                part = rows[rows["step"].between(first, first + 1)]
                expected = part.loc[part["flipped"] == flipped, recorded].astype(float)
                values = event.histogram_value
                assert values.num == len(expected) > 0
                assert values.sum == pytest.approx(expected.sum(), rel=1e-6)
                assert values.min == pytest.approx(expected.min(), rel=1e-6)


@pytest.mark.parametrize(
    ("flip", "groups"),
    [
        (lambda i: None, {"all"}),
        (lambda i: None if i % 2 else i % 4 == 0, {"unflipped", "flipped", "unknown"}),
    ],
)
def test_no_label_is_invented(tmp_path, flip, groups):
    run_with(tmp_path, Module(), Data(flip))
    found = histograms(tmp_path)
    assert {tag.split("/")[1] for tag in found} == groups
    assert sum(events[-1].histogram_value.num for events in found.values()) == 3 * 16


@pytest.mark.parametrize("value", [0.0, 1.0, -3e4])
def test_neighbours_in_float32(tmp_path, value):
    """As the weights of a VNet after its first update: np.histogram has too few numbers between them."""
    above = np.nextafter(np.float32(value), np.float32(np.inf))
    trainer = quiet_trainer(tmp_path, logger=TensorBoardLogger(tmp_path, "", ""))
    for tag, values in {"two": [value, above, above], "one": [value] * 3}.items():
        log_histogram(trainer, tag, np.array(values, np.float32))
    trainer.logger.save()
    events = EventAccumulator(str(tmp_path), {"histograms": 0}).Reload()
    for tag, high in {"two": above, "one": value}.items():
        found = events.Histograms(tag)[0].histogram_value
        assert (found.num, found.min, found.max, sum(found.bucket)) == (3, value, high, 3)


def visits_of(weight, flipped):
    return Visits(np.zeros(len(weight)), np.zeros(len(weight)), weight, flipped)


def test_weights_above_one_are_in_the_figure():
    visits = visits_of(np.array([0.5, 1.5, 2.0, 3.0], np.float32), np.full(4, -1, np.int8))
    (axis,) = draw_weight_distributions(visits, step=1).axes
    assert axis.get_xlim() == (0, 3) and sum(bar.get_height() > 0 for bar in axis.patches) == 4


def test_the_figure_has_the_densities_and_means(tmp_path):
    generator = np.random.default_rng(0)
    flipped = (np.arange(1000) % 5 == 0).astype(np.int8)
    weight = np.where(flipped == 1, generator.beta(2, 4, 1000), generator.beta(5, 2, 1000)).astype(np.float32)
    (axis,) = draw_weight_distributions(visits_of(weight, flipped), step=2901).axes
    assert "2,901" in axis.get_title()
    bars = axis.patches
    assert len(bars) == 2 * (len(BINS) - 1)
    lines = [line.get_segments()[0][0, 0] for line in axis.collections]
    for place, (name, value) in enumerate((("unflipped", 0), ("flipped", 1))):
        part = weight[flipped == value].astype(float)
        heights = [bar.get_height() for bar in bars[place * 30 : (place + 1) * 30]]
        np.testing.assert_allclose(heights, np.histogram(part, BINS)[0] / len(part) * 30, rtol=1e-6)
        assert sum(heights) / 30 == pytest.approx(1)
        assert bars[place * 30].get_facecolor()[:3] == to_rgb(GROUPS[name])
        assert lines[place] == pytest.approx(part.mean(), rel=1e-6)
    difference = weight[flipped == 0].mean() - weight[flipped == 1].mean()
    assert axis.get_legend().get_title().get_text() == f"gap {difference:.2f}"
    # Laid out when it is saved, and not again for the next file or logger.
    before = axis.get_position().bounds
    save_figure(axis.figure, tmp_path / "figure")
    saved = axis.get_position().bounds
    axis.set_title("a title of\nmany\nlines")
    axis.figure.draw_without_rendering()
    assert before != saved == axis.get_position().bounds


def test_one_distribution_has_no_gap():
    weight = np.linspace(0.1, 0.9, 9)
    (axis,) = draw_weight_distributions(visits_of(weight, np.full(9, -1)), step=1).axes
    assert len(axis.patches) == len(BINS) - 1
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["all (9), mean 0.50"]
    assert axis.get_legend().get_title().get_text() == ""
    (axis,) = draw_weight_distributions(visits_of(weight, np.zeros(9)), step=1).axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["unflipped (9), mean 0.50"]
    assert axis.get_legend().get_title().get_text() == "", "there is nothing to be apart from"
