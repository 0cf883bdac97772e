"""Learning from noisy human preferences: PACMR-DPO and its baselines as PyTorch Lightning modules."""

import logging
import os

import torch

if not torch.accelerator.is_available():
    # DeepSpeed, which transformers imports, else says on stdout that it found none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# On CPUs it misses a kernel that 4-bit bases do not use here; PEFT imports it wherever it is installed.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
