"""The page of runs that go wrong: its numbers are those of the kept curves, which a sweep's replace."""

from pathlib import Path

import pandas as pd
import pytest

from research import when_dpo_goes_wrong as page
from research.tests.test_numbers import table

TEXT = (Path(__file__).parents[2] / "docs/when_dpo_goes_wrong.md").read_text(encoding="utf-8")
CURVES = pd.read_csv(page.NUMBERS)
ENDS = CURVES.groupby("run", sort=False).last()
ROWS = {
    "30% flipped, beta 0.5, learning rate 5e-4": "dpo-beta0.5",
    "`sft_weight: 0.1`": "sft-beta0.5",
    "learning rate × 10": "fast-learning_rate0.005",
    "learning rate × 40": "fast-learning_rate0.02",
    "learning rate / 100": "slow-beta0.5",
    "beta 0.005": "loose-beta0.005",
    "160 pairs, 40 epochs": "few-beta0.5",
    "30% follow length": "longer-beta0.5",
    "30% follow length, beta 2": "longer-beta2.0",
    "no flips, beta 1": "clean-beta1.0",
    "no flips, beta 0.05": "clean_loose-beta0.05",
    "no flips, beta 0.05, `KLGuard`": "guarded-beta0.05",
}


def test_table():
    printed = table(TEXT, "| run | gold reward | KL (nats) | validation accuracy | perplexity |\n")
    assert list(printed) == list(ROWS) and set(ROWS.values()) == set(ENDS.index)
    for row, run in ROWS.items():
        end = ENDS.loc[run]
        assert printed[row] == [
            f"{end['val/gold_reward']:.2f}",
            f"{end['val/sequence_kl']:.1f}",
            f"{end['val/rewards/accuracies']:.2f}",
            f"{end['val/response_perplexity']:,.0f}",
        ]


@pytest.mark.parametrize(
    ("run", "tag", "update", "printed"),
    [
        ("slow-beta0.5", "val/logps/chosen", 200, "10.9"),
        ("clean-beta1.0", "val/logps/chosen", 200, "11.9"),
        ("sft-beta0.5", "train/rewards/chosen", 200, "-0.22"),
        ("dpo-beta0.5", "train/rewards/chosen", 200, "-0.31"),
        ("few-beta0.5", "val/gold_reward", 60, "3.36"),
        ("slow-beta0.5", "val/rewards/accuracies", 200, "0.78"),
        ("longer-beta0.5", "train/rewards/accuracies", 200, "0.86"),
        ("longer-beta0.5", "val/response_tokens", 200, "5.3"),
        ("clean_loose-beta0.05", "val/rewards/accuracies", 40, "0.76"),
    ],
)
def test_numbers_in_the_text(run, tag, update, printed):
    row = CURVES[CURVES["run"].eq(run) & CURVES["step"].eq(update - 1)]
    value = abs(row[tag].item()) if printed[0] != "-" else row[tag].item()
    assert f"{value:.{len(printed.partition('.')[2])}f}" == printed and printed in TEXT


def test_curves_of_a_sweep(tmp_path, monkeypatch):
    """Each run's validations, under its name, become the kept curves; the figure is drawn from them."""
    monkeypatch.setattr(page, "NUMBERS", tmp_path / "kept.csv")
    CURVES.to_csv(page.NUMBERS)
    for run in ROWS.values():
        with pytest.raises(SystemExit):
            page.main(["--folder", str(tmp_path / "sweep"), "--figure", str(tmp_path / "x.png")])
        assert "Unnamed: 0" in pd.read_csv(page.NUMBERS), "an unfinished sweep leaves the kept file as it was"
        method, _, varied = run.partition("-")
        folder = tmp_path / f"sweep/{method}-noise30-{varied}-seed0"
        folder.mkdir(parents=True)
        rows = CURVES[CURVES["run"].eq(run)].drop(columns="run")
        training = pd.DataFrame({"step": [9], "train/loss": [0.7]})
        pd.concat([training, rows]).to_csv(folder / "metrics.csv", index=False)
        (folder / "summary.json").touch()
    page.main(["--folder", str(tmp_path / "sweep"), "--figure", str(tmp_path / "x.png")])
    kept = pd.read_csv(tmp_path / "kept.csv").set_index(["run", "step"]).sort_index()
    pd.testing.assert_frame_equal(kept, CURVES.set_index(["run", "step"]).sort_index())
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
