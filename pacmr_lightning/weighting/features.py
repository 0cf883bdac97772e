"""What VNet can weigh a pair by: features of its rewards under the current policy, and of earlier visits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from ..batch import UNKNOWN, PairBatch
from ..errors import UserError
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
"""Names of the features, in the order of VNet's inputs, those of the paper first."""

PAPER: tuple[Feature, Feature] = ("delta", "u")
"""Those of the paper, which VNet gets as they are, in nats; all others are standardised."""
_HISTORY: tuple[Feature, ...] = ("margin_evolution", "margin_fluctuation")
"""Those that ``PairHistory`` has."""

_NOW: dict[Feature, Callable[[Rewards], Tensor]] = {
    "delta": lambda rewards: rewards.delta,
    "u": lambda rewards: rewards.u,
    "perplexity_difference": lambda rewards: rewards.perplexity_difference,
    "dpo_loss": lambda rewards: -F.logsigmoid(rewards.u),
    "entropy": lambda rewards: rewards.entropy,
    "reference_deviation": lambda rewards: rewards.h.abs(),
}


def ordered(names: Sequence[Feature]) -> tuple[Feature, ...]:
    """The features in the order in which VNet takes them, whatever order they are named in.

    Raises:
        UserError: there is none, or one is named twice or is unknown.
    """
    known: tuple[Feature, ...] = get_args(Feature)
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise UserError(
            f"features is {list(names)}, but VNet needs one or more different ones of {', '.join(known)}."
        )
    return tuple(name for name in known if name in names)


class PairFeatures:
    """Features of pairs, named in VNet's order; ``history`` is a folder of an earlier run's visits."""

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
        """(N,) values of each feature of N pairs; what is remembered of the pairs stays as it is."""
        past = self._history.features(batch.ids, rewards.u) if self.look_back else {}
        return [past[name] if name in past else _NOW[name](rewards) for name in self.names]

    def observe(self, rewards: Rewards, batch: PairBatch) -> None:
        """Remembers a visit of this rank's N pairs; all ranks call it together."""
        if self.look_back:
            self._history.observe(batch.ids, rewards.u)

    def check_pairs(self, pairs: Any) -> None:
        """Reads the history of the datamodule's ``train_pairs``, where one is given."""
        if self.history is not None:
            self._history.read(self.history, dict(zip(pairs.rows["id"][:], pairs.flipped, strict=True)))

    def check_plan(self, updates: int, updates_per_epoch: int) -> None:
        """Refuses features of earlier visits where no pair is visited twice, here or in an earlier run."""
        if self.look_back and self.history is None and updates <= updates_per_epoch:
            named = ", ".join(name for name in self.names if name in _HISTORY)
            raise UserError(
                f"features has {named}, which need earlier visits of a pair, but in a run of {updates} "
                f"updates ({updates_per_epoch} an epoch) no pair is visited twice; train for more epochs, or "
                "give an earlier run's visits as history."
            )

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, the same on all ranks; empty where nothing is."""
        return {"history": self._history.state_dict()} if self.look_back else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what is remembered from a dict that holds it, perhaps among other things."""
        if self.look_back:
            self._history.load_state_dict(state["history"])


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
        """(N,) mean of u less its first value, and its standard deviation; this visit's (N,) u included.

        Both are 0 for a pair that is visited for the first time. The visit is not remembered.
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
        """Begins with the visits in the folder ``weights`` of an earlier run of these pairs.

        ``labels`` has 1 for a flipped pair, 0 for one that is not, -1 for unknown, by id.
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
