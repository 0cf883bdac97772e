"""Looking at finished runs: whether second wordings of prompts keep a policy's judgement."""
