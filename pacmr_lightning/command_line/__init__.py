"""The command line: options from signatures, and one sentence for whatever is wrong."""
