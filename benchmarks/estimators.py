"""Error of the estimators of c_i by the norm of d, with an fp32 and a bf16 base, and their cost.

    python benchmarks/estimators.py [--figure docs/estimators.png] [--device cuda]

Truth is a float64 copy of the random model, differentiated pair by pair.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from machine import PeakMemory, describe, in_fresh_process, median_time
from rich.console import Console
from rich.table import Table
from timed_runs import quiet
from transformers import AutoModelForCausalLM, LlamaConfig

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.meta_gradient import CentralDifference, GhostDotProduct, MetaGradientEstimator
from pacmr_lightning.meta_gradient.step_pairs import StepPairs
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import Rewards

Direction = dict[str, torch.Tensor]
BETA = 0.1
NORMS = [10.0**k for k in (-4, -3, -2, -1, 0, 1)]
# Each with its colour, and where its name stands: number of the norm, points above the line.
ESTIMATORS: dict[str, tuple[MetaGradientEstimator, str, int, int]] = {
    "central difference, step 0.003": (CentralDifference(3e-3, clip=None), "#0072B2", 0, 8),
    "step 0.003 / |d|": (CentralDifference(3e-3, relative=True, clip=None), "#D55E00", 1, 8),
    "step 0.1 / |d|": (CentralDifference(0.1, relative=True, clip=None), "#009E73", 3, 8),
    "GhostDotProduct": (GhostDotProduct(clip=None), "#444444", 0, 10),
}
WHOLE = "forward and backward pass"


def make_policy(folder: str, dtype: str) -> PolicyModel:
    """Return the same random model for either dtype of its base, LoRA's B not 0."""
    policy = PolicyModel(folder, dtype=dtype, attn_implementation="sdpa")  # twice differentiable
    torch.manual_seed(0)
    policy.build()
    with torch.no_grad():
        for name, parameter in policy.adapter().items():
            parameter.normal_(std=0.05 if ".lora_B." in name else 0.1)
    return policy


def make_batch(pairs: int, seed: int, device: str) -> PairBatch:
    """Return random pairs: prompts of 60 to 100 tokens, responses of 20 to 40."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(3, 4096, (length,), generator=generator).tolist()

    columns = [[tokens(*bounds) for _ in range(pairs)] for bounds in ((60, 100), (20, 40), (20, 40))]
    batch = PairBatch.collate([str(i) for i in range(pairs)], *columns)
    batch.input_ids, batch.segment_ids = batch.input_ids.to(device), batch.segment_ids.to(device)
    return batch


def losses(policy: PolicyModel, batch: PairBatch) -> torch.Tensor:
    """(N,) DPO losses."""
    return DPO(BETA)(Rewards.of(policy.log_probs(batch), batch, BETA))


def exact(policy: PolicyModel, batch: PairBatch, direction: Direction) -> torch.Tensor:
    """(N,) d . grad l_i in float64, one backward pass per pair."""
    policy = copy.deepcopy(policy).double()
    batch = batch.with_reference(policy.reference_log_probs(batch))
    values = []
    for i in range(len(batch)):
        loss = losses(policy, batch[i : i + 1]).sum()
        gradients = torch.autograd.grad(loss, list(policy.adapter().values()))
        values.append(sum((g * d.double()).sum() for g, d in zip(gradients, direction.values(), strict=True)))
    return torch.stack(values)


def prepare(folder: str, dtype: str, device: str, pairs: int) -> tuple[PolicyModel, PairBatch, Direction]:
    """Return a policy, a batch, and a direction of norm 1, the gradient of other pairs' loss."""
    policy = make_policy(folder, dtype).to(device)
    batch, other = (make_batch(pairs, seed, device) for seed in (0, 1))
    batch = batch.with_reference(policy.reference_log_probs(batch))
    other = other.with_reference(policy.reference_log_probs(other))
    unit = policy.zeros()
    policy.add_gradient(unit, losses(policy, other).mean())
    length = torch.nn.utils.get_total_norm(unit.values())
    return policy, batch, {name: d / length for name, d in unit.items()}


def call_of(name: str, policy: PolicyModel, batch: PairBatch, direction: Direction) -> Callable[[], object]:
    """Return the call that is timed under a name."""
    if name == WHOLE:
        parameters = list(policy.adapter().values())
        return lambda: torch.autograd.grad(losses(policy, batch).sum(), parameters)
    pairs = StepPairs(policy, DPO(BETA), batch, None)
    return lambda: ESTIMATORS[name][0].coefficients(pairs, direction)


def peak_of(name: str, folder: str, dtype: str, device: str, pairs: int) -> float:
    """Return the memory of a call, MiB."""
    quiet()
    call = call_of(name, *prepare(folder, dtype, device, pairs))
    call()  # warm-up
    memory = PeakMemory(device)
    call()
    return memory.over_start()


def main() -> None:
    """Measure, print the tables and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", default="docs/estimators.png")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=4
    )
    quiet()
    console = Console(width=120)
    print(describe())
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for dtype in ("float32", "bfloat16"):
            found[dtype] = {}
            policy, batch, unit = prepare(folder, dtype, options.device, options.pairs)
            truth = exact(policy, batch, unit)
            whole = median_time(call_of(WHOLE, policy, batch, unit), options.device)
            table = Table(
                f"{dtype} base",
                *(f"|d| {scale:.0e}" for scale in NORMS),
                "time",
                "MiB",
                title="Relative error of c; time in forward and backward passes",
            )
            for name in (*ESTIMATORS, WHOLE):
                errors = []
                if name != WHOLE:
                    for scale in NORMS:
                        direction = {key: scale * d for key, d in unit.items()}
                        c = call_of(name, policy, batch, direction)().double()
                        errors.append(float((c / scale - truth).norm() / truth.norm()))
                    found[dtype][name] = errors
                call = call_of(name, policy, batch, unit)
                seconds = whole if name == WHOLE else median_time(call, options.device)
                peak = in_fresh_process(peak_of, name, folder, dtype, options.device, options.pairs)
                cells = [f"{error:.1e}" for error in errors] or [""] * len(NORMS)
                table.add_row(name, *cells, f"{seconds / whole:.2f}", f"{peak:,.0f}")
            console.print(table)
    draw(options.figure, found)


def draw(file: str, found: dict[str, dict[str, list[float]]]) -> None:
    """Draw errors by norm, a panel per dtype of the base, with names in the first one."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, (dtype, by_name) in zip(axes, found.items(), strict=True):
        for name, errors in by_name.items():
            _, color, at, above = ESTIMATORS[name]
            axis.loglog(NORMS, errors, marker="o", ms=4, color=color)
            if axis is axes[0]:
                place = {"xytext": (0, above), "textcoords": "offset points"}
                axis.annotate(name, (NORMS[at], errors[at]), **place, color=color, fontsize=11)
        axis.axhline(1, color="gray", lw=0.8, ls="--")
        axis.set_title(f"{dtype} base, fp32 adapter", fontsize=12)
        axis.set_xlabel("norm of d_meta", fontsize=11)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative error of c", fontsize=11)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
