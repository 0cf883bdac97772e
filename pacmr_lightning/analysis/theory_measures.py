"""Weights against Theorem 1's optimum, and probabilities against the truth, pair by pair and as numbers.

Exchanging a pair's two responses changes the sign of u, s, logit(q) and log(g+ / g-), and turns a probability
p into 1 - p. Which of them stands first is a matter of how the pair was written down, so every number here is
over the pairs in both orders, and does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from scipy.special import expit
from scipy.stats import rankdata
from torch import Tensor

from ..batch import LogProbs, PairBatch
from ..errors import UserError
from ..modules import PreferenceModule
from ..rewards import Rewards
from ..theory import noisy_posterior, two_rate_log_ratio
from ..weighting import DropFlipped, OracleWeights, Unweighted, Weighting
from ..weighting.features import PAPER
from .last_pass import last_pass

RESAMPLES = 1000
"""Of the bootstrap over prompts."""
BINS = 10
"""Of a reliability diagram: tenths of sigma(u)."""
_CLIP = 1e-12
"""Probabilities that rounded to 0 or 1 have no finite logit."""


def judged_pairs(
    module: PreferenceModule, pairs: Any, rate: float, answers: Path, micro_batch_size: int | None, name: str
) -> pd.DataFrame:
    """What a run's policy and weights say of N pairs, beside the truth.

    Args:
        module: of the finished run; its weighting is taken out.
        pairs: the datamodule's ``train_pairs`` or ``validation_pairs``.
        rate: probability that the noise flips a label.
        answers: file where log-probabilities go as soon as they are there.
        micro_batch_size: pairs in one forward pass; None as in training.
        name: of the progress bar.

    Returns:
        One row a pair, in the order in which it is labelled: ``id``, ``prompt`` (its number), ``flipped``,
        ``u`` and ``delta`` (nats), ``eta`` (probability that the first response is better), ``q``
        (probability that a noisy label says so), ``log_ratio`` (log g+ - log g- of the run's weights, NaN
        where it weighs no pair by what it is), ``optimum`` (Theorem 1's) and ``optimum_at_u`` (Theorem 1's if
        u were the clean preference strength s; NaN where the weights do not look at u).

    Raises:
        UserError: eta of a pair is unknown, or a log-probability is not finite.
    """
    found = pairs.rows["eta"][:]
    unknown = sum(value is None for value in found)
    if unknown:
        raise UserError(
            f"eta, the probability that the chosen response is better, is unknown for {unknown} of the "
            f"{len(found)} pairs of {name}; name runs in the embedded world, or add the column eta."
        )
    eta = torch.tensor(found, dtype=torch.float64).clip(_CLIP, 1 - _CLIP)
    eta = torch.where(torch.tensor(pairs.swapped), 1 - eta, eta)
    weighting, module.weighting = module.weighting, Unweighted()  # asked below, about both orders
    frame = last_pass(module, pairs, answers, micro_batch_size=micro_batch_size, name=name)
    frame = frame[["id", "prompt", "flipped", "u", "delta"]]
    u, delta = (torch.tensor(frame[column].to_numpy()) for column in ("u", "delta"))
    batch = replace(pairs.batch(range(len(pairs))), eta=eta)
    at_u = two_rate_log_ratio(u, rate, rate)
    if isinstance(weighting, OracleWeights):
        at_u = torch.full_like(u, torch.nan)
    return frame.assign(
        eta=eta.numpy(),
        q=noisy_posterior(eta, rate, rate).numpy(),
        log_ratio=weight_log_ratio(weighting, u, delta, batch).numpy(),
        optimum=two_rate_log_ratio(torch.logit(eta), rate, rate).numpy(),
        optimum_at_u=at_u.numpy(),
    )


def weighs(weighting: Weighting) -> bool:
    """Whether the weights depend on what a pair is, so that g+ and g- are there to be compared."""
    return not isinstance(weighting, (Unweighted, DropFlipped)) and not other_features(weighting)


def other_features(weighting: Weighting) -> list[str]:
    """What the weights look at beside Delta and u, of which alone log g+ - log g- is a function."""
    return [name for name in getattr(weighting.vnet, "features", ()) if name not in PAPER]


@torch.no_grad()
def weight_log_ratio(weighting: Weighting, u: Tensor, delta: Tensor, batch: PairBatch) -> Tensor:
    """(N,) log g+ - log g-: g at (Delta, u) against g at (Delta, -u), where the responses are exchanged.

    Args:
        weighting: of a finished run.
        u: (N,) float64 implicit reward differences.
        delta: (N,) float64 implicit reward sums, which the exchange leaves as they are.
        batch: the N pairs with their eta, for weights that know it.

    Returns:
        NaN where ``weighs`` says no.
    """
    if not weighs(weighting):
        return torch.full_like(u, torch.nan)

    def log_weights(u: Tensor, batch: PairBatch) -> Tensor:
        nothing = torch.zeros_like(u)
        policy = LogProbs((delta + u) / 2, (delta - u) / 2)
        weights = weighting.weights(Rewards(policy, LogProbs(nothing, nothing), beta=1.0), batch)
        # Of a weight near 0 the logarithm is known better from where it came.
        if weights.a is None or weights.b is None:
            return weights.g.log()
        return F.logsigmoid(weights.a * u + weights.b)

    assert batch.eta is not None
    exchanged = replace(batch, eta=1 - batch.eta)
    return (log_weights(u, batch) - log_weights(-u, exchanged)).double()


def agreement(optimum: np.ndarray, log_ratio: np.ndarray) -> dict[str, float]:
    """How log-ratios of weights follow the optimal ones, over N pairs in both orders.

    Returns:
        ``pearson`` and ``spearman`` correlation, and ``slope`` of the weights' log-ratio on the optimal one.
    """
    ranks, other_ranks = _signed_ranks(optimum), _signed_ranks(log_ratio)
    return {
        "pearson": _cosine(optimum, log_ratio),
        "spearman": _cosine(ranks, other_ranks),
        "slope": slope(optimum, log_ratio),
    }


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Of the regression of y on x over both orders, whose intercept is 0."""
    return float(x @ y / (x @ x))


