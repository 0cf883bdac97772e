"""Figure of runs side by side: reward against KL if it is known, else margins; names at the curves' ends."""

import json

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from pacmr_lightning.analysis.learning_curves import draw_learning_curves


@pytest.fixture
def run(tmp_path):
    """Writes the files of a finished run, with gold reward and KL if a reward is given."""

    def write(name, accuracy, reward=None, weights=()):
        folder = tmp_path / name
        (folder / "weights").mkdir(parents=True)
        metrics = {} if reward is None else {"val/gold_reward": reward, "val/sequence_kl": reward / 2}
        summary = {"method": name, "flip_auroc": 0.8 if weights else None, "metrics": metrics}
        (folder / "summary.json").write_text(json.dumps(summary))
        curves = {
            "step": [9, 19],
            "val/rewards/accuracies": [0.5, accuracy],
            "val/rewards/margins": [0.1, 0.2],
        }
        pd.DataFrame(curves).to_csv(folder / "metrics.csv", index=False)
        if weights:
            flipped = pd.array([i % 2 == 1 for i in range(len(weights))], "boolean")
            rows = {"id": [str(i) for i in range(len(weights))], "step": 19, "u": 0.1, "delta": 0.0}
            rows |= {"a": 1.0, "b": 0.0, "weight": weights, "flipped": flipped}
            pd.DataFrame(rows).to_parquet(folder / "weights/part-000-00000.parquet")
        return str(folder)

    return write


def axes_of(monkeypatch, runs, path):
    """The axes of the figure that is written."""
    found = []
    monkeypatch.setattr(plt, "close", found.append)
    draw_learning_curves(runs, str(path))
    monkeypatch.undo()
    plt.close(found[0])
    assert path.stat().st_size
    return found[0].axes


def words(axis):
    return [text.get_text() for text in axis.texts]


def test_rewards_against_kl(run, tmp_path, monkeypatch):
    runs = [run("dpo", 0.7, 3.5), run("pacmr", 0.7, 3.7, weights=[0.9, 0.2, 0.7, 0.4])]
    rewards, accuracy, weights = axes_of(monkeypatch, runs, tmp_path / "x.png")
    assert rewards.get_xlabel() == "KL to the reference (nats)" and words(rewards) == ["dpo", "pacmr"]
    assert accuracy.get_ylabel() == "Accuracy on validation pairs"
    # Both end at 0.7, so one name moves up.
    heights = sorted(text.get_position()[1] for text in accuracy.texts)
    assert heights[0] == pytest.approx(0.7) and heights[1] > 0.71
    assert words(weights) == ["unflipped: mean 0.80", "flipped: mean 0.30"]


def test_margins_without_a_reward(run, tmp_path, monkeypatch):
    """One run of two has a reward: nothing can be compared by it. No weights, no third panel."""
    runs = [run("dpo", 0.6), run("pacmr", 0.7, 3.7)]
    margins, accuracy = axes_of(monkeypatch, runs, tmp_path / "x.pdf")
    assert margins.get_ylabel() == "Reward margin $u$ on validation pairs"
    assert words(margins) == words(accuracy) == ["dpo", "pacmr"]
