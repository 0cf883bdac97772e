"""``pacmr inspect``: what a dataset and a tokenizer make of each other."""
