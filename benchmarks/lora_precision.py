"""Error of LoRA in the base's bf16 and in fp32 against float64, through many layers, and time of a DPO step.

    python benchmarks/lora_precision.py [--seeds 4] [--layers 28] [--width 64] [--lora-b 0.002 0.02]

Base and adapter are random, and the same for both ways. Truth is a float64 copy of both. A cell is the
error's length over the truth's, over all seeds; in brackets is that of bf16 over that of fp32.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from lightning.fabric.utilities import move_data_to_device
from machine import describe, median_time
from rich.console import Console
from rich.table import Table
from timed_runs import Shape, make_data, quiet, random_rows, write_model, write_rows
from torch import Tensor

from pacmr_lightning.batch import PairBatch, TrainingBatch
from pacmr_lightning.gradient import Direction, norm
from pacmr_lightning.meta_gradient import CentralDifference, GhostDotProduct, SoftPromptConsistency
from pacmr_lightning.meta_gradient.step_pairs import RecomputedStepPairs
from pacmr_lightning.meta_gradient.virtual_step import shifted
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.lora_layer import LoraDtype
from pacmr_lightning.weighting import Unweighted, VNetWeighting
from pacmr_lightning.weighting.algorithm_1 import weighted_gradient

WAYS: tuple[LoraDtype, LoraDtype] = ("float32", "base")
BETA, STEP = 0.1, 0.1
"""STEP is the length of the virtual step and of the central difference's longer one."""
Found = dict[str, Tensor]


def make_policy(folder: Path, way: LoraDtype, seed: int, lora_b: float) -> PolicyModel:
    """Return a policy on a bf16 base, LoRA's B normal with this deviation."""
    policy = PolicyModel(str(folder), dtype="bfloat16", lora_compute_dtype=way)
    torch.manual_seed(seed)
    policy.build(announce=False)
    with torch.no_grad():
        for name, parameter in policy.adapter().items():
            if ".lora_B." in name:
                parameter.normal_(std=lora_b)
    return policy


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All in one float64 vector."""
    return torch.cat([x.detach().double().flatten() for x in tensors])


def step_pairs(policy: PolicyModel, batch: PairBatch) -> RecomputedStepPairs:
    """Return the pairs at omega, or where the policy is shifted to, with this policy's own reference."""
    return RecomputedStepPairs(
        policy, DPO(BETA), batch.with_reference(policy.reference_log_probs(batch)), None
    )


def values(
    policy: PolicyModel, batch: TrainingBatch, along: Direction | None = None
) -> tuple[Found, Direction]:
    """Return compared values, and the unit vector along which c is measured (default: the meta-batch's)."""
    assert batch.meta is not None
    pairs = step_pairs(policy, batch.train)
    gradient = weighted_gradient(pairs, Unweighted()).gradient
    if along is None:
        along = weighted_gradient(step_pairs(policy, batch.meta), Unweighted()).gradient
        along = {name: d / norm(along) for name, d in along.items()}
    along = {name: d.to(gradient[name].dtype) for name, d in along.items()}
    torch.manual_seed(0)
    weighting = VNetWeighting(SoftPromptConsistency(), GhostDotProduct(clip=None))
    weighting.update(pairs, batch.meta, 1e-4, 1e-4)
    with shifted(policy, along, -STEP):
        moved = step_pairs(policy, batch.train)
        moved_gradient = weighted_gradient(moved, Unweighted()).gradient
    found = {
        "u": pairs.rewards.u,
        "DPO's gradient": flat(gradient.values()),
        "u after a virtual step": moved.rewards.u,
        "DPO's gradient there": flat(moved_gradient.values()),
        "VNet's gradient": flat(p.grad for p in weighting.vnet.parameters() if p.grad is not None),
        "c, ghost": pairs.along(along),
        f"c, central difference, step {STEP}": CentralDifference(STEP).coefficients(pairs, along),
        "c, central difference, step 3e-3": CentralDifference(3e-3).coefficients(pairs, along),
    }
    return {name: value.detach().double() for name, value in found.items()}, along


def found_by(folder: Path, batch: TrainingBatch, seed: int, lora_b: float) -> list[Found]:
    """Return the values of float64 and of both ways."""
    exact = copy.deepcopy(make_policy(folder, WAYS[0], seed, lora_b)).double()
    truth, along = values(exact, batch)
    return [truth, *(values(make_policy(folder, way, seed, lora_b), batch, along)[0] for way in WAYS)]


def error(found: list[list[Found]], way: int, name: str) -> float:
    """Return the length of a value's errors over that of its truths, over all seeds."""
    truth, other = (flat(of[i][name] for of in found) for i in (0, 1 + way))
    return float((other - truth).norm() / truth.norm())


def seconds(folder: Path, batch: PairBatch, way: LoraDtype) -> float:
    """Return the time of a forward and backward pass of all pairs."""
    policy = make_policy(folder, way, 0, 0.02)
    batch = batch.with_reference(policy.reference_log_probs(batch))
    return median_time(
        lambda: weighted_gradient(RecomputedStepPairs(policy, DPO(BETA), batch, None), Unweighted()), "cpu"
    )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--lora-b", type=float, nargs="+", default=[0.002, 0.02], help="deviations of B")
    options = parser.parse_args()
    quiet()
    print(describe())
    shape = Shape(
        options.pairs, (10, 20), (5, 10), options.width, options.layers, vocabulary=512, dtype="bfloat16"
    )
    table = Table("relative error", *(f"B of {b}: {way}" for b in options.lora_b for way in ("fp32", "bf16")))
    cells: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, shape)
        write_rows(folder / "rows.jsonl", random_rows(2 * options.pairs, shape))
        batch = next(iter(make_data(folder, shape, 1, options.pairs).train_dataloader()))
        batch = move_data_to_device(batch, "cpu")
        for b in options.lora_b:
            found = [found_by(folder, batch, seed, b) for seed in range(options.seeds)]
            for name in found[0][0]:
                fp32, bf16 = (error(found, way, name) for way in range(len(WAYS)))
                cells.setdefault(name, []).extend([f"{fp32:.2g}", f"{bf16:.2g} ({bf16 / fp32:.2f})"])
        times = [seconds(folder, batch.train, way) for way in WAYS]
    for name, row in cells.items():
        table.add_row(name, *row)
    Console(width=120).print(table)
    print(f"Time of a DPO step in bf16 over that in fp32: {times[1] / times[0]:.2f}")


if __name__ == "__main__":
    main()
