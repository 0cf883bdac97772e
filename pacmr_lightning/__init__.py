"""Learning from noisy human preferences: PACMR-DPO and its baselines as PyTorch Lightning modules."""
