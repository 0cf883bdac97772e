"""Learning from noisy human preferences: PACMR-DPO and its baselines as PyTorch Lightning modules."""

import logging

# DeepSpeed, which transformers imports, else says on stdout that it found no accelerator.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: not record.getMessage().startswith("Setting accelerator to CPU")
)

# On CPUs it misses a kernel that 4-bit bases do not use here; PEFT imports it wherever it is installed.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
