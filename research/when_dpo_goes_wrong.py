"""Curves of DPO runs that go wrong, with healthy ones beside them: the figure of docs/when_dpo_goes_wrong.md.

    pacmr sweep research/sweeps/when_dpo_goes_wrong.yaml
    python -m research.when_dpo_goes_wrong --folder runs/sweeps/when_dpo_goes_wrong --figure FILE

Without ``--folder`` it draws the kept curves.
"""

from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from pacmr_lightning.errors import UserError
from pacmr_lightning.files import write_frame
from pacmr_lightning.runs.folder import METRICS, SUMMARY
from pacmr_lightning.sweep.figures import COLORS

from . import command, write_png

NUMBERS = Path(__file__).parent / "numbers" / "when-dpo-goes-wrong.csv"
TRAIN = ("loss", "rewards/accuracies", "rewards/chosen", "rewards/margins")
PAIRS = ("loss", "rewards/accuracies", "rewards/margins", "logps/chosen", "kl", "guard/kl")
RESPONSES = ("sequence_kl", "gold_reward", "response_tokens", "response_perplexity", "response_repetition")
KEPT = [*(f"train/{tag}" for tag in TRAIN), *(f"val/{tag}" for tag in (*PAIRS, *RESPONSES))]
BLUE, ORANGE, GREEN, _, YELLOW, *_ = COLORS


class Curve(NamedTuple):
    """A run's values of a tag, by default the panel's; ``place`` of the label is in shares of the panel."""

    run: str
    color: str
    label: str
    place: tuple[float, float]
    tag: str = ""
    style: str = "-"


HEALTHY, GUARDED = Curve("dpo-beta0.5", BLUE, "healthy", (0.55, 0.21)), "guarded-beta0.05"
CLEAN, LOOSE = "clean-beta1.0", "clean_loose-beta0.05"
FAST = Curve("fast-learning_rate0.02", ORANGE, "learning rate × 40", (0.16, 0.76))
VAL, TRAINED = "val/rewards/accuracies", "train/rewards/accuracies"
PANELS = {
    ("1 Chosen log-probs fall", "val/logps/chosen"): (
        Curve(CLEAN, BLUE, "beta 1", (0.6, 0.86)),
        Curve(LOOSE, ORANGE, "beta 0.05", (0.56, 0.44)),
    ),
    ("2 KL runs away", "val/guard/kl"): (
        Curve(CLEAN, BLUE, "beta 1", (0.65, 0.05)),
        Curve(LOOSE, ORANGE, "beta 0.05", (0.5, 0.62)),
        Curve(GUARDED, GREEN, "KLGuard", (0.0, 0.7)),
    ),
    ("3 Loops, gibberish", "val/response_perplexity"): (HEALTHY, FAST),
    ("4 Accuracy 1, loss 0", "rewards/accuracies"): (
        Curve("dpo-beta0.5", BLUE, "healthy, val", (0.5, 0.62), VAL),
        Curve("few-beta0.5", ORANGE, "160 pairs, val", (0.4, 0.03), VAL),
        Curve("few-beta0.5", ORANGE, "160 pairs, train", (0.1, 0.97), TRAINED, "--"),
    ),
    ("5 Nothing moves", "val/loss"): (
        HEALTHY._replace(place=(0.55, 0.22)),
        Curve("slow-beta0.5", ORANGE, "learning rate / 100", (0.2, 0.97)),
        Curve("loose-beta0.005", YELLOW, "beta / 100, KL {kl}", (0.26, 0.73)),
    ),
    ("6 Responses get longer", "val/response_tokens"): (
        HEALTHY._replace(place=(0.55, 0.06)),
        Curve("longer-beta0.5", YELLOW, "labels follow length", (0.16, 0.28)),
        FAST,
    ),
    ("7 Labels follow a shortcut", "rewards/accuracies"): (
        Curve("dpo-beta0.5", BLUE, "healthy, val", (0.5, 0.58), VAL),
        Curve("dpo-beta0.5", BLUE, "train", (0.72, 0.42), TRAINED, "--"),
        Curve("longer-beta0.5", ORANGE, "length, val", (0.5, 0.06), VAL),
        Curve("longer-beta0.5", ORANGE, "length, train", (0.3, 0.97), TRAINED, "--"),
    ),
    ("8 Better loss, worse text", "val/gold_reward"): (
        Curve(CLEAN, BLUE, "beta 1", (0.6, 0.97)),
        Curve(LOOSE, ORANGE, "beta 0.05,\nloss {loss}", (0.36, 0.45)),
        Curve(GUARDED, GREEN, "KLGuard", (0.36, 0.62)),
    ),
}
"""Title, y axis and curves of each symptom."""


