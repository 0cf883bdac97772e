"""How far training on a label has moved its own pair's u: less would show in a policy that has not seen it.

A policy that has learned from a label agrees with it more often than one that has not, so too few labels look
wrong. To first order, an AdamW step at rate lr on a batch of B pairs moves the u of one of them by

    lr / B  pull  (grad u)^T P (grad u),    pull = -g dl/du,    P = 1 / (sqrt(v) + eps)

with the loss l, the pair's weight g, and Adam's second moments v. Added up over a run, a pair of N has got
sum_t lr_t / N of it. The product is measured on a sample of pairs, at the run's end; later updates undo a
part of what is counted here (a quarter in the embedded world), so what is taken off is a little too much.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from ..modules import PreferenceModule
from ..modules.schedule import warmup_cosine
from ..objectives import DPO
from ..runs.finished_run import Run
from ..runs.folder import METRICS
from ..weighting.pair_gradients import MixedRowsError, each_gradient

SAMPLE = 512
"""Pairs on which the product is measured: its relative standard error is about 2%."""


def own_pull(module: PreferenceModule, pairs: Any, run: Run, updates: int, seed: int = 0) -> float | None:
    """Nats of u that a pull of 1 has come to by the run's end.

    Args:
        module: with the policy of the run's checkpoint, where it is to run.
        pairs: the datamodule's ``train_pairs``.
        run: with the checkpoint, which has the optimizer's state.
        updates: of the policy behind it.
        seed: of the sample.

    Returns:
        What ``last_pass``'s column ``pull`` is to be multiplied by; None where the checkpoint has no state of
        AdamW, or the model's layers do not show the gradient of each pair.
    """
    scales = _scales(module, run.checkpoint)
    if scales is None:
        return None
    size = module.micro_batch_size or 32
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:SAMPLE].tolist()
    objective = DPO(module.objective.beta)
    squares = slopes = 0.0

    def take(name: str, gradients: Tensor) -> None:
        nonlocal squares
        squares += float((gradients.double().square() * scales[name]).sum())

    device = next(iter(scales.values())).device
    for start in range(0, len(chosen), size):
        batch = move_data_to_device(pairs.batch(chosen[start : start + size]), device)
        with torch.no_grad():
            batch = batch.with_reference(module.policy.reference_log_probs(batch))
        try:
            rewards, _ = each_gradient(module.policy, objective, batch, take)
        except MixedRowsError:
            return None
        slopes += float(torch.sigmoid(-rewards.u.double()).square().sum())
    return _clipped(module, run) * _rates(module, updates).sum() / len(pairs) * squares / slopes


def _scales(module: PreferenceModule, checkpoint: Path) -> dict[str, Tensor] | None:
    """P, by parameter; None without it."""
    found = torch.load(checkpoint, map_location="cpu", weights_only=True).get("optimizer_states")
    if not found or "exp_avg_sq" not in next(iter(found[0].get("state", {}).values()), {}):
        return None
    (group,) = found[0]["param_groups"]
    scales = {}
    for (name, parameter), state in zip(
        module.policy.adapter().items(), found[0]["state"].values(), strict=True
    ):
        second = state["exp_avg_sq"].double() / (1 - group["betas"][1] ** float(state["step"]))
        scales[name] = (1 / (second.sqrt() + group["eps"])).to(parameter.device)
    return scales


def _rates(module: PreferenceModule, updates: int) -> np.ndarray:
    """(updates,) learning rates."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=module.learning_rate)
    schedule = warmup_cosine(optimizer, updates, module.warmup_ratio, module.min_lr_ratio)["scheduler"]
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return np.array(rates)


def _clipped(module: PreferenceModule, run: Run) -> float:
    """The factor by which clipping has shortened gradients, on average over the run's logged updates."""
    path = Path(run.folder) / METRICS
    if module.max_grad_norm is None or not path.is_file():
        return 1.0
    table = pd.read_csv(path)
    if "train/grad_norm" not in table:
        return 1.0
    return float((module.max_grad_norm / table["train/grad_norm"].dropna()).clip(upper=1).mean())
