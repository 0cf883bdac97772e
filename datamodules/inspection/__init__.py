"""Statistics of a dataset under a tokenizer (``pacmr inspect``)."""
