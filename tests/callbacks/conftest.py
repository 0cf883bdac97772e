"""Small module with PreferenceModule's interface to the callbacks, and runs of it and of a tiny model."""

from types import SimpleNamespace

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, DistributedSampler

from pacmr_lightning.batch import PairBatch, TrainingBatch
from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import PairRecord
from pacmr_lightning.weighting import VNet

from ..conftest import quiet_trainer

PAIRS = 32
BATCH = 8
VNET = VNet(slope=0.5)


def collate(rows):
    batch = PairBatch.collate(
        [f"pair-{i}" for i, _ in rows],
        prompts=[[1 + i % 5, 2] for i, _ in rows],
        chosen=[[3, 4][: 1 + i % 2] for i, _ in rows],
        rejected=[[5] for i, _ in rows],
        flipped=[flip for _, flip in rows],
    )
    return TrainingBatch(batch)


class Data(pl.LightningDataModule):
    """32 pairs, every fourth one flipped; ``flip`` maps their number to a flag or None."""

    def __init__(self, flip=lambda i: i % 4 == 0):
        super().__init__()
        self.task = "toy"
        self.noise_rate = 0.25
        self.counts = {"train": PAIRS, "dropped": {"too_long": 0}}
        self.gold_reward = None
        self.rows = [(i, flip(i)) for i in range(PAIRS)]

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=BATCH // self.trainer.world_size, collate_fn=collate)

    def val_dataloader(self):
        return DataLoader(self.rows[:8], batch_size=4, collate_fn=collate)


class Ordered(Data):
    """Pairs in the order of a single process; Lightning's own sampler would shuffle them."""

    def train_dataloader(self):
        world = self.trainer.world_size
        sampler = DistributedSampler(self.rows, world, self.trainer.global_rank, shuffle=False)
        return DataLoader(self.rows, batch_size=BATCH // world, sampler=sampler, collate_fn=collate)


class Module(pl.LightningModule):
    """One weight, with which u of flipped pairs falls each step. ``kind``: pacmr, fixed or dpo."""

    def __init__(self, kind="pacmr", die_at=None, val_margin=1.5):
        super().__init__()
        self.method = kind
        self.automatic_optimization = False
        self.slope = torch.nn.Parameter(torch.tensor(1.0))
        self.die_at = die_at
        self.val_margin = val_margin

    weighting = SimpleNamespace(start_slope=0.5, start_offset=0.0)

    @property
    def vnet(self):
        return VNET if self.method == "pacmr" else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def training_step(self, batch, batch_idx):
        if self.global_step == self.die_at:
            raise RuntimeError("killed")
        pairs = batch.train
        sign = torch.where(pairs.flipped == 1, -1.0, 1.0)
        number = torch.tensor([float(name.split("-")[1]) for name in pairs.ids], device=self.device)
        u = self.slope * sign * (1 + number / PAIRS)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(-u.mul(sign).mean())
        optimizer.step()
        u = u.detach()
        weight = torch.ones_like(u) if self.method == "dpo" else torch.sigmoid(0.5 * u)
        a, b = (torch.full_like(u, x) if self.method == "pacmr" else None for x in (0.5, 0.0))
        record = PairRecord(pairs.ids, u, 2 * u, weight, a, b, pairs.flipped)
        return {"record": record, "loss": u.mean()}

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", 0.3, batch_size=4)
        self.log("val/rewards/accuracies", 0.75, batch_size=4)
        self.log("val/rewards/margins", self.val_margin, batch_size=4)


def fit(folder, callbacks, module=None, data=None, resume=None, **options):
    """Fit on the CPU, with four steps per epoch, and return the trainer."""
    common = {"max_epochs": 3, "log_every_n_steps": 1, "num_sanity_val_steps": 1}
    trainer = quiet_trainer(folder, callbacks, **{"enable_checkpointing": True, **common, **options})
    trainer.fit(module or Module(), datamodule=data or Data(), ckpt_path=resume)
    return trainer


def train(folder, model, callbacks=(), *, start=pl.Trainer.fit, weighting=None, data=None, **options):
    """Train a tiny model for five updates on 40 pairs of the synthetic benchmark, and return the trainer."""
    torch.manual_seed(1)  # the adapter's A
    policy = PolicyModel(str(model), rank=2)
    module = PreferenceModule(policy, DPO(1.0), weighting, "pacmr", learning_rate=0.05, max_new_tokens=5)
    sizes = {"global_batch_size": 8, "meta_batch_size": 4, "meta_every": module.weighting.every}
    common = {"source": EmbeddedWorld(40, 8), "tokenizer": str(model), "noise_rate": 0.3, **sizes}
    shown = {"logger": TensorBoardLogger(folder, "", ""), "log_every_n_steps": 1}
    trainer = quiet_trainer(folder, callbacks, **{"max_steps": 5, "limit_val_batches": 0, **shown, **options})
    start(trainer, module, datamodule=PreferenceDataModule(**{**common, **(data or {})}))
    return trainer
