"""A run: its folder, its checkpoints and logs, and how a finished one is loaded."""
