"""Cross-fitting: u by two DPO policies, each trained on the other half of the prompts."""

import gc
import hashlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar

from ..analysis.last_pass import last_pass
from ..errors import UserError
from ..evaluation.answer_store import content_key
from ..files import replacing, text_hash, write_frame
from ..modules import PreferenceModule
from ..objectives import DPO
from ..policy import PolicyModel
from ..runs.finished_run import FinishedRun, PreferenceData
from ..weighting import Unweighted

FOLDER = "cross-fit"
_SAVES = 10
"""Checkpoints of one training."""


class CrossFit:
    """Two DPO policies with a run's settings, each trained on half of the prompts and scoring the other half.

    Each policy is trained for as many epochs as the run's checkpoint. Results are cached in ``folder``.
    ``groups`` are (N,) numbers of pairs that stay in one half, instead of those of a prompt.
    """

    def __init__(
        self,
        run: FinishedRun,
        data: PreferenceData,
        updates: int,
        beta: float,
        folder: Path,
        groups: np.ndarray | None = None,
    ):
        self.run, self.data, self.beta, self.folder = run, data, beta, folder
        options = run.model["init_args"]
        ignored = ("policy", "objective", "weighting", "method", "max_new_tokens")
        self.options = {name: value for name, value in options.items() if name not in ignored}
        self.options["betas"] = tuple(options["betas"])
        self.policy_options = options["policy"]["init_args"]
        self.pairs = data.train_pairs
        prompts = self.pairs.rows["prompt"][:]
        sides = [int(text_hash(str(name))[:2], 16) % 2 for name in (prompts if groups is None else groups)]
        self.halves = [[i for i, side in enumerate(sides) if side == half] for half in (0, 1)]
        self.updates = [max(1, round(updates * len(half) / len(prompts))) for half in self.halves]
        labels = hashlib.sha256("\n".join(map(str, zip(prompts, self.pairs.swapped, strict=True))).encode())
        # Digest of the base weights, which the audit has checked.
        reference = torch.load(run.checkpoint, "cpu", mmap=True, weights_only=True)["reference"]
        state = [self.policy_options, self.options, beta, data.fit_options(), labels.hexdigest()]
        self.key = content_key(*state, self.updates, reference)[:12]
        self.path = folder / f"u-{self.key}.parquet"

    def kept(self) -> pd.Series | None:
        """Return the cached values of an earlier audit of the same run; None without any."""
        return pd.read_parquet(self.path)["u"] if self.path.is_file() else None

    def check(self) -> None:
        """Raise UserError if a half of the prompts has fewer pairs than an update, and nothing is cached."""
        least, batch = min(map(len, self.halves)), self.data.global_batch_size
        if least < batch and self.kept() is None:
            raise UserError(
                f"Half of the prompts have {least} training pairs, fewer than the run's global_batch_size "
                f"{batch}; audit with --scorer probe or policy, or train a run on more pairs."
            )

    def u(self) -> pd.Series:
        """Return u, in nats, of each training pair by the policy that was not trained on its prompt."""
        kept = self.kept()
        if kept is not None:
            return kept
        self.check()
        parts = []
        for half, (learned, judged) in enumerate(zip(self.halves, self.halves[::-1], strict=True)):
            module = self._trained(half, learned)
            name = f"Policy {half + 1} of 2, unseen pairs"
            scores = last_pass(module, self.pairs.select(judged), name)
            parts.append(scores[["id", "u"]].set_axis(judged))
            del module
            gc.collect()  # frees memory for the other policy
        frame = pd.concat(parts).sort_index()
        write_frame(self.path, frame)
        return frame["u"]

    def _trained(self, half: int, learned: list[int]) -> PreferenceModule:
        module = PreferenceModule(
            PolicyModel(**self.policy_options), DPO(self.beta), Unweighted(), method="dpo", **self.options
        )
        path = self.folder / f"half-{half}-{self.key}.ckpt"
        with _quiet():
            if not path.is_file():
                self._train(module, half, learned, path)
            else:
                module.configure_model()
                checkpoint = torch.load(path, map_location="cpu", weights_only=True)
                module.load_state_dict(checkpoint["state_dict"], strict=False)
        return module

    def _train(self, module: PreferenceModule, half: int, learned: list[int], path: Path) -> None:
        updates = self.updates[half]
        unfinished = self.folder / f"unfinished-{half}-{self.key}"
        every = max(1, updates // _SAVES)
        saves = ModelCheckpoint(
            unfinished, filename="last", every_n_train_steps=every, enable_version_counter=False
        )
        print(f"Policy {half + 1} of 2 is trained on {len(learned)} pairs.", file=sys.stderr)
        seed_everything(self.data.seed, verbose=False)
        trainer = Trainer(
            accelerator=self.run.trainer.get("accelerator") or "auto",
            devices=1,
            precision=self.run.trainer["precision"],
            deterministic=self.run.trainer.get("deterministic"),
            max_steps=updates,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            enable_model_summary=False,
            callbacks=[saves, TQDMProgressBar(leave=True)],
            default_root_dir=self.folder,
        )
        # Both halves share the datamodule, which prepares data once.
        everything, meta, reference = self.data.train_pairs, self.data.meta_every, self.data.reference
        self.data.train_pairs, self.data.meta_every = everything.select(learned), None
        self.data.reference = "live"
        try:
            last = unfinished / "last.ckpt"
            trainer.fit(
                module, cast(LightningDataModule, self.data), ckpt_path=last if last.is_file() else None
            )
        finally:
            self.data.train_pairs, self.data.meta_every = everything, meta
            self.data.reference = reference
        with replacing(path) as temporary:
            adapter = module.policy.adapter().items()
            state = {f"policy.{name}": value.detach().cpu() for name, value in adapter}
            torch.save({"state_dict": state}, temporary)
        for file in unfinished.glob("*.ckpt"):
            file.unlink()
        unfinished.rmdir()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's messages on devices, loaders and the end of a fit."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
