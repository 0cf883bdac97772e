"""Estimates how far training on a pair's own label has moved u towards it, which hides wrong labels.

A policy that has learned from a label agrees with it more often than one that has not, so too few labels look
wrong. To first order an AdamW step at rate lr on a batch of B pairs moves the pairs' u by

    du_i = lr / B  sum_j K_ij pull_j,    K_ij = (grad u_i)^T P (grad u_j),    P = 1 / (sqrt(v) + eps),

with pull = -g dl/du, the loss l, the pair's weight g, and Adam's second moments v. Over a run the own term of
a pair of N adds up to sum_t lr_t / N K_ii pull_i. The other pairs answer: what one label has moved lowers
their pull by D = -dpull/du, so that an early push has decayed by exp(-A D) at the end, A = sum_t lr_t / N K.
Averaged over the time of the visit that leaves (1 - exp(-A D)) / (A D) of it.

K is measured on a sample of pairs at the run's end, each of which stands for its share of the others. In the
embedded world (20 to 40% flips, 15 runs) it comes to 0.041 to 0.059 nats, where 0.034 to 0.063 are true.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.fabric.utilities import move_data_to_device
from scipy.special import expit
from torch import Tensor
from tqdm import tqdm

from ..meta_gradient.per_pair_gradients import each_gradient
from ..modules import PreferenceModule
from ..modules.schedule import updates_within, warmup_cosine
from ..objectives import DPO
from ..policy.lora import UnhookedLoraError
from ..runs.finished_run import MOST_AT_ONCE, PreferenceData, Run
from ..runs.folder import METRICS

SAMPLE = 128
"""Pairs whose gradients are taken, at most. In the embedded world so many tell the mean within 4% (standard
deviation over samples), 512 within 2%."""
WIDTH = 65536
"""Numbers that a pair's gradient is sketched by where it has more: K is then within about 1 / sqrt(WIDTH)."""
EPS = 1e-8
"""AdamW's."""
LARGEST = 0.3
"""Of u's standard deviation: above it a label's own part in u is too large for a first order."""


def own_pull(
    module: PreferenceModule, data: PreferenceData, run: Run, updates: int, seed: int = 0
) -> float | None:
    """Nats of u that a pull of 1 has come to by the run's checkpoint, after so many updates of the policy.

    Returns:
        What ``last_pass``'s column ``pull`` is to be multiplied by; None where the checkpoint has no state of
        AdamW, the model's layers do not show the gradient of each pair, or labels have moved their own u so
        far that a first order says nothing.
    """
    moments = _moments(module, run.checkpoint)
    if moments is None:
        return None
    pairs = data.train_pairs
    sample = np.random.default_rng(seed).permutation(len(pairs))[:SAMPLE].tolist()
    try:
        u, gradients = _gradients(module, data, sample, moments)
    except UnhookedLoraError:
        return None
    planned = updates_within(
        len(pairs) // data.global_batch_size,
        limit=run.trainer.get("limit_train_batches"),
        max_steps=run.trainer.get("max_steps"),
        max_epochs=run.trainer.get("max_epochs"),
    )
    peak = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=module.learning_rate)
    schedule: Any = warmup_cosine(peak, planned or updates, module.warmup_ratio, module.min_lr_ratio)
    rates = module.learning_rate * np.array(list(map(schedule["scheduler"].lr_lambdas[0], range(updates))))
    step = _clipped(module, run, updates) * rates.sum() / len(pairs)
    kernel = step * (gradients @ gradients.T).double().cpu().numpy()
    unit = float(remaining(kernel, u, len(pairs)).mean())
    return unit if unit * expit(-u).mean() < LARGEST * u.std() else None


