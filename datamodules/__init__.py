"""LightningDataModules: sources, noise, rewordings, tokenization, paired batches."""
