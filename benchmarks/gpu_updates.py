"""What gpu_check.py asks of one update: gradients by every way of attention, estimators, and answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from estimators import ESTIMATORS, call_of, exact, prepare
from gpu_contestants import SIZES, write_model
from lightning.fabric.utilities import move_data_to_device
from pacmr_step import PinnedCoverage
from timed_runs import Shape, make_data, make_policy, quiet, random_rows, write_rows
from torch import Tensor

from pacmr_lightning.evaluation.generation import Decoding, respond
from pacmr_lightning.evaluation.prompt_batch import PromptBatch
from pacmr_lightning.gradient import Direction
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.weighting import GhostDotProduct, Unweighted, VNetWeighting
from pacmr_lightning.weighting.inner_gradient import inner_step
from pacmr_lightning.weighting.kept_gradients import train_pairs

SIZE = "small"
SHAPE = Shape(pairs=16, vocabulary=SIZES[SIZE][5], micro_batch=8)
SHORT = Shape(prompt=(40, 80), response=(10, 20), vocabulary=SHAPE.vocabulary)
"""Of whole runs, of which nothing is measured."""
META_PAIRS = 16
FLOAT32_ERROR = 1e-3
"""Relative error of a gradient in fp32: sums in another order, no TF32."""
ANSWERS, ANSWER_TOKENS = 12, 24


def model_folder(output: Path) -> Path:
    """A random Llama with grouped queries, its tokenizer and pairs; made by whoever needs it first."""
    folder = output / "model"
    if (folder / "short.jsonl").exists():
        return folder
    write_model(folder, SIZE, "float32", "cpu")
    write_rows(folder / "rows.jsonl", random_rows(64, SHAPE))
    write_rows(folder / "short.jsonl", random_rows(64, SHORT))
    return folder


def check(output: Path, *, way: str, dtype: str, device: str) -> dict[str, Any]:
    """u, DPO's gradient and VNet's, against one sequence a row in fp32."""
    quiet()
    attention, layout, *compiled = way.split(", ")
    folder = model_folder(output)
    options = {"attn_implementation": attention, "compile": bool(compiled)}
    policy = make_policy(folder, replace(SHAPE, dtype=dtype), layout, device, **options)
    found = _update(policy, folder, device)
    files = output / "updates"
    files.mkdir(exist_ok=True)
    torch.save(found, files / f"{way}, {dtype}.pt")
    truth = torch.load(files / "sdpa, separate, float32.pt")
    errors = _errors(found, truth)
    allowed = dict.fromkeys(errors, FLOAT32_ERROR)
    if dtype != "float32":
        allowed = {
            n: 2 * e for n, e in _errors(torch.load(files / f"sdpa, separate, {dtype}.pt"), truth).items()
        }
    plan = policy._plan
    asked = plan is not None and (plan.attention, plan.layout) == (attention, layout)
    says = ", ".join(f"{name} off by {error:.1e}" for name, error in errors.items())
    return {
        "ok": asked and all(errors[name] <= allowed[name] for name in errors),
        "says": says if asked else f"fell back to {plan}; {says}",
        "errors": errors,
    }


def _update(policy: PolicyModel, folder: Path, device: str) -> dict[str, Tensor]:
    data = make_data(folder, SHAPE, 1, META_PAIRS)
    batch = move_data_to_device(next(iter(data.train_dataloader())), device)
    train = batch.train.with_reference(policy.reference_log_probs(batch.train))
    pairs = train_pairs(policy, DPO(0.1), train, SHAPE.micro_batch, often=True)
    gradient = inner_step(pairs, Unweighted()).gradient
    torch.manual_seed(0)
    weighting = VNetWeighting(PinnedCoverage(0.7), GhostDotProduct(clip=None))
    weighting.to(torch.device(device))
    weighting.update(pairs, batch.meta, 1e-4)
    of_vnet = {name: p.grad for name, p in weighting.vnet.named_parameters() if p.grad is not None}
    return {"u": pairs.rewards.u.double().cpu(), "DPO's gradient": _flat(gradient), "VNet's": _flat(of_vnet)}


def _flat(direction: Direction) -> Tensor:
    return torch.cat([value.detach().double().cpu().flatten() for value in direction.values()])


def _errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name] - truth[name]).norm() / truth[name].norm()) for name in truth}


def estimators(output: Path, *, dtype: str, device: str) -> dict[str, Any]:
    """Relative errors of c against float64, d_meta of length 1; the ghost is held to the kept graph's."""
    quiet()
    policy, batch, direction = prepare(str(model_folder(output)), dtype, device, 8)
    truth = exact(policy, batch, direction)
    errors = {
        name: float((call_of(name, policy, batch, direction)().double() - truth).norm() / truth.norm())
        for name in ESTIMATORS
    }
    ghost = errors["ghost dot-product"]
    return {
        "ok": ghost <= max(FLOAT32_ERROR, 2 * errors["graph retained"]),
        "says": ", ".join(f"{name} {error:.1e}" for name, error in errors.items()),
        "errors": errors,
    }


def generation(output: Path, *, device: str) -> dict[str, Any]:
    """Greedy answers in fp32 of a batch of prompts of many lengths, against each prompt's alone."""
    quiet()
    folder = model_folder(output)
    policy = make_policy(folder, SHAPE, "auto", device).eval()
    data = make_data(folder, SHAPE)
    rows = data.train_pairs.rows[:ANSWERS]
    prompts = [ids[: 20 + 15 * i] for i, ids in enumerate(rows["prompt_ids"])]

    def answers(places: list[int]) -> list[str]:
        texts = [data.tokenizer.decode(prompts[i]) for i in places]
        ids = [str(i) for i in places]
        tokens = [prompts[i] for i in places]
        batch = PromptBatch.collate(ids, texts, tokens, pad_id=data.tokenizer.pad_token_id)
        batch = move_data_to_device(batch, device)
        said = respond(policy, data.tokenizer, batch, ANSWER_TOKENS, Decoding())
        return [answer.text for answer in said]

    together = answers(list(range(ANSWERS)))
    alone = [answers([i])[0] for i in range(ANSWERS)]
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    # Rounding may decide between two tokens of a random model.
    return {"ok": same >= ANSWERS - 1, "says": f"{same} of {ANSWERS} answers are the same in a batch"}
