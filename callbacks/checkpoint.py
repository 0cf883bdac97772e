"""A run's checkpoints: every n updates, the end, and where the run is asked to stop."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from .stop_signals import StopSignals


class RunCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint`` for runs that go on after any kill as if there had been none.

    - It saves before the next update and not at the end of one, when metrics are not logged yet and a
      validation may be due, which a resumed run would never do.
    - ``last.ckpt`` is the run's last update when training ends, after all that other callbacks do at the end:
      a run that is killed there does it again. (With ``every_n_train_steps`` Lightning's own leaves the last
      multiple of it there.)
    - At SIGTERM and Ctrl-C, or when SLURM wants the job back, the run finishes its update, saves
      ``last.ckpt``, says how to go on and exits, with status 0 (130 for Ctrl-C).
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for signals from here on."""
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step
        self._signals = StopSignals(trainer)

    def on_train_batch_end(self, *args: Any) -> None:
        """Nothing yet."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Saves what the last update has led to, where that is due or the run is asked to stop."""
        super().on_train_batch_end(trainer, pl_module, None, batch, batch_idx - 1)
        if batch_idx % trainer.accumulate_grad_batches:
            return  # no checkpoint holds the gradient of a part of an update
        received = self._signals.agreed(trainer)
        if received is None:
            return
        assert self.dirpath is not None  # since setup
        path = Path(self.dirpath) / f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}"
        self._save_checkpoint(trainer, str(path))
        rank_zero_info(
            f"Stopped by {received.name} after update {trainer.global_step}; go on with the same command and "
            "--ckpt_path last."
        )
        if trainer.is_global_zero:
            self._signals.requeue(received)
        # Lightning kills all processes where one that it has started ends with another status than 0.
        failed = received == signal.SIGINT and trainer.is_global_zero
        raise SIGTERMException(128 + signal.SIGINT if failed else 0)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves where it is due after a validation, but for the run's last."""
        if not _ends(trainer):
            super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves where it is due after an epoch, but for the run's last."""
        if not _ends(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the end."""
        if self._should_skip_saving_checkpoint(trainer):
            return
        metrics = self._monitor_candidates(trainer)
        # last.ckpt comes first: a run that is killed between the two has nothing left to do when it goes on.
        self._save_last_checkpoint(trainer, metrics)
        counts = (
            (trainer.global_step, self._every_n_train_steps),
            (trainer.current_epoch, self.every_n_epochs),
        )
        due = any(every and count % every == 0 for count, every in counts)
        if due and (self.monitor is None or self.monitor in metrics):
            self._save_topk_checkpoint(trainer, metrics)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Makes sure that all of the run before the checkpoint is on disk before it is, on all ranks."""
        for logger in trainer.loggers:
            logger.save()
        trainer.strategy.barrier("RunCheckpoint")
        _between_updates(trainer, checkpoint["loops"]["fit_loop"])


def _ends(trainer: Trainer) -> bool:
    """Whether this was the last update of the run."""
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    of_epoch = trainer.fit_loop.batch_idx + 1 == trainer.num_training_batches
    return (
        of_epoch and trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs
    )


def _between_updates(trainer: Trainer, loops: dict[str, Any]) -> None:
    """Rewrites the state of Lightning's loops to that between two updates.

    As saved, it depends on the hook that it was saved in, and with ``max_steps`` Lightning counts steps and
    epochs wrongly when it resumes from some of them. This is the state of its ``on_train_batch_end``, which
    it resumes right: all is done but for counting the batch.
    """
    if trainer.num_training_batches == float("inf"):
        return
    progress = loops["epoch_loop.batch_progress"]
    done = progress["total"]["processed"]
    epoch, batch = divmod(done, trainer.num_training_batches)
    for counts, number in (("total", done), ("current", batch)):
        progress[counts] = dict.fromkeys(progress[counts], number) | {"completed": number - 1}
    progress["is_last_batch"] = False
    stepped = batch % trainer.accumulate_grad_batches == 0
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = trainer.global_step - stepped
    for counts in loops["epoch_progress"].values():
        counts |= {"ready": epoch + 1, "started": epoch + 1, "processed": epoch, "completed": epoch}
    # Validation starts from its first batch, and Lightning would count the one that was done twice.
    del loops["epoch_loop.val_loop.batch_progress"]
