"""Which labels of a finished run's training pairs are wrong, as far as its policy can tell."""
