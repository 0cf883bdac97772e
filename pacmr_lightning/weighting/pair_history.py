"""What earlier visits of each pair say of its implicit reward difference: three numbers a pair."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..batch import UNKNOWN
from ..errors import UserError
from ..ranks import on_all_ranks

DECAY = 0.5
"""Share that the exponential mean keeps at a visit; one visit is one epoch, so runs see few of them."""


class PairHistory:
    """The first u of each pair, and the exponential mean and variance of u over its visits.

    With d = u - mean before the visit, a visit makes mean + (1 - DECAY) d of the mean and
    DECAY (variance + (1 - DECAY) d^2) of the variance. They start at the first u and at 0.

    All ranks hold all pairs: a checkpoint is written by one, and a pair may be visited on any of them.
    """

    def __init__(self) -> None:
        self._visits: dict[str, tuple[float, float, float]] = {}
        """First u, mean and variance, by the pair's id."""

    def features(self, ids: list[str], u: Tensor) -> dict[str, Tensor]:
        """(N,) mean of u less its first value, and standard deviation of u, the current visit included.

        Both are 0 for a pair that is visited for the first time.

        Args:
            ids: of N pairs.
            u: (N,) at the current visit, which stays out of what is remembered.
        """
        seen = [self._next(name, value) for name, value in zip(ids, u.tolist(), strict=True)]
        return {
            "margin_evolution": u.new_tensor([mean - first for first, mean, _ in seen]),
            "margin_fluctuation": u.new_tensor([math.sqrt(variance) for *_, variance in seen]),
        }

    def observe(self, ids: list[str], u: Tensor) -> None:
        """Remembers a visit of this rank's N pairs, on all ranks, which call it together."""
        for name, value in on_all_ranks(list(zip(ids, u.tolist(), strict=True))):
            self._visits[name] = self._next(name, value)

    def read(self, folder: str, labels: Mapping[str, int]) -> None:
        """Begins with the visits of an earlier run, in their order.

        Args:
            folder: ``weights`` of that run, which ``WeightRecorder`` wrote.
            labels: by id of the pairs that are going to be visited, 1 flipped, 0 not, -1 unknown.

        Raises:
            UserError: the folder cannot be read, knows no visit or no u of some pair, or saw other labels.
        """
        import pandas as pd  # takes a while, and most runs do without

        try:
            table = pd.read_parquet(folder, columns=["id", "step", "u", "flipped"])
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise UserError(
                f"history is {folder}, which cannot be read as visits ({reason}); name the folder weights of "
                "a run."
            ) from None
        self._visits = {}
        for name, u in table.sort_values("step", kind="stable")[["id", "u"]].itertuples(index=False):
            self._visits[name] = self._next(name, u)
        self._visits = {name: self._visits[name] for name in labels if name in self._visits}
        if missing := [name for name in labels if name not in self._visits]:
            raise UserError(
                f"The visits in {folder} are not of {len(missing)} of {len(labels)} training pairs "
                f"({missing[0]} for one); name those of a run on the same data."
            )
        if odd := [name for name, (_, mean, _) in self._visits.items() if not math.isfinite(mean)]:
            raise UserError(
                f"The visits in {folder} are not finite of {len(odd)} pairs ({odd[0]} for one); "
                "name those of a run that did not diverge."
            )
        seen = dict(table.loc[table["flipped"].notna(), ["id", "flipped"]].itertuples(index=False))
        known = [name for name, flag in labels.items() if flag != UNKNOWN and name in seen]
        if other := [name for name in known if bool(seen[name]) != bool(labels[name])]:
            raise UserError(
                f"The visits in {folder} are of {len(other)} of {len(labels)} training pairs with the other "
                "label; name those of a run with the same noise_rate and noise_seed."
            )

    def _next(self, name: str, u: float) -> tuple[float, float, float]:
        if name not in self._visits:
            return u, u, 0.0
        first, mean, variance = self._visits[name]
        d = u - mean
        return first, mean + (1 - DECAY) * d, DECAY * (variance + (1 - DECAY) * d * d)

    def state_dict(self) -> dict[str, Any]:
        """The three numbers of each pair that was visited."""
        return {name: list(values) for name, values in self._visits.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self._visits = {name: tuple(values) for name, values in state.items()}
