"""Growth of a DPO step's time and memory with the sizes of its pairs and its model, one at a time.

    python benchmarks/scaling.py [--figure docs/scaling-step.png] [--device cuda]

Time and memory are measured in a process each; memory is over that at the start of training.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
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
from tqdm import tqdm

VARIED: dict[str, tuple[str, list[int]]] = {
    "prompt": ("prompt tokens", [50, 100, 200, 400, 800]),
    "response": ("response tokens", [10, 20, 40, 80, 160]),
    "pairs": ("pairs", [2, 4, 8, 16, 32]),
    "vocabulary": ("vocabulary", [4_000, 8_000, 16_000, 32_000, 128_000]),
    "rank": ("LoRA rank", [4, 8, 16, 32, 64]),
}


def run(shape: Shape, steps: int, device: str, callbacks: Sequence[Callback] = ()) -> list[float]:
    """Return seconds of each update."""
    quiet()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder, shape)
        write_rows(folder / "rows.jsonl", random_rows(shape.pairs, shape))
        policy, data = make_policy(folder, shape, device=device), make_data(folder, shape)
        return train(policy, data, shape, steps, device=device, callbacks=callbacks)


def peak_of(shape: Shape, device: str) -> float:
    """Return the memory of an update, MiB."""
    memory = Memory(device)
    run(shape, 1, device, [memory])
    return memory.peak


def changed(shape: Shape, size: str, value: int) -> Shape:
    """Return the shape with one size changed; a length becomes that of all prompts or responses."""
    return replace(shape, **{size: (value, value) if size in ("prompt", "response") else value})


def main() -> None:
    """Measure, print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", type=Path, help="where the figure goes; none without it")
    parser.add_argument("--only", nargs="+", choices=VARIED, default=list(VARIED))
    parser.add_argument("--repetitions", type=int, default=5, help="timed updates of each setting")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_shape(parser, Shape(pairs=8, prompt=(300, 300), response=(40, 40)))
    options = parser.parse_args()
    shape = shape_of(options)
    print(describe())
    print(f"All other sizes: {shape}")
    settings = [(size, value) for size in options.only for value in VARIED[size][1]]
    found = {}
    for setting in tqdm(settings):
        one = changed(shape, *setting)
        seconds = in_fresh_process(run, one, 1 + options.repetitions, options.device)[1:]
        found[setting] = seconds, in_fresh_process(peak_of, one, options.device)
    table = Table("", "", "s per update", "MiB of an update")
    for (size, value), (seconds, peak) in found.items():
        table.add_row(VARIED[size][0], f"{value:,}", spread(seconds), f"{peak:,.0f}")
    Console(width=120).print(table)
    if options.figure:
        draw(options.figure, found)


def draw(file: Path, found: dict[tuple[str, int], tuple[list[float], float]]) -> None:
    """Draw time above memory, a column per size; dashed is proportional growth."""
    sizes = list(dict.fromkeys(size for size, _ in found))
    figure, axes = plt.subplots(
        2, len(sizes), figsize=(2.4 * len(sizes), 4.2), sharex="col", sharey="row", squeeze=False
    )
    for column, size in enumerate(sizes):
        values = [value for name, value in found if name == size]
        seconds = [statistics.median(found[size, value][0]) for value in values]
        peaks = [found[size, value][1] for value in values]
        for axis, measured in zip(axes[:, column], (seconds, peaks), strict=True):
            axis.loglog(values, measured, marker="o", ms=4)
            proportional = [measured[-1] * value / values[-1] for value in values]
            axis.loglog(values, proportional, color="gray", ls="--", lw=0.8)
            axis.set_xticks(values, [f"{v // 1000}k" if v >= 1000 else str(v) for v in values], minor=False)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        axes[1, column].set_xlabel(VARIED[size][0])
    axes[0, 0].set_ylabel("s per update")
    axes[1, 0].set_ylabel("MiB of an update")
    shown = (
        [statistics.median(seconds) for seconds, _ in found.values()],
        [peak for _, peak in found.values()],
    )
    for axis, values in zip(axes[:, 0], shown, strict=True):
        low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
        ticks = [2.0**k for k in range(low, high + 1)]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axis.minorticks_off()
        axis.set_ylim(ticks[0] / 1.2, ticks[-1] * 1.2)
    figure.tight_layout()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
