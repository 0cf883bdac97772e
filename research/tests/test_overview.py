"""README's figure: its means are those of the ten held-out seeds, and it is drawn from a run's surface."""

import re
from pathlib import Path

import numpy as np
import pytest

from pacmr_lightning.analysis.surface import Surface, save_surface
from pacmr_lightning.rewards import Visits
from research.overview import CURVES, held_out, main

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_ten_seeds_a_point():
    numbers = held_out()
    assert numbers["count"].eq(10).all() and set(numbers["method"]) == set(CURVES)
    rates = numbers.groupby("method")["noise"].apply(list)
    assert rates["estimated"] == rates["dpo_two_epochs"] == rates["first"] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert rates["pacmr"] == [0.0, 0.2, 0.3, 0.4] and rates["dpo"] == [0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    ("row", "method", "other"),
    [
        ("PACMR-DPO minus DPO, one epoch", "pacmr", "dpo"),
        ("refine minus DPO, two epochs", "estimated", "dpo_two_epochs"),
    ],
)
def test_differences_in_readme(row, method, other):
    """Its table has the differences of the means that the figure shows."""
    means = held_out().pivot(index="noise", columns="method", values="mean").loc[[0.2, 0.3, 0.4]]
    (line,) = (line for line in README.splitlines() if row in line)
    printed = [float(number) for number in re.findall(r"([+-]\d\.\d\d) \[", line)]
    np.testing.assert_allclose(means[method] - means[other], printed, atol=0.0051)


def test_figure(tmp_path):
    rng = np.random.default_rng(0)
    visits = Visits(*rng.normal(size=(2, 50)), weight=rng.random(50), flipped=np.arange(50) % 2)
    delta, u = np.linspace(-2, 2, 5), np.linspace(-3, 3, 7)
    ones = np.ones((5, 7))
    save_surface(Surface(10, "pacmr", "world", 0.3, delta, u, ones, 0 * ones, ones / 35, visits), tmp_path)
    main([str(tmp_path), "--figure", str(tmp_path / "x.png")])
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