def _cosine(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation over both orders, where both means are 0."""
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def _signed_ranks(values: np.ndarray) -> np.ndarray:
    """(N,) ranks among the values in both orders, less their mean."""
    return rankdata(np.concatenate([values, -values]))[: len(values)] - (len(values) + 0.5)


def reliability(u: np.ndarray, **targets: np.ndarray) -> pd.DataFrame:
    """Predicted and true probabilities by tenths of sigma(u), over N pairs in both orders.

    Args:
        u: (N,) implicit reward differences.
        targets: (N,) probabilities that the first response is better, or labels (1, 0), by their names.

    Returns:
        One row a tenth, fewer where values are equal: ``predicted``, the targets' means, ``share`` of the
        2N orders.
    """
    both = np.concatenate([u, -u])
    edges = np.unique(np.quantile(both, np.linspace(0, 1, BINS + 1)[1:-1]))
    bins = np.searchsorted(edges, both, side="right")
    columns = {"predicted": expit(both)}
    columns |= {name: np.concatenate([value, 1 - value]) for name, value in targets.items()}
    size = np.bincount(bins, minlength=len(edges) + 1)
    size = np.where(size, size, np.nan)
    means = {name: np.bincount(bins, value, len(edges) + 1) / size for name, value in columns.items()}
    return pd.DataFrame({**means, "share": size / len(both)}).dropna(ignore_index=True)


def calibration_error(u: np.ndarray, **targets: np.ndarray) -> dict[str, float]:
    """``ece_...`` for each target: its mean distance from sigma(u) over the tenths, by size; 0 is perfect."""
    table = reliability(u, **targets)
    distances = table[list(targets)].sub(table["predicted"], axis=0).abs().mul(table["share"], axis=0)
    return {f"ece_{name}": float(value) for name, value in distances.sum().items()}


def with_intervals(
    measure: Callable[..., dict[str, float]],
    prompts: np.ndarray,
    *columns: np.ndarray,
    resamples: int = RESAMPLES,
    seed: int = 42,
) -> dict[str, float]:
    """A measure with its 95% intervals, the percentiles of a bootstrap over prompts.

    Args:
        measure: numbers by name, from the columns.
        prompts: (N,) numbers of the pairs' prompts; a resample takes all pairs of a prompt or none.
        columns: (N,) arrays.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        For each of the measure's names its value, ``..._low`` and ``..._high``.
    """
    count = int(prompts.max()) + 1
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    rows = (np.repeat(np.arange(len(prompts)), draw[prompts]) for draw in draws)
    resampled = pd.DataFrame([measure(*(column[some] for column in columns)) for some in rows])
    found: dict[str, float] = {}
    for name, value in measure(*columns).items():
        low, high = np.quantile(resampled[name], [0.025, 0.975])
        found |= {name: value, f"{name}_low": float(low), f"{name}_high": float(high)}
    return found
