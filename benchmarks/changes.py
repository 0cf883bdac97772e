"""Value of each saving in a step: the same updates with and without it, in turns.

    python benchmarks/changes.py [--figure docs/changes.png] [--repetitions 3] [--device cuda]

Predicted is the ratio of the matrix products' arithmetic, measured that of times. A turn is three updates,
the first a warm-up; VNet's savings are measured at one VNet update each, 70% of the meta-batch confident.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
from bars import bars
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from machine import describe, spread
from pacmr_step import PinnedCoverage
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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from tqdm import tqdm

from pacmr_lightning.batch import LogProbs, PairBatch
from pacmr_lightning.meta_gradient.step_pairs import RecomputedStepPairs, StepPairs
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy import model as policy_module
from pacmr_lightning.policy.chunked_log_probs import token_log_probs
from pacmr_lightning.policy.token_layout import rows_of
from pacmr_lightning.weighting import VNetWeighting

COUNTED = 2


@dataclass(frozen=True)
class Saving:
    """Work that a step avoids, and how to force it."""

    name: str
    off: Callable[[], AbstractContextManager]
    """Context in which steps do without the saving."""
    vnet: bool = False
    coverage: float = 0.7


def separate(policy: PolicyModel, batch: PairBatch, *_: Any, **__: Any) -> LogProbs:
    """Compute each prompt once per response."""
    return policy.log_probs_in("separate", batch)


def whole_logits(policy: PolicyModel, batch: PairBatch, *_: Any, **__: Any) -> LogProbs:
    """Compute logits of all tokens."""
    return policy.score(replace(rows_of("shared", batch), whole_logits=True))


def repeated_head(*arguments: Any) -> Tensor:
    """Compute logits in forward and again in backward."""
    return token_log_probs(*arguments[:4], frozen=False)


def live_reference(module: PreferenceModule, batch: PairBatch) -> LogProbs:
    """Run the reference on each batch."""
    parts = replace(batch, reference=None).micro_batches(module.micro_batch_size)
    return LogProbs.cat([module.policy.reference_log_probs(part) for part in parts])


SAVINGS = (
    Saving("prompt once for both responses", lambda: patch.object(PolicyModel, "log_probs", separate)),
    Saving("logits of responses only", lambda: patch.object(PolicyModel, "log_probs", whole_logits)),
    Saving(
        "the head's gradient beside its value, in place",
        lambda: patch.object(policy_module, "token_log_probs", repeated_head),
    ),
    Saving("reference from disk", lambda: patch.object(PreferenceModule, "_reference", live_reference)),
    Saving(
        "micro-batches by falling length",
        lambda: patch.object(PairBatch, "longest_first", lambda batch: batch),
    ),
    Saving(
        "train pairs run once for virtual step, c and update",
        lambda: patch.object(StepPairs, "of", staticmethod(lambda *pairs, **_: RecomputedStepPairs(*pairs))),
        vnet=True,
    ),
    Saving("unsure pairs of the meta-batch without gradient", nullcontext, vnet=True, coverage=1),
)
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Arithmetic(TorchDispatchMode):
    """Counts operations like ``FlopCounterMode``, without module hooks and with the CPU's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def from_first(self) -> Callback:
        """Return a callback that resets the count after the first update."""

        def forget(trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                self.operations = 0

        return LambdaCallback(on_train_batch_end=forget)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        kind = function._overloadpacket
        if kind is ATTENTION:
            self.operations += sdpa_flop_count(*(x.shape for x in args[:3]))
        elif kind is ATTENTION_BACKWARD:
            self.operations += sdpa_backward_flop_count(*(x.shape for x in args[:4]))
        elif kind in flop_registry:
            self.operations += flop_registry[kind](*args, **(kwargs or {}), out_val=found)
        return found


class Steps:
    """Runs turns on the model and the rows of a folder."""

    def __init__(self, folder: Path, shape: Shape, device: str):
        self.folder, self.shape, self.device = folder, shape, device
        write_model(folder, shape)
        write_rows(folder / "rows.jsonl", random_rows(4 * shape.pairs, shape))

    def turn(self, saving: Saving, on: bool, callbacks: Sequence[Callback] = ()) -> list[float]:
        """Return seconds of each counted update."""
        weighting = None
        if saving.vnet:
            weighting = VNetWeighting(PinnedCoverage(0.7 if on else saving.coverage), every=1)
        policy = make_policy(self.folder, self.shape, device=self.device)
        data = make_data(self.folder, self.shape, 1 if saving.vnet else None, 2 * self.shape.pairs)
        with nullcontext() if on else saving.off():
            seconds = train(
                policy,
                data,
                self.shape,
                1 + COUNTED,
                weighting=weighting,
                device=self.device,
                callbacks=callbacks,
            )
        return seconds[-COUNTED:]

    def arithmetic(self, saving: Saving, on: bool) -> int:
        """Return floating-point operations of the counted updates' matrix products."""
        with Arithmetic() as counted:
            self.turn(saving, on, [counted.from_first()])
        return counted.operations


def main() -> None:
    """Run the turns, print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3, help="turns with and without each saving")
    parser.add_argument("--figure", type=Path, help="where the figure goes; none without it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_shape(parser, Shape(pairs=16, micro_batch=4))
    options = parser.parse_args()
    quiet()
    print(describe())
    print(shape_of(options))
    table = Table("", "in", "s with it", "s without", "predicted ratio", "measured ratio")
    predicted: dict[str, float] = {}
    measured: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        steps = Steps(Path(temporary), shape_of(options), options.device)
        for saving in tqdm(SAVINGS):
            work = {on: steps.arithmetic(saving, on) for on in (True, False)}
            predicted[saving.name] = work[False] / work[True]
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(options.repetitions):
                for on, found in seconds.items():
                    found.append(statistics.mean(steps.turn(saving, on)))
            measured[saving.name] = [b / a for a, b in zip(seconds[True], seconds[False], strict=True)]
            table.add_row(
                saving.name,
                "VNet's update" if saving.vnet else "DPO's update",
                spread(seconds[True]),
                spread(seconds[False]),
                f"{predicted[saving.name]:.2f}",
                spread(measured[saving.name]),
            )
    Console(width=140).print(table)
    if options.figure:
        draw(options.figure, predicted, measured)


def draw(file: Path, predicted: dict[str, float], measured: dict[str, list[float]]) -> None:
    """Draw time without over time with each saving."""
    figure, axis = plt.subplots(figsize=(7.2, 3), layout="constrained")
    bars(axis, measured, ["C0"] * len(measured), start=1)
    for row, name in enumerate(measured):
        axis.plot(predicted[name], row, "D", color="C1", ms=6, mec="white")
    axis.axvline(1, color="gray", lw=0.8)
    axis.set_xlabel("time of an update without it, over that with it")
    axis.plot([], [], "D", color="C1", ms=6, mec="white", label="predicted from the arithmetic")
    axis.plot([], [], "s", color="C0", ms=8, label="measured (range of turns: line)")
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
