"""The command line: options from signatures, and errors as one sentence."""
