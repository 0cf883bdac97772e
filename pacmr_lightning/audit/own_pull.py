"""Self-influence: the change of a pair's u from training on its own label, which hides wrong labels.

To first order an AdamW step at rate lr on a batch of B pairs moves u by

    du_i = lr / B  sum_j K_ij p_j,    K_ij = (grad u_i)^T P (grad u_j),    P = 1 / (sqrt(v) + eps),

with p = -g dl/du. Over a run a pair's own term adds up to sum_t lr_t / N K_ii p_i. A move lowers later p by
D = -dp/du, so the fraction (1 - exp(-A D)) / (A D) of it remains at the end, A = sum_t lr_t / N K.
"""

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
from ..runs.finished_run import MOST_AT_ONCE, FinishedRun, PreferenceData
from ..runs.folder import METRICS

SAMPLE = 128
"""Maximum number of pairs whose gradients are computed; the mean is then within about 4%."""
WIDTH = 65536
"""Length of the sketch of longer gradients; K is then within about 1 / sqrt(WIDTH)."""
EPS = 1e-8
LARGEST = 0.3
"""Self-influence, in standard deviations of u, above which the first order is too coarse."""


def own_pull(
    module: PreferenceModule, data: PreferenceData, run: FinishedRun, updates: int, seed: int = 0
) -> float | None:
    """Return the first-order change of u, in nats, per unit gradient on the pair's own label.

    None without AdamW state or per-pair gradients, or if the change is too large for the first order.
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
    assert module.learning_rate is not None  # a finished run has a number
    peak = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=module.learning_rate)
    schedule: Any = warmup_cosine(peak, planned or updates, module.warmup_ratio, module.min_lr_ratio)
    rates = module.learning_rate * np.array(list(map(schedule["scheduler"].lr_lambdas[0], range(updates))))
    step = _clipped(module, run, updates) * rates.sum() / len(pairs)
    kernel = step * (gradients @ gradients.T).double().cpu().numpy()
    unit = float(remaining(kernel, u, len(pairs)).mean())
    return unit if unit * expit(-u).mean() < LARGEST * u.std() else None


def remaining(kernel: np.ndarray, u: np.ndarray, pairs: int) -> np.ndarray:
    """Return (M,) nats that remain of unit gradients on all N pairs, from (M, M) A and (M,) u of a sample."""
    answers = kernel * (pairs / len(u))
    np.fill_diagonal(answers, np.diag(kernel))
    root = np.sqrt(expit(u) * expit(-u))  # of D, for a symmetric matrix
    decay, directions = np.linalg.eigh(root[:, None] * answers * root)
    decay = decay.clip(1e-9)
    left = (directions * (-np.expm1(-decay) / decay)) @ directions.T
    return np.einsum("ij,ji->i", left * root / root[:, None], kernel)


def _gradients(
    module: PreferenceModule, data: PreferenceData, sample: list[int], moments: dict[str, Tensor]
) -> tuple[np.ndarray, Tensor]:
    """(M,) u, and (M, W) gradients of u times the root of P, sketched if they are long."""
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
            # A pair's own gradient is part of v at its update.
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
    for start in tqdm(range(0, len(sample), size), desc="Self-influence", unit="batch"):
        batch = move_data_to_device(data.train_pairs.batch(sample[start : start + size]), device)
        with torch.no_grad():
            batch = batch.with_reference(module.policy.reference_log_probs(batch))
        rewards, _ = each_gradient(module.policy, objective, batch, take)
        # Divide by the slope of DPO's loss, sigmoid(-u).
        found.append(row_vectors() / torch.sigmoid(-rewards.u)[:, None])
        u.append(rewards.u)
    return torch.cat(u).double().cpu().numpy(), torch.cat(found)


def _moments(module: PreferenceModule, checkpoint: Path) -> dict[str, Tensor] | None:
    """Bias-corrected Adam v by parameter; None if the checkpoint has none."""
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


def _clipped(module: PreferenceModule, run: FinishedRun, updates: int) -> float:
    """Mean factor of gradient clipping over the logged updates."""
    path = Path(run.folder) / METRICS
    if module.max_grad_norm is None or not path.is_file():
        return 1.0
    table = pd.read_csv(path)
    if "train/grad_norm" not in table:
        return 1.0
    norms = table["train/grad_norm"][table["step"] < updates].dropna()
    return float((module.max_grad_norm / norms).clip(upper=1).mean()) if len(norms) else 1.0
