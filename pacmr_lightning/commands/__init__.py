"""The commands of ``pacmr``, one a file; here alone datamodules and callbacks are known to the method."""
