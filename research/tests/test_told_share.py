"""Gold reward against noise rate: ten seeds per point, and the betas that tuning seeds choose."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from research import told_share
from research.told_share import METHODS, TUNED, held_out_runs

NUMBERS = Path(__file__).parents[1] / "numbers"


def test_every_point_has_the_ten_held_out_seeds():
    runs = held_out_runs()
    seeds = runs.groupby(["method", "noise"])["seed"].agg(lambda values: sorted(values))
    assert all(values == list(range(10)) for values in seeds)
    rates = {method: set(part) for method, part in runs.groupby("method")["noise"]}
    assert rates == {method: set(TUNED) for method in METHODS} | {"pacmr": {0.0, 0.2, 0.3, 0.4}}


@pytest.mark.parametrize("rate", [0.2, 0.3, 0.4])
def test_betas_of_two_epochs(rate):
    tuning = pd.read_csv(NUMBERS / "frontier-tuning.csv")
    part = tuning[tuning["method"].eq("dpo_two_epochs") & np.isclose(tuning["noise"], rate)]
    assert part.groupby("beta")["gold_reward"].mean().idxmax() == TUNED[rate]


def test_figure(tmp_path):
    told_share.main(["--figure", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
