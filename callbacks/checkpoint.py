"""A run's checkpoints: every n updates, and always the end."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


class RunCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, whose ``last.ckpt`` is the run's last update when training ends.

    With ``every_n_train_steps`` Lightning's own leaves the last multiple of it there.
    """

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves ``last.ckpt`` once more if updates were done since."""
        super().on_train_end(trainer, pl_module)
        if (
            self.save_last
            and self._last_global_step_saved != trainer.global_step
            and not trainer.fast_dev_run
        ):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
