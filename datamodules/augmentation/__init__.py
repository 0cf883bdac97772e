"""``pacmr augment``: second wordings of prompts, by translation, paraphrase or rules."""
