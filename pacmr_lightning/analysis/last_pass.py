"""Values of all training pairs under the trained policy."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..batch import UNKNOWN, LogProbs, PairBatch
from ..modules import PreferenceModule
from ..policy import PolicyModel
from ..rewards import Rewards, Weights
from ..runs.finished_run import ready

_PART = 1000


def last_pass(module: PreferenceModule, pairs: Any, title: str = "Last pass") -> pd.DataFrame:
    """Compute a module's values of N pairs with labels as trained; log-probabilities are cached on disk.

    Sets ``pairs.reference`` if it is None. Returns N rows: ``id``, ``prompt`` (index among distinct prompts),
    ``category``, ``observed`` (the column of the response trained as chosen: "rejected" if the noise swapped
    it), ``weight``, ``u`` and ``delta`` (nats), ``a`` and ``b`` (NaN if the weighting has none), ``loss``
    (unweighted), ``flipped`` (pandas' ``boolean``, NA if unknown).
    """
    policy = ready(module)
    module.weighting.check_pairs(pairs)  # which may take the weights from their columns
    if pairs.reference is None:
        pairs.reference = pairs.reference_log_probs(policy)
    all_values = torch.from_numpy(pairs.values(log_probs, policy, title, of_adapter=True))
    parts = []
    for start in range(0, len(pairs), _PART):
        values = all_values[start : start + _PART]
        batch = pairs.batch(list(range(start, start + len(values))))
        now = LogProbs(*values.unbind(1))
        parts.append(_columns(module, Rewards.of(now, batch, module.objective.beta), batch))
    frame = pd.concat(parts, ignore_index=True)
    frame.insert(1, "prompt", pd.factorize(np.array(pairs.rows["prompt"][:], dtype=object))[0])
    frame.insert(2, "category", pairs.rows["category"][:])
    frame["texts"] = pairs.rows["texts"][:]
    frame.insert(3, "observed", np.where(pairs.swapped, "rejected", "chosen"))
    return frame


def log_probs(policy: PolicyModel, batch: PairBatch) -> Tensor:
    """Return (n, 2) log-probabilities of chosen and rejected."""
    sums = policy.log_probs(batch)
    return torch.stack([sums.chosen, sums.rejected], dim=1)


def _columns(module: PreferenceModule, rewards: Rewards, batch: PairBatch) -> pd.DataFrame:
    weights: Weights = module.weighting.weights(rewards, batch)
    with torch.no_grad():
        loss = module.objective(rewards)
    values = {"weight": weights.g, "u": rewards.u, "delta": rewards.delta, "a": weights.a, "b": weights.b}
    values["loss"] = loss
    nothing = torch.full_like(rewards.u, torch.nan)
    frame = pd.DataFrame(
        {name: (nothing if value is None else value).double().numpy() for name, value in values.items()}
    )
    frame.insert(0, "id", batch.ids)
    flipped = pd.Series(batch.flipped.numpy() == 1, dtype="boolean")
    frame["flipped"] = flipped.mask(batch.flipped.numpy() == UNKNOWN)
    return frame
