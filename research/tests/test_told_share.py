"""Lines over noise rates: a panel for a method that varies an option, and one for all others."""

from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pacmr_lightning.sweep.results import NUMBERS, seed_means
from pacmr_lightning.sweep.spec import Sweep, SweptMethod, read_sweep
from research.told_share import draw_rates

ROOT = Path(__file__).parents[2]


def test_panels_and_lines():
    sweep = read_sweep(str(ROOT / "research/sweeps/told_share.yaml"))
    rows = [
        {"row": row, "method": method, "noise": noise, "seed": seed, "beta": beta, "bound": False}
        | {"gold_reward": 4 - noise + 0.1 * seed + (beta or 0), "val_accuracy": 0.5}
        for row, method, beta in (
            ("DPO, β = 0.5", "dpo", 0.5),
            ("DPO, β = 1.0", "dpo", 1.0),
            ("Refined", "estimated", np.nan),
        )
        for noise in (0.0, 0.1, 0.3, 0.45)
        for seed in (0, 1)
    ]
    frame = pd.DataFrame(rows)
    frame = frame.reindex(columns=[*frame.columns, *(name for name in NUMBERS if name not in frame)])
    frame.loc[frame["method"].eq("estimated"), "gold_reward"] = 4.0
    figure = draw_rates(sweep, frame, seed_means(frame))
    dpo, others = figure.axes
    assert dpo.get_title() == "DPO" and others.get_title() == "One setting each"
    assert [text.get_text() for text in dpo.get_legend().get_texts()] == ["β = 0.5", "β = 1"]
    assert [text.get_text() for text in others.get_legend().get_texts()] == ["Refined"]
    line = dpo.containers[0].lines[0]
    np.testing.assert_allclose(line.get_xdata(orig=False), [0, 10, 30, 45])
    np.testing.assert_allclose(line.get_ydata(orig=False), [4.55, 4.45, 4.25, 4.1])
    plt.close(figure)


def test_values_that_are_no_numbers():
    """An option's value may be a class, and its last word a column's of each run."""
    kinds = ["NearTieNoise", "AnnotatorNoise"]
    sweep = Sweep([], {"dpo": SweptMethod(vary={"data.noise": kinds})}, [0.0, 0.1, 0.3, 0.45], [0], "")
    rows = [
        {"row": f"dpo, data.noise = {kind}", "method": "dpo", "noise": noise, "seed": 0, "bound": False}
        | {"data.noise": kind, "gold_reward": 4 - noise}
        for kind, noise in product(kinds, sweep.noise_rates)
    ]
    frame = pd.DataFrame(rows)
    frame = frame.reindex(columns=[*frame.columns, *(name for name in NUMBERS if name not in frame)])
    figure = draw_rates(sweep, frame, seed_means(frame))
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [f"data.noise = {k}" for k in kinds]
    plt.close(figure)
