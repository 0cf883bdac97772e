"""What VNet can weigh a pair by: features of its rewards under the current policy, and of earlier visits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from ..batch import PairBatch
from ..errors import UserError
from ..rewards import Rewards
from .pair_history import PairHistory

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
    """Computes features of pairs, and keeps what those of earlier visits need.

    Args:
        names: which, in VNet's order.
        history: folder of the visits of an earlier run, which come first; None for none.

    Raises:
        UserError: ``history`` is given, but no feature is made of earlier visits.
    """

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
        """Looks whether pairs are visited more than once in a run, or were in an earlier one.

        Raises:
            UserError: they are not, and a feature is made of earlier visits.
        """
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
