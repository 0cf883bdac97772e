"""Time and memory of an update of co-teaching, which trains two adapters on one base, against DPO's.

    python benchmarks/co_teaching_step.py [--repetitions 5] [--rank 64] [--device cuda]

trains PreferenceModule on random tokens, 32 pairs an update in micro-batches of 8, with the reference cached.
Each repetition trains each contestant for three updates, in turns; the first is not counted. Co-teaching
leaves 30% of the pairs out from the first update on. Where pairs' own gradients take little memory they are
kept, and each adapter runs the pairs once; else the first one runs them once more, without gradient, as with
a larger --rank.

Memory is measured in a process of its own for each contestant: the most that two updates hold over what is
held when training starts (model, data).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

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

from pacmr_lightning.weighting import CoTeaching

CONTESTANTS = ("DPO", "co-teaching")


def updates(
    contestant: str, folder: Path, shape: Shape, steps: int, device: str, callbacks: Sequence[Callback] = ()
) -> list[float]:
    """Trains a new adapter, or two; returns the seconds of each update."""
    weighting = None if contestant == "DPO" else CoTeaching(0.3, warmup=0)
    policy, data = make_policy(folder, shape, device=device), make_data(folder, shape)
    return train(policy, data, shape, steps, weighting=weighting, device=device, callbacks=callbacks)


def peak_of(contestant: str, folder: Path, shape: Shape, device: str) -> float:
    """MiB of two updates."""
    quiet()
    memory = Memory(device)
    updates(contestant, folder, shape, 2, device, [memory])
    return memory.peak


def main() -> None:
    """Runs the turns, measures memory and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_shape(parser, Shape(micro_batch=8))
    options = parser.parse_args()
    shape, device = shape_of(options), options.device
    quiet()
    print(describe())
    print(shape)
    seconds: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder, shape)
        write_rows(folder / "rows.jsonl", random_rows(2 * shape.pairs, shape))
        for contestant in tqdm(options.repetitions * CONTESTANTS, desc="turns"):
            found = updates(contestant, folder, shape, 3, device)[1:]
            seconds[contestant].append(statistics.mean(found))
        peaks = {
            contestant: in_fresh_process(peak_of, contestant, folder, shape, device)
            for contestant in tqdm(CONTESTANTS, desc="memory")
        }
    table = Table("", "s an update", "time over DPO's", "MiB", "over DPO's")
    for contestant, found in seconds.items():
        # Turn by turn, so that what else the machine does falls out.
        over = [a / b for a, b in zip(found, seconds["DPO"], strict=True)]
        peak = peaks[contestant]
        table.add_row(contestant, spread(found), spread(over), f"{peak:,.0f}", f"{peak / peaks['DPO']:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
