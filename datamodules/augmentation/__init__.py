"""Augmented prompts (``pacmr augment``) by back-translation, paraphrase or rules."""
