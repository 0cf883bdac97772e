"""Prompts of rows that hold whole texts: what ``chosen`` and ``rejected`` have in common."""

from __future__ import annotations

from dataclasses import dataclass

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"

DIFFERENT_PROMPTS = "different prompts"
NO_COMMON_PROMPT = "no common prompt"


@dataclass(frozen=True)
class Split:
    """A prompt and what follows it in both texts, or the reason why there is none."""

    prompt: str = ""
    chosen: str = ""
    rejected: str = ""
    reason: str | None = None


def split_prompt(chosen: str, rejected: str) -> Split:
    """Finds the prompt that two texts share.

    Transcripts in the HH format (both begin with ``\\n\\nHuman:``): the prompt is everything up to and with
    the last ``\\n\\nAssistant:``; if that differs between the two, the row is unusable (``different
    prompts``). Other texts: the longest common prefix, backed up to the whitespace before the first word that
    differs, so that both responses begin with whitespace and no word is cut. (TRL's ``extract_prompt`` backs
    up over one space only and cuts "blue" and "black" after "bl".)

    Returns:
        The split, or a split whose ``reason`` is ``different prompts`` or ``no common prompt``.
    """
    if chosen.startswith(HUMAN) and rejected.startswith(HUMAN):
        return _split_transcripts(chosen, rejected)
    pairs = enumerate(zip(chosen, rejected, strict=False))
    common = chosen[: next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))]
    # Where one text ends with the common prefix there is no whitespace next in it: its last word goes to the
    # responses, so that neither of them is empty.
    if not all(text[len(common) : len(common) + 1].isspace() for text in (chosen, rejected)):
        common = common[: max((i for i, character in enumerate(common) if character.isspace()), default=0)]
    prompt = common.rstrip()
    if not prompt:
        return Split(reason=NO_COMMON_PROMPT)
    return Split(prompt, chosen[len(prompt) :], rejected[len(prompt) :])


def _split_transcripts(chosen: str, rejected: str) -> Split:
    """HH: the last Assistant turn of each side is its response."""
    ends = [text.rfind(ASSISTANT) + len(ASSISTANT) for text in (chosen, rejected)]
    if min(ends) < len(ASSISTANT):
        return Split(reason=NO_COMMON_PROMPT)
    if chosen[: ends[0]] != rejected[: ends[1]]:
        return Split(reason=DIFFERENT_PROMPTS)
    return Split(chosen[: ends[0]], chosen[ends[0] :], rejected[ends[1] :])
