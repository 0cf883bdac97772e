"""Callback that stops a policy on its way from the reference, by its KL on held-out pairs."""

import copy
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import move_data_to_device, rank_zero_warn

from pacmr_lightning.errors import check_at_least, check_within
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.metrics import log_numbers
from pacmr_lightning.modules.schedule import datamodule, planned_updates
from pacmr_lightning.strategies.ranks import on_all_ranks
from pacmr_lightning.strategies.sharding import whole

from .recurring import Recurring, check_module
from .samples import trained_pairs

SHARE = 0.02
"""Most of a run's time that checks may take. A check runs a pair twice; training takes three passes."""


class KLGuard(Recurring):
    """KL from policy to reference per token of held-out responses: a line if it is large, and a way back.

    Where it exceeds ``stop``, policy, weighting and objective of the last check below, or of the start, are
    restored, and training ends: the run's model is that one, also if the run is continued.

    Tags: ``val/guard/kl`` of each check, and ``val/guard/restored_step`` if there is one. Files: none. Cost:
    at most 2% of the time of a run of 1,400 pairs or more; of 200 pairs 13%.

    Args:
        pairs: held-out pairs, at even distances; None for 32, or as many as 2% of the time allow, at least 4.
        every: updates between two checks, or a share of the run; see ``Recurring``.
        warn: nats per token above which a line says so, once.
        stop: nats per token above which it goes back; None for never.
    """

    def __init__(
        self, pairs: int | None = None, every: int | float = 0.1, warn: float = 0.5, stop: float | None = 1.0
    ):
        super().__init__(every)
        check_at_least(1, pairs=pairs)
        check_within("(0, inf]", warn=warn)
        check_within("(0, inf]", ", or null for never", stop=stop)
        self.pairs = pairs
        self.warn = warn
        self.stop = stop
        self._state: dict[str, Any] = {}
        """``adapter``, ``weighting``, ``objective`` and ``step`` of the last check below; ``warned``, and
        ``ended`` if it has been restored."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Move before all other callbacks, so that what they measure and save is the restored policy."""
        check_module(self, pl_module)
        others = [one for one in trainer.callbacks if one is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add what is kept, to which a resumed run goes back as one without a break does."""
        checkpoint[type(self).__name__] = self._state

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore what was kept."""
        self._state = checkpoint.get(type(self).__name__, {})

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Keep the state that the run starts from; a run that was ended trains no more."""
        if not trainer.global_step or "warned" not in self._state:
            self._state = {"warned": False}
        if self.stop is None:
            self._state.pop("ended", None)
        if "adapter" not in self._state:
            self._keep(trainer, pl_module)
        every = self.every
        self._updates = planned_updates(trainer)
        checks = 1 / every if isinstance(every, float) else self._updates / (every or self._updates)
        most = SHARE * 3 * trained_pairs(trainer) / (2 * checks)
        held_out = datamodule(trainer).validation_pairs
        number = min(self.pairs or int(min(32, max(4, most))), len(held_out))
        self._batch = held_out.batch([i * len(held_out) // number for i in range(number)])
        if self._state.get("ended"):
            step = self._state["step"]
            rank_zero_warn(f"KLGuard has ended this run; its policy is that of update {step}. Start another.")
            _end(trainer)

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether to check after this update, as always after the run's last one."""
        return super().is_due(trainer) or trainer.global_step == self._updates

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Check no more: the run may have been stopped, and nothing can be logged here."""

    def look(self, trainer: Trainer, pl_module: Any) -> None:
        """Check; all ranks compute the same pairs."""
        kl, step = self._token_kl(trainer, pl_module), trainer.global_step
        log_numbers(trainer, {"val/guard/kl": kl})
        if self.stop is not None and not kl <= self.stop:
            self._restore(pl_module)
            log_numbers(trainer, {"val/guard/restored_step": float(self._state["step"])})
            self._state["ended"] = True
            _end(trainer)
            rank_zero_warn(
                f"KLGuard ends the training: after {step} updates the policy is {kl:.2f} nats per token away "
                f"from its reference on {len(self._batch)} held-out pairs. The run keeps the policy of "
                f"update {self._state['step']}. Try a lower learning_rate, a larger beta, or the method "
                "pacmr_robust in place of pacmr; docs/when_dpo_goes_wrong.md has more."
            )
            return
        self._keep(trainer, pl_module)
        if kl > self.warn and not self._state["warned"]:
            self._state["warned"] = True
            end = "" if self.stop is None else f"; at {self.stop:g} KLGuard ends the training"
            rank_zero_warn(
                f"After {step} updates the policy is {kl:.2f} nats per token away from its reference on "
                f"{len(self._batch)} held-out pairs. Read its responses: try a lower learning_rate, or a "
                f"larger beta{end}. docs/when_dpo_goes_wrong.md has more."
            )

    @torch.no_grad()
    def _token_kl(self, trainer: Trainer, pl_module: PreferenceModule) -> float:
        batch = move_data_to_device(self._batch, trainer.strategy.root_device)
        pl_module.eval()
        parts = [
            pl_module.policy.judged(part).token_kl for part in batch.micro_batches(pl_module.micro_batch)
        ]
        pl_module.train()
        return on_all_ranks([float(torch.cat(parts).mean())])[0]  # else rounding could let some ranks go on

    def _keep(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        if self.stop is None:  # nothing is ever restored
            self._state.pop("adapter", None)
            return
        adapter = pl_module.policy.adapter()
        with whole(adapter.values()):
            kept = {name: value.detach().cpu().clone() for name, value in adapter.items()}
        self._state |= {"adapter": kept, "step": trainer.global_step}
        self._state["weighting"] = copy.deepcopy(pl_module.weighting.state_dict())
        self._state["objective"] = copy.deepcopy(pl_module.objective.state_dict())

    @torch.no_grad()
    def _restore(self, pl_module: PreferenceModule) -> None:
        adapter = pl_module.policy.adapter()
        with whole(adapter.values(), change=True):
            for name, value in adapter.items():
                value.copy_(self._state["adapter"][name])
        pl_module.weighting.load_state_dict(self._state["weighting"])
        pl_module.objective.load_state_dict(self._state["objective"])


def _end(trainer: Trainer) -> None:
    """End the training, also before its ``min_epochs`` and ``min_steps``."""
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
    trainer.should_stop = True