def curves_of(folder: Path) -> pd.DataFrame:
    """Return a row per run of the sweep and logged step, with the tags that are drawn or printed."""
    ended = sorted(path.parent for path in folder.glob(f"*-seed*/{SUMMARY}"))
    runs = {path.name.rpartition("-seed")[0].replace("-noise30", ""): path for path in ended}
    if missing := sorted({*pd.read_csv(NUMBERS)["run"]} - {*runs}):
        raise UserError(
            f"{folder} has no runs {', '.join(missing)} that ended; run pacmr sweep, or leave out --folder."
        )
    found = []
    for name, path in runs.items():
        frame = pd.read_csv(path / METRICS).groupby("step", as_index=False).first()
        frame = frame[frame["val/loss"].notna() | frame["val/sequence_kl"].notna()]
        found.append(frame[["step", *KEPT]].round(4).assign(run=name))
    return pd.concat(found)[["run", "step", *KEPT]]


def draw(axis: Axes, title: str, tag: str, curves: tuple[Curve, ...], numbers: pd.DataFrame) -> None:
    """Draw a symptom."""
    for curve in curves:
        found = numbers[numbers["run"].eq(curve.run)].set_index("step")
        values = found[curve.tag or tag].dropna()
        axis.plot(values.index + 1, values, curve.style, color=curve.color, lw=1.6)
        axis.plot(values.index[-1:] + 1, values[-1:], "o", color=curve.color, ms=3.5)
        loss, kl = found["val/loss"].dropna(), found["val/sequence_kl"].dropna()
        text = curve.label.format(loss=f"{loss.iloc[2]:.2f} → {loss.iloc[-1]:.2f}", kl=f"{kl.iloc[-1]:.0f}")
        place = {"va": "center", "transform": axis.transAxes}
        axis.text(*curve.place, text, color=curve.color, fontsize=8.5, **place)
    axis.margins(y=0.16)
    if tag == "val/guard/kl":
        axis.axhline(1, color="0.6", lw=1, ls=":")
    elif tag == "val/response_perplexity":
        axis.set_yscale("log")
    elif tag == "val/response_tokens":
        axis.set(yscale="log", yticks=[5, 10, 20], yticklabels=[5, 10, 20])
        axis.minorticks_off()
    axis.set(xlim=(0, 205), xticks=[0, 100, 200])
    axis.set_title(title, loc="left", fontsize=9)
    axis.set_ylabel(tag, fontsize=8.5)
    axis.tick_params(labelsize=8.5)
    axis.spines[["top", "right"]].set_visible(False)


def when_dpo_goes_wrong(*, figure: str, folder: str | None = None) -> None:
    """Draw a panel per symptom.

    Args:
        figure: PNG to write.
        folder: of the sweep; its curves replace the kept ones, ``research/numbers/when-dpo-goes-wrong.csv``.
    """
    if folder is not None:
        write_frame(NUMBERS, curves_of(Path(folder)))
    numbers = pd.read_csv(NUMBERS)
    drawing, axes = plt.subplots(2, 4, figsize=(9.5, 4.6), layout="constrained", dpi=150)
    for axis, ((title, tag), curves) in zip(axes.flat, PANELS.items(), strict=True):
        draw(axis, title, tag, curves, numbers)
    for axis in axes[1]:
        axis.set_xlabel("updates", fontsize=8.5)
    write_png(drawing, figure)
    plt.close(drawing)


main = command("when_dpo_goes_wrong", when_dpo_goes_wrong)

if __name__ == "__main__":
    main()
