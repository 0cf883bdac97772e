"""Learning from noisy human preferences: PACMR-DPO and its baselines as PyTorch Lightning modules."""

import os

import torch

if not torch.accelerator.is_available():
    # DeepSpeed, which transformers imports, else says on stdout that it found none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pacmr_lightning.old_names  # noqa: F401
