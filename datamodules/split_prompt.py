"""Prompt and responses of rows that hold whole texts or conversations."""

from dataclasses import dataclass
from typing import Any

from pacmr_lightning.evaluation.conversation import Messages

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"

DIFFERENT_PROMPTS = "different prompts"
NO_COMMON_PROMPT = "no common prompt"
NO_ANSWER = "last message not from assistant"
NO_COMPLETION = "no completion"


@dataclass(frozen=True)
class PromptAndResponses:
    """A prompt with its two responses or one completion, or the reason why a row is unusable."""

    prompt: Any = ""
    """A text, or a conversation where the row holds chat messages."""
    responses: tuple[Any, ...] = ()
    """Texts; for chat messages each a list of one message."""
    reason: str | None = None


def split_messages(prompt: Messages | None, chosen: Messages, rejected: Messages) -> PromptAndResponses:
    """Return prompt and responses of checked messages.

    The last message of each side, from the assistant, is the response. What precedes it, after the given
    prompt unless it repeats that, must be the same on both sides. If a repetition is unclear, the row is
    unusable (``different prompts``).
    """
    one, other = _joined(prompt, chosen), _joined(prompt, rejected)
    if one is None or other is None:
        return PromptAndResponses(reason=DIFFERENT_PROMPTS)
    if not one or not other or not one[-1]["role"] == other[-1]["role"] == "assistant":
        return PromptAndResponses(reason=NO_ANSWER)
    if min(len(one), len(other)) < 2:
        return PromptAndResponses(reason=NO_COMMON_PROMPT)
    if one[:-1] != other[:-1]:
        return PromptAndResponses(reason=DIFFERENT_PROMPTS)
    return PromptAndResponses(one[:-1], (one[-1:], other[-1:]))


def split_completion(prompt: Messages | None, completion: Messages) -> PromptAndResponses:
    """Return prompt and completion of checked messages: the completion is the last one."""
    messages = _joined(prompt, completion)
    if messages is None or len(messages) < 2 or messages[-1]["role"] != "assistant":
        return PromptAndResponses(reason=NO_COMPLETION)
    return PromptAndResponses(messages[:-1], (messages[-1:],))


def split_prompt(chosen: str, rejected: str) -> PromptAndResponses:
    """Return the prompt that two texts share, with the rest of each, or the reason why there is none.

    HH transcripts (both begin with ``\\n\\nHuman:``): the prompt ends with the last ``\\n\\nAssistant:`` and
    must be equal. Other texts: the longest common prefix up to the whitespace before the first word that
    differs. (TRL's ``extract_prompt`` backs up over one space only and cuts "blue" and "black" after "bl".)
    """
    if chosen.startswith(HUMAN) and rejected.startswith(HUMAN):
        return _split_transcripts(chosen, rejected)
    pairs = enumerate(zip(chosen, rejected, strict=False))
    common = chosen[: next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))]
    # If a text ends with the common prefix, its last word goes to the responses, so that none is empty.
    if not all(text[len(common) : len(common) + 1].isspace() for text in (chosen, rejected)):
        common = common[: max((i for i, character in enumerate(common) if character.isspace()), default=0)]
    prompt = common.rstrip()
    if not prompt:
        return PromptAndResponses(reason=NO_COMMON_PROMPT)
    return PromptAndResponses(prompt, (chosen[len(prompt) :], rejected[len(prompt) :]))


def _split_transcripts(chosen: str, rejected: str) -> PromptAndResponses:
    ends = [text.rfind(ASSISTANT) + len(ASSISTANT) for text in (chosen, rejected)]
    if min(ends) < len(ASSISTANT):
        return PromptAndResponses(reason=NO_COMMON_PROMPT)
    if chosen[: ends[0]] != rejected[: ends[1]]:
        return PromptAndResponses(reason=DIFFERENT_PROMPTS)
    return PromptAndResponses(chosen[: ends[0]], (chosen[ends[0] :], rejected[ends[1] :]))


def _joined(prompt: Messages | None, messages: Messages) -> Messages | None:
    """Return the whole conversation, whether or not it repeats the prompt; None if that is unclear."""
    head = prompt or []
    if messages[: len(head)] == head:
        return messages
    # A repetition may lack the system message or be the only one with it, and differ in outer whitespace.
    (system, asked), (own_system, turns) = _system_and_turns(head), _system_and_turns(messages)
    before = _stripped(turns[:-1])
    if before[: len(asked)] == _stripped(asked):
        if system and own_system and _stripped(system) != _stripped(own_system):
            return None
        return (own_system or system) + turns
    # A system message, the last question or another one right after it may repeat the prompt in other words.
    question = next((turn for turn in reversed(_stripped(asked)) if turn["role"] == "user"), None)
    asks_again = [turn["role"] for turn in (asked[-1], *turns[:1])] == ["user", "user"]
    return None if own_system or question in before or asks_again else head + messages


def _system_and_turns(messages: Messages) -> tuple[Messages, Messages]:
    count = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    return messages[:count], messages[count:]


def _stripped(messages: Messages) -> Messages:
    return [message | {"content": (message["content"] or "").strip()} for message in messages]
