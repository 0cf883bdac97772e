"""The learning rate that a model's size asks for."""

import math

import pytest

from pacmr_lightning.modules.schedule import LEARNING_RATES, suited_learning_rate
from pacmr_lightning.policy.base_model import parameter_count


@pytest.mark.parametrize(
    ("parameters", "rate", "why"),
    [
        (137_000, 5e-4, "synthetic benchmark"),
        (135e6, 2e-4, "real text"),
        (0.5e9, 6e-5, "interpolated, not measured"),
        (1.5e9, 2e-5, "interpolated, not measured"),
        (7e9, 5e-6, "Qu et al."),
    ],
)
def test_rates_by_size(parameters, rate, why):
    found, source = suited_learning_rate(parameters)
    assert found == rate and why in source


def test_what_was_not_measured_lies_on_a_line():
    """Of the logarithms between 135 million and 7 billion parameters."""
    slope = math.log(5e-6 / 2e-4) / math.log(7e9 / 135e6)
    for parameters in (0.5e9, 1.5e9):
        line = 2e-4 * (parameters / 135e6) ** slope
        assert suited_learning_rate(parameters)[0] == pytest.approx(line, rel=0.1)
    assert [most for most, *_ in LEARNING_RATES] == sorted(most for most, *_ in LEARNING_RATES)


def test_parameters_are_counted_without_weights(tiny_llama, tmp_path):
    folder = tiny_llama(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    assert parameter_count(folder) == 512 * 16 * 2 + 4 * 16 * 16 + 3 * 16 * 16 + 3 * 16
