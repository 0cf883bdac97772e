"""The LightningModules."""
