"""Features of pairs for VNet, from rewards under the current policy and from earlier visits."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from ..batch import UNKNOWN, PairBatch
from ..errors import UserError, first_line
from ..ranks import on_all_ranks
from ..rewards import Rewards

Feature = Literal[
    "delta",
    "u",
    "perplexity_difference",
    "dpo_loss",
    "entropy",
    "margin_evolution",
    "margin_fluctuation",
    "reference_deviation",
]
"""Names of the features in the order of VNet's inputs, those of Qu et al. first."""

PAPER: tuple[Feature, Feature] = ("delta", "u")
"""Features of Qu et al., unscaled, in nats; all others are standardised."""
_HISTORY: tuple[Feature, ...] = ("margin_evolution", "margin_fluctuation")
"""Features of ``PairHistory``."""

_NOW: dict[Feature, Callable[[Rewards], Tensor]] = {
    "delta": lambda rewards: rewards.delta,
    "u": lambda rewards: rewards.u,
    "perplexity_difference": lambda rewards: rewards.perplexity_difference,
    "dpo_loss": lambda rewards: -F.logsigmoid(rewards.u),
    "entropy": lambda rewards: rewards.entropy,
    "reference_deviation": lambda rewards: rewards.h.abs(),
}


def ordered(names: Sequence[Feature]) -> tuple[Feature, ...]:
    """Return the features in VNet's order; no, duplicate or unknown ones raise a UserError."""
    known: tuple[Feature, ...] = get_args(Feature)
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise UserError(
            f"features is {list(names)}, but VNet needs one or more different ones of {', '.join(known)}."
        )
    return tuple(name for name in known if name in names)


class PairFeatures:
    """Features of pairs, in VNet's order; ``history`` is a folder of an earlier run's visits."""

    def __init__(self, names: Sequence[Feature], history: str | None = None):
        self.names = names
        self.history = history
        self.need_entropies = "entropy" in names
        self.look_back = any(name in _HISTORY for name in names)
        if history is not None and not self.look_back:
            raise UserError(
                f"history is {history}, but none of the features {', '.join(names)} looks at earlier visits; "
                f"add {' or '.join(_HISTORY)}, or leave it out."
            )
        self._history = PairHistory()

    def __call__(self, rewards: Rewards, batch: PairBatch) -> list[Tensor]:
        """Return (N,) values of each feature, without recording the visit."""
        past = self._history.features(batch.ids, rewards.u) if self.look_back else {}
        return [past[name] if name in past else _NOW[name](rewards) for name in self.names]

    def observe(self, rewards: Rewards, batch: PairBatch) -> None:
        """Record a visit of this rank's N pairs; all ranks call it."""
        if self.look_back:
            self._history.observe(batch.ids, rewards.u)

    def check_pairs(self, pairs: Any) -> None:
        """Read the history of the datamodule's ``train_pairs`` if there is one."""
        if self.history is not None:
            self._history.read(self.history, dict(zip(pairs.rows["id"][:], pairs.flipped, strict=True)))

    def check_plan(self, updates: int, updates_per_epoch: int) -> None:
        """Refuse features of earlier visits if no pair is visited twice."""
        if self.look_back and self.history is None and updates <= updates_per_epoch:
            named = ", ".join(name for name in self.names if name in _HISTORY)
            raise UserError(
                f"features has {named}, which need earlier visits of a pair, but in a run of {updates} "
                f"updates ({updates_per_epoch} an epoch) no pair is visited twice; train for more epochs, or "
                "give an earlier run's visits as history."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded visits, if any."""
        return {"history": self._history.state_dict()} if self.look_back else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore recorded visits."""
        if self.look_back:
            self._history.load_state_dict(state["history"])


DECAY = 0.5
"""Share that the exponential mean keeps at a visit; low, since a visit is an epoch."""


class PairHistory:
    """The first u of each pair, and the exponential mean and variance of u over its visits.

    With d = u - mean, a visit adds (1 - DECAY) d to the mean and makes the variance DECAY (variance + (1 -
    DECAY) d^2). They start at the first u and at 0. All ranks hold all pairs.
    """

    def __init__(self) -> None:
        self._visits: dict[str, tuple[float, float, float]] = {}
        """First u, mean and variance, by id."""

    def features(self, ids: list[str], u: Tensor) -> dict[str, Tensor]:
        """Return (N,) means of u minus the first and deviations, with this visit, which is not recorded."""
        seen = [self._next(name, value) for name, value in zip(ids, u.tolist(), strict=True)]
        return {
            "margin_evolution": u.new_tensor([mean - first for first, mean, _ in seen]),
            "margin_fluctuation": u.new_tensor([math.sqrt(variance) for *_, variance in seen]),
        }

    def observe(self, ids: list[str], u: Tensor) -> None:
        """Record a visit of this rank's N pairs; all ranks call it."""
        for name, value in on_all_ranks(list(zip(ids, u.tolist(), strict=True))):
            self._visits[name] = self._next(name, value)

    def read(self, folder: str, labels: Mapping[str, int]) -> None:
        """Start from an earlier run's folder ``weights``; ``labels`` has 1 (flipped), 0 or -1 by id."""
        import pandas as pd  # a slow import

        try:
            table = pd.read_parquet(folder, columns=["id", "step", "u", "flipped"])
        except (OSError, ValueError) as error:
            raise UserError(
                f"history is {folder}, which cannot be read as visits ({first_line(error)}); name the "
                "folder weights of a run."
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
        """Return the three numbers of each visited pair."""
        return {name: list(values) for name, values in self._visits.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of ``state_dict``."""
        self._visits = {name: tuple(values) for name, values in state.items()}
