"""Callback that saves checkpoints: every n updates, at the end and at a signal."""

import os
import re
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pacmr_lightning.errors import UserError
from pacmr_lightning.runs.folder import CHECKPOINTS
from pacmr_lightning.strategies.ranks import max_over_ranks


class RunCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint`` with exact resumption: a resumed run equals an uninterrupted one.

    It saves before the next update, after a validation and after metrics are logged, and ``last.ckpt`` after
    all other callbacks' ``on_train_end``, and before the last update, so that a failure in the last
    validation or at the end costs one update. A resumed run keeps its best states, also with other intervals
    or in a folder that was moved. If ``monitor`` is a metric of the validation, each validated
    state may be among the ``save_top_k`` best (with ``every_n_epochs`` those of every n-th epoch), whatever
    the interval of ``last.ckpt``. At SIGTERM, Ctrl-C or SLURM's requeue signal it finishes the update, saves
    ``last.ckpt``, prints how to continue and exits with status 0 (130 for Ctrl-C).

    Tags: none. Files: ``checkpoints/...`` in the trainer's ``default_root_dir``, each with adapter, VNet,
    optimizers and callbacks, without the base model. Cost: the time and disk space of the checkpoints.
    """

    _default: Any = None  # the last run's dirpath, if none was given

    def __init__(self, *args: Any, enable_version_counter: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs, enable_version_counter=enable_version_counter)  # type: ignore[misc]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Default to the run's folder, with ``last.ckpt``; refuse options after which no run can resume."""
        for option, value, why in (
            ("save_on_exception", True, "a failure leaves half an update; lower every_n_train_steps instead"),
            ("save_weights_only", True, "no run goes on from weights alone; pacmr export writes them"),
            ("save_last", "link", "last.ckpt is the last state, which need not be a kept one; set true"),
        ):
            if getattr(self, option) == value:
                raise UserError(f"checkpoint.{option} is {str(value).lower()}, but {why}.")
        if self.save_last is False and self.save_top_k == 0:
            raise UserError("checkpoint.save_last is false and save_top_k 0, so nothing is saved; set one.")
        self._validated, self._of_validation = -1, False
        given = None if self.dirpath == self._default else self.dirpath
        if stage == "fit" and not trainer.global_step:  # forgets an earlier run, whose files are not its own
            vars(self).update(ModelCheckpoint(monitor=self.monitor, mode=self.mode).state_dict())
        self.dirpath = given or str(Path(trainer.default_root_dir) / CHECKPOINTS)
        self.save_last = True if self.save_last is None else self.save_last
        self._check_name()
        super().setup(trainer, pl_module, stage)
        self._default = None if given else self.dirpath
        self._last = str(Path(self.dirpath) / f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}")

    def _check_name(self) -> None:
        """Refuse a name of files with folders, or that several states or ``last.ckpt`` would share."""
        self._in_name = set(re.findall(r"{(.*?)[:}]", self.filename or "{epoch}-{step}"))
        whole = dict.fromkeys(("epoch", "step"), torch.tensor(0))
        zeros = dict.fromkeys(self._in_name, torch.tensor(0.0)) | whole
        with suppress(ValueError, KeyError, IndexError, TypeError):  # no format
            path = Path(self.format_checkpoint_name(zeros))
            one_folder = path.parent == Path(os.path.normpath(self.dirpath or ""))
            distinct = "step" in self._in_name or self.save_top_k in (0, 1)
            if one_folder and distinct and path.stem != self.CHECKPOINT_NAME_LAST:
                return
        raise UserError(
            f"checkpoint.filename is {self.filename}, but it must be a name without folders, other than last "
            "and with {step} if save_top_k keeps several states, such as best-{step}-{val/loss:.3f} (with "
            "auto_insert_metric_name false)."
        )

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints, in which other intervals find the best states too."""
        return f"{type(self).__qualname__} of the {self.mode} {self.monitor}"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best states; in a run's folder that was moved they are found by their names."""
        best = state_dict["best_k_models"]
        paths = {*best, state_dict["best_model_path"]} - {""}
        moved = {path: str(Path(self.dirpath or "") / Path(path).name) for path in paths}
        if moved and all(map(os.path.isfile, moved.values())):
            kept = {moved[path]: score for path, score in best.items()}
            names = ("best_model_path", "kth_best_model_path")
            state_dict = state_dict | {name: moved.get(state_dict[name], "") for name in names}
            state_dict |= {"best_k_models": kept, "dirpath": self.dirpath}
        if 0 < self.save_top_k < len(best := state_dict["best_k_models"]):  # as if there had never been more
            first = sorted(best, key=best.__getitem__, reverse=self.mode == "max")[: self.save_top_k]
            kept = {path: best[path] for path in first}
            last = {"kth_best_model_path": first[-1], "kth_value": best[first[-1]]}
            state_dict = state_dict | {"best_k_models": kept} | last
        super().load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle signals from here on."""
        super().on_train_start(trainer, pl_module)
        if self.monitor is not None and self.save_top_k > 0:
            side = "lowest" if self.mode == "min" else "highest"
            rank_zero_info(
                f"The best checkpoint has the {side} {self.monitor} (checkpoint.mode {self.mode})."
            )
        self._last_global_step_saved = trainer.global_step
        if Path(trainer.ckpt_path or "").resolve().parent == Path(self._last).resolve().parent:
            self.last_model_path = self._last  # else Lightning keeps the one of a run that was stopped
        self._received = 0
        wanted = [signal.SIGTERM, signal.SIGINT]
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            assert environment.requeue_signal is not None  # None only on Windows, where there is no SLURM
            wanted.append(environment.requeue_signal)
        if threading.current_thread() is threading.main_thread():
            # Replaces Lightning's handlers, which talk to other ranks, or save, in the middle of any
            # operation; Lightning restores the old ones at the end.
            for number in wanted:
                signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        """Store a signal until the ranks check; a second Ctrl-C interrupts at once."""
        if number == signal.SIGINT and self._received == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number

    def on_train_batch_end(self, *args: Any) -> None:
        """Save nothing yet."""

    on_train_epoch_end = on_train_batch_end  # type: ignore[assignment]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the monitored value, which changes if it is one of the validation."""
        self._before = trainer.callback_metrics.get(self.monitor or "")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note which state was validated; refuse metrics that the run does not log, if possible at once."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        metrics = trainer.callback_metrics
        trained = trainer.global_step >= trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._check_logged(metrics, self._in_name, f"checkpoint.filename is {self.filename}", trained)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if (name := getattr(callback, "monitor", None)) and getattr(callback, "strict", True):
                own = callback is self  # others look for themselves, where they need the value
                owner = "checkpoint" if own else type(callback).__name__
                self._check_logged(metrics, {name}, f"{owner}.monitor is {name}", trained and own)
        if not trainer.sanity_checking:
            self._validated = trainer.global_step
            self._of_validation |= metrics.get(self.monitor or "") is not self._before

    def _check_logged(self, found: dict[str, Any], names: set[str], given: str, trained: bool = True) -> None:
        """Refuse a ``given`` option with a metric that is not in ``found`` although it could be."""
        for name in sorted(names - {"epoch", "step"} - found.keys()):
            if trained or name.startswith("val"):
                raise UserError(
                    f"{given}, but nothing has logged {name} by a validation; choose one of "
                    f"{', '.join(sorted(found))}."
                )

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Save the state after the last update, if due or after a signal."""
        if batch_idx % trainer.accumulate_grad_batches:
            return  # no checkpoint holds the gradient of a part of an update
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_if_due(trainer, epoch_ended=batch_idx == 0)
        last = _ends_with(trainer, trainer.global_step + 1, batch_idx + trainer.accumulate_grad_batches)
        if last and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        number = max_over_ranks(self._received, trainer.strategy.root_device)
        if not number:
            return
        received = signal.Signals(number)
        self.last_model_path = self._last
        self._save_checkpoint(trainer, self._last)
        rank_zero_info(
            f"Stopped by {received.name} after update {trainer.global_step}; go on with the same command and "
            "--ckpt_path last."
        )
        if trainer.is_global_zero and received not in (signal.SIGTERM, signal.SIGINT):
            job, task = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_ARRAY_TASK_ID")
            job = job if task is None else f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
            if subprocess.run(["scontrol", "requeue", job], check=False).returncode:
                rank_zero_warn(f"SLURM refused to queue job {job} again; submit it again.")
        # Lightning kills all processes if one that it started ends with another status than 0.
        failed = received == signal.SIGINT and trainer.is_global_zero
        raise SIGTERMException(128 + signal.SIGINT if failed else 0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the state at the end."""
        if self._should_skip_saving_checkpoint(trainer):
            return
        self._save_if_due(trainer, epoch_ended=True, ended=True)
        if self.monitor is not None and self.save_top_k and not self.best_model_path:
            rank_zero_warn(
                f"There is no best checkpoint: checkpoint.monitor is {self.monitor}, which this run did not "
                "log when a checkpoint was due; lower checkpoint.every_n_train_steps "
                f"({self._every_n_train_steps}) if it logs it at all."
            )

    def _save_if_due(self, trainer: Trainer, epoch_ended: bool, ended: bool = False) -> None:
        """Save the k best and ``last.ckpt`` where an interval or a validation of this state says so.

        Lightning's own version, under manual optimization, knows ``every_n_train_steps`` alone, and compares
        a state by the metrics of an earlier one.
        """
        steps, epochs, seconds = self._every_n_train_steps, self._every_n_epochs, self._train_time_interval
        now = trainer.global_step
        epoch = trainer.current_epoch + (not epoch_ended)  # the one of the last update, from 1
        validated, of_epoch = self._validated == now, bool(epochs) and epoch % epochs == 0
        due = steps > 0 and now % steps == 0
        due |= of_epoch and (epoch_ended if self._should_save_on_train_epoch_end(trainer) else validated)
        if seconds is not None:
            assert self._last_time_checked is not None  # since on_train_start
            passed = time.monotonic() - self._last_time_checked >= seconds.total_seconds()
            if trainer.strategy.broadcast(passed):  # clocks differ
                self._last_time_checked, due = time.monotonic(), True
        metrics = self._monitor_candidates(trainer) | {"epoch": torch.tensor(epoch - 1)}
        best = due
        if self._of_validation:  # any validated state may be the best
            best = validated and (of_epoch or not epochs)
        if best and (self.monitor is None or self.monitor in metrics):
            self._check_logged(metrics, self._in_name, f"checkpoint.filename is {self.filename}")
            self._save_topk_checkpoint(trainer, metrics)
            due |= self._last_global_step_saved == now
        if due or ended:
            self._save_last_checkpoint(trainer, metrics)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Write all logged values to disk before the checkpoint, on all ranks."""
        for logger in trainer.loggers:
            logger.save()
        trainer.strategy.barrier("RunCheckpoint")
        _between_updates(trainer, checkpoint["loops"]["fit_loop"])


def _ends_with(trainer: Trainer, updates: int, batches: int) -> bool:
    """Return whether nothing is left to train after so many updates, or batches of the present epoch."""
    is_last = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs
    all_updates = trainer.max_steps != -1 and updates >= trainer.max_steps
    return all_updates or (is_last and batches >= trainer.num_training_batches)


def _between_updates(trainer: Trainer, loops: dict[str, Any]) -> None:
    """Rewrite the loops' state to that of ``on_train_batch_end``, from which Lightning resumes correctly."""
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
    # Else Lightning would count a validation batch twice.
    loops.pop("epoch_loop.val_loop.batch_progress", None)
