"""Run by test_preference.py: two processes say what they were given.

Usage: python ddp_shares.py TRAIN VALIDATION TOKENIZER
"""

import json
import sys

import torch
from lightning.pytorch import LightningModule, Trainer

from pacmr_lightning.datamodules.preference import PreferenceDataModule
from pacmr_lightning.datamodules.sources import Files


class Recorder(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.share = {"seen": [], "evaluated": [], "prompts": []}

    def training_step(self, batch, _):
        self.share["seen"].append((self.global_step, batch.train.ids, batch.meta and batch.meta.ids))
        return self.weight.sum()

    def validation_step(self, batch, _):
        self.share["evaluated"] += batch.ids

    def predict_step(self, batch, _):
        self.share["prompts"] += batch.prompts

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    train, validation, tokenizer = sys.argv[1:]
    data = PreferenceDataModule(
        Files(train, validation),
        tokenizer,
        global_batch_size=4,
        validation_batch_size=4,
        meta_every=3,
        meta_batch_size=6,
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, num_sanity_val_steps=0, **quiet
    )
    module = Recorder()
    trainer.fit(module, data)
    trainer.predict(module, data, return_predictions=False)
    # In one write, so that the two processes' lines cannot mix.
    sys.stdout.write("SHARE: " + json.dumps(module.share | {"rank": trainer.global_rank}) + "\n")


if __name__ == "__main__":
    main()
