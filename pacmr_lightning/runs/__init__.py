"""A run's folder: checkpoints, logs, estimates, and loading of a finished run."""
