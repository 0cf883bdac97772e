"""Time and memory of PACMR-DPO against DPO, over whole VNet periods, with the coverage pinned.

    python benchmarks/pacmr_step.py [--repetitions 3] [--figure docs/pacmr-step.png] [--device cuda]

Updates have 32 random pairs and a meta-batch of 64 pairs every 10th, with a cached reference; the first is a
warm-up. Memory is that of two updates, one with VNet's, in its own process (see ``PeakMemory``).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from bars import bars
from lightning.pytorch import Callback
from machine import describe, in_fresh_process, spread
from rich.console import Console
from rich.table import Table
from timed_runs import (
    Memory,
    Shape,
    add_shape,
    make_data,
    make_policy,
    quiet,
    random_rows,
    shape_of,
    train,
    write_model,
    write_rows,
)
from torch import Tensor
from tqdm import tqdm

from pacmr_lightning.meta_gradient import (
    CentralDifference,
    GhostDotProduct,
    MetaGradientEstimator,
    PromptAugmentationConsistency,
)
from pacmr_lightning.weighting import VNetWeighting

EVERY = 10
META_PAIRS = 64
ESTIMATORS: dict[str, type[MetaGradientEstimator]] = {
    "ghost": GhostDotProduct,
    "central difference": CentralDifference,
}
Contestant = tuple[str, float] | None
"""Estimator and coverage of PACMR-DPO, or None for DPO."""
CONTESTANTS: list[Contestant] = [
    None,
    *(("ghost", share) for share in (0.0, 0.7, 1.0)),
    ("central difference", 0.7),
]


class PinnedCoverage(PromptAugmentationConsistency):
    """Qu et al.'s outer objective with evenly spaced pairs of the meta-batch as its confident ones."""

    def __init__(self, share: float):
        super().__init__()
        self.share = share

    def targets(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """A fixed share of the pairs, and a side for each that rounding of u does not change."""
        # Not the first ones: the meta batch comes by falling length.
        count = round(self.share * len(u))
        kept = torch.arange(count, device=u.device) * len(u) // max(count, 1)
        return kept, (kept % 2).to(u.dtype)


def periods(
    contestant: Contestant,
    folder: Path,
    shape: Shape,
    steps: int,
    device: str,
    callbacks: Sequence[Callback] = (),
) -> list[float]:
    """Train a new adapter and a new VNet; return seconds of each update."""
    weighting = None
    if contestant is not None:
        name, share = contestant
        weighting = VNetWeighting(PinnedCoverage(share), ESTIMATORS[name](), every=EVERY)
    policy = make_policy(folder, shape, device=device)
    data = make_data(folder, shape, None if weighting is None else EVERY, META_PAIRS)
    return train(policy, data, shape, steps, weighting=weighting, device=device, callbacks=callbacks)


def peak_of(contestant: Contestant, folder: Path, shape: Shape, device: str) -> float:
    """Return the memory of an update with VNet's and a plain one, MiB."""
    quiet()
    memory = Memory(device)
    periods(contestant, folder, shape, 2, device, [memory])
    return memory.peak


def main() -> None:
    """Run the turns, measure memory and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3, help="periods of each contestant")
    parser.add_argument("--figure", type=Path, help="where the figure goes; none without it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_shape(parser, Shape(micro_batch=8))
    options = parser.parse_args()
    shape, device = shape_of(options), options.device
    quiet()
    print(describe())
    print(shape)
    seconds: dict[Contestant, list[list[float]]] = {contestant: [] for contestant in CONTESTANTS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder, shape)
        write_rows(folder / "rows.jsonl", random_rows(2 * max(shape.pairs, META_PAIRS), shape))
        for contestant in tqdm(options.repetitions * CONTESTANTS, desc="periods"):
            seconds[contestant].append(periods(contestant, folder, shape, 1 + EVERY, device)[1:])
        peaks = {
            contestant: in_fresh_process(peak_of, contestant, folder, shape, device)
            for contestant in tqdm(CONTESTANTS, desc="memory")
        }
    table = Table(
        "", "coverage", "s per plain update", "s with VNet's", "time over DPO's", "MiB", "over DPO's"
    )
    # Repetition by repetition, which cancels other load.
    over = {
        contestant: [sum(a) / sum(b) for a, b in zip(found, seconds[None], strict=True)]
        for contestant, found in seconds.items()
    }
    for contestant, found in seconds.items():
        name, share = ("DPO", None) if contestant is None else contestant
        table.add_row(
            name,
            "" if share is None else f"{share:.0%}",
            spread([statistics.median(period[:-1]) for period in found]),
            "" if share is None else spread([period[-1] for period in found]),
            spread(over[contestant]),
            f"{peaks[contestant]:,.0f}",
            f"{peaks[contestant] / peaks[None]:.2f}",
        )
    Console(width=120).print(table)
    if options.figure:
        draw(options.figure, over, {contestant: peak / peaks[None] for contestant, peak in peaks.items()})


def draw(file: Path, over: dict[Contestant, list[float]], peaks: dict[Contestant, float]) -> None:
    """Draw time and peak memory over DPO's, a row per contestant."""
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 2.6), sharey=True, layout="constrained")
    names = {c: f"{c[0]}, {c[1]:.0%}" for c in over if c is not None}
    colors = ["C0"] * len(names)
    bars(axes[0], {name: over[c] for c, name in names.items()}, colors, text="{:.2f}")
    bars(axes[1], {name: [peaks[c]] for c, name in names.items()}, colors, text="{:.2f}")
    for axis, label in zip(axes, ("time over DPO's (lines: range)", "peak memory over DPO's"), strict=True):
        axis.axvline(1, color="black", lw=0.8, ls="--")
        axis.margins(x=0.15)
        axis.set_xlim(left=0)
        axis.set_xlabel(label)
    axes[0].set_ylabel("estimator, confident\nof the meta-batch")
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
