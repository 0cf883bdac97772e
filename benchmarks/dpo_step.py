"""Time of a DPO step against TRL's DPOTrainer: same weights, same rows, whole updates, one process.

    python benchmarks/dpo_step.py [--repetitions 5] [--figure docs/dpo-step.png] [--device cuda]

Needs the extra ``bench``. Turns are three updates, the first a warm-up. All have cached reference
log-probabilities, the same adapter (B not 0) and optimizer, and their fastest micro-batch. Rates are
``flops.needed`` over time. TRL runs without gradient checkpointing and logging; on a CPU its head computes
logits of all positions. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from bars import bars
from flops import fastest_product, needed
from lightning.fabric.utilities import move_data_to_device
from machine import describe, spread
from rich.console import Console
from rich.table import Table
from timed_runs import (
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
from trl import DPOTrainer
from trl_step import make_trl, trl_log_probs, trl_turn

from pacmr_lightning.batch import LogProbs, PairBatch
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.token_layout import Layout

TOLERANCE = 1e-4
"""Nats between log-probabilities of a response of up to 50 tokens."""
COUNTED = 2
TRL, SEPARATE = "TRL DPOTrainer", "ours, one per row"
SHARED = "ours, shared"
LAYOUTS: dict[str, Layout] = {SEPARATE: "separate", SHARED: "shared"}


def largest_difference(one: LogProbs, other: LogProbs) -> float:
    """Return the largest difference of any response, in nats."""
    sides = ((one.chosen, other.chosen), (one.rejected, other.rejected))
    return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in sides)


class Contestants:
    """Makes contestants, and runs their turns."""

    def __init__(self, folder: Path, shape: Shape, device: str):
        self.folder = folder
        self.device = device
        self.rows = random_rows(shape.pairs, shape)
        write_model(folder, shape)
        write_rows(folder / "rows.jsonl", self.rows)
        self.data = make_data(folder, shape)

    def make(self, name: str, shape: Shape) -> DPOTrainer | PolicyModel:
        """Return a new trainer or policy."""
        if name == TRL:
            adapter = make_policy(self.folder, shape).adapter()
            return make_trl(self.folder, self.rows, shape, adapter, self.device, 1 + COUNTED)
        return make_policy(self.folder, shape, LAYOUTS[name], self.device)

    def turn(self, contestant: DPOTrainer | PolicyModel, shape: Shape) -> list[float]:
        """Return seconds of each counted update."""
        if isinstance(contestant, DPOTrainer):
            return trl_turn(contestant)
        return train(contestant, self.data, shape, 1 + COUNTED, device=self.device)[1:]

    def fastest(self, name: str, shape: Shape) -> Shape:
        """Return the shape with the fastest micro-batch of all, two or one pairs, unless it is given."""
        if shape.micro_batch:
            return shape
        shapes = [replace(shape, micro_batch=size) for size in (shape.pairs, 2, 1) if shape.pairs % size == 0]
        return min(shapes, key=lambda s: statistics.median(self.turn(self.make(name, s), s)))


@torch.no_grad()
def differences(trainer: DPOTrainer, policies: dict[str, PolicyModel], batch: PairBatch) -> dict[str, float]:
    """Return the largest differences of our log-probabilities from TRL's, in nats, by contestant."""
    theirs = trl_log_probs(trainer)
    return {name: largest_difference(policy.log_probs(batch), theirs) for name, policy in policies.items()}


def main() -> None:
    """Run the turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--figure", type=Path, help="where the figure goes; none without it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_shape(parser, Shape(pairs=8))
    options = parser.parse_args()
    shape = shape_of(options)
    quiet()
    print(describe())
    names = (TRL, *LAYOUTS)
    with tempfile.TemporaryDirectory() as temporary:
        contestants = Contestants(Path(temporary), shape, options.device)
        shapes = {name: contestants.fastest(name, shape) for name in tqdm(names, desc="micro-batches")}
        made = {name: contestants.make(name, shapes[name]) for name in names}
        trainer, policies = made[TRL], {name: made[name] for name in LAYOUTS}
        batch = contestants.data.train_pairs.batch(range(shape.pairs))
        batch = move_data_to_device(batch, options.device)
        before, start = differences(trainer, policies, batch), trl_log_probs(trainer)
        after: dict[str, float] = {}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        rates = []
        for _ in tqdm(range(options.repetitions), desc="turns"):
            for name, contestant in made.items():
                seconds[name] += contestants.turn(contestant, shapes[name])
            rates.append(fastest_product(made[SHARED], batch))
            if not after:  # later AdamW's state is kept by TRL's trainer only
                after = differences(trainer, policies, batch)
                moved = largest_difference(start, trl_log_probs(trainer))
        work, peak = needed(made[SHARED], batch), statistics.median(rates)
    print(
        f"{shape.pairs} pairs, {batch.token_count:,} tokens (a prompt once), {shape}\n"
        f"Needed: {work / 1e9:.1f} GFLOP per step; the fastest matrix product: {spread(rates, 1e9)} GFLOP/s"
    )
    heads = (
        "pairs at once",
        "s per update",
        "TRL's over it",
        "GFLOP/s",
        "of the fastest",
        "nats off",
        "after 3",
    )
    table = Table("", *heads)
    for name, times in seconds.items():
        rate = work / statistics.median(times)
        # Turn by turn, which cancels other load.
        ratios = [a / b for a, b in zip(seconds[TRL], times, strict=True)]
        table.add_row(
            name,
            str(shapes[name].micro_batch),
            spread(times),
            spread(ratios),
            f"{rate / 1e9:.1f}",
            f"{rate / peak:.0%}",
            *(f"{found[name]:.1e}" if name in found else "" for found in (before, after)),
        )
    Console(width=120).print(table)
    print(f"In 1 + {COUNTED} updates TRL's own log-probabilities move by up to {moved:.1e} nats.")
    if options.figure:
        draw(options.figure, seconds, work / peak)
    tolerance = TOLERANCE * max(1, shape.response[1] / 50)
    if shape.dtype == "float32" and max(before.values()) > tolerance:
        sys.exit(f"Log-probabilities differ by more than {tolerance:.0e} nats, so this is no comparison.")


def draw(file: Path, seconds: dict[str, list[float]], least: float) -> None:
    """Draw a bar per contestant; dashed is the least time at the rate of the fastest product."""
    figure, axis = plt.subplots(figsize=(6.4, 2), layout="constrained")
    bars(axis, seconds, ["C7" if name == TRL else "C0" for name in seconds], text="{:.2f} s")
    axis.axvline(least, color="C1", ls="--", lw=1.2, label="needed arithmetic at the fastest product's rate")
    axis.margins(x=0.12)
    axis.set_xlim(left=0)
    axis.set_xlabel("s per DPO update (lines: range)")
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
