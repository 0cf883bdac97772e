"""The commands of ``pacmr``, one a file, and what some share; only they know both the method and its data."""