def remaining(kernel: np.ndarray, u: np.ndarray, pairs: int) -> np.ndarray:
    """(M,) nats that a pull of 1 on each of a sample of M of N ``pairs`` leaves in its own u, as all answer.

    ``kernel`` is (M, M) A between them, ``u`` (M,) theirs.
    """
    answers = kernel * (pairs / len(u))
    np.fill_diagonal(answers, np.diag(kernel))
    root = np.sqrt(expit(u) * expit(-u))  # of D, by which the answers become symmetric
    decay, directions = np.linalg.eigh(root[:, None] * answers * root)
    decay = decay.clip(1e-9)
    left = (directions * (-np.expm1(-decay) / decay)) @ directions.T
    return np.einsum("ij,ji->i", left * root / root[:, None], kernel)


def _gradients(
    module: PreferenceModule, data: PreferenceData, sample: list[int], moments: dict[str, Tensor]
) -> tuple[np.ndarray, Tensor]:
    """(M,) u, and (M, W) gradients of u times the root of P, sketched where they are long."""
    size = module.micro_batch_size or MOST_AT_ONCE
    device = next(iter(moments.values())).device
    sketched = sum(moment.numel() for moment in moments.values()) > WIDTH
    objective = DPO(module.objective.beta)
    sums: dict[str, Tensor] = {}

    def take(name: str, gradients: Tensor) -> None:
        sums[name] = sums[name] + gradients.float() if name in sums else gradients.float()

    def row_vectors() -> Tensor:
        parts = []
        for number, (name, moment) in enumerate(moments.items()):
            # At its visit a pair's own gradient is a part of v, the larger the fewer others use the number.
            own = (1 - module.betas[1]) * (sums[name] / data.global_batch_size).square()
            scaled = (sums.pop(name) / ((moment + own).sqrt() + EPS).sqrt()).flatten(1)
            if not sketched:
                parts.append(scaled)
                continue
            generator = torch.Generator().manual_seed(number)
            places = torch.randint(WIDTH, (scaled.shape[1],), generator=generator).to(device)
            signs = 1 - 2 * torch.randint(2, (scaled.shape[1],), generator=generator).to(scaled)
            parts = parts or [scaled.new_zeros(len(scaled), WIDTH)]
            parts[0].index_add_(1, places, scaled * signs)
        return torch.cat(parts, 1)

    found, u = [], []
    for start in tqdm(range(0, len(sample), size), desc="Labels' own pull", unit="batch"):
        batch = move_data_to_device(data.train_pairs.batch(sample[start : start + size]), device)
        with torch.no_grad():
            batch = batch.with_reference(module.policy.reference_log_probs(batch))
        rewards, _ = each_gradient(module.policy, objective, batch, take)
        # DPO's loss has the slope -sigmoid(-u), whatever the run's own was.
        found.append(row_vectors() / torch.sigmoid(-rewards.u)[:, None])
        u.append(rewards.u)
    return torch.cat(u).double().cpu().numpy(), torch.cat(found)


def _moments(module: PreferenceModule, checkpoint: Path) -> dict[str, Tensor] | None:
    """Adam's v without its bias, by parameter; None where the checkpoint has none."""
    found = torch.load(checkpoint, map_location="cpu", weights_only=True).get("optimizer_states")
    if not found or "exp_avg_sq" not in next(iter(found[0].get("state", {}).values()), {}):
        return None
    moments = {}
    for (name, parameter), state in zip(
        module.policy.adapter().items(), found[0]["state"].values(), strict=True
    ):
        moment = state["exp_avg_sq"] / (1 - module.betas[1] ** float(state["step"]))
        moments[name] = moment.to(parameter.device)
    return moments


def _clipped(module: PreferenceModule, run: Run, updates: int) -> float:
    """The factor by which clipping has shortened gradients, on average over those of these updates logged."""
    path = Path(run.folder) / METRICS
    if module.max_grad_norm is None or not path.is_file():
        return 1.0
    table = pd.read_csv(path)
    if "train/grad_norm" not in table:
        return 1.0
    norms = table["train/grad_norm"][table["step"] < updates].dropna()
    return float((module.max_grad_norm / norms).clip(upper=1).mean()) if len(norms) else 1.0
