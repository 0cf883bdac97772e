"""Chat messages: how rows keep them, what of them is prompt and response, and the tokenizer's template.

A conversation is a list of ``{"role": ..., "content": ...}``. Rows keep it as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.chat_template import render_messages
from pacmr_lightning.errors import UserError

Messages = list[dict[str, Any]]

_CALLS = ("tool_calls", "function_call", "tool_call_id")
"""Fields of messages that nothing here reads, and without which a message would not be the same."""


def encode_messages(messages: list[Any]) -> str:
    """JSON of a conversation.

    Raises:
        ValueError: an entry is no message with two texts, or calls a tool.
    """
    for message in messages:
        # Parquet gives every message all fields, empty where they are not its own.
        for key in _CALLS if isinstance(message, dict) else ():
            if message.get(key):
                raise ValueError(
                    f"a list with {message!r}, but of a chat message only 'role' and 'content' are read; "
                    f"write its {key!r} into 'content' as text and remove the field, or remove the row"
                )
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"a list with {message!r}, but a chat message must be an object with two texts, 'role' and "
                "'content'"
            )
    return json.dumps([{"role": m["role"], "content": m["content"]} for m in messages], ensure_ascii=False)


def decode_messages(text: str) -> Messages:
    """The conversation that ``encode_messages`` wrote."""
    return json.loads(text)


class Rendered(NamedTuple):
    """A prompt and its response as the chat template writes them, special tokens included."""

    prompt: str
    """With the beginning of the assistant's turn."""
    response: str
    """With what ends the turn, but no whitespace after it."""
    left_out: list[str]
    """Those of ``LEFT_OUT`` that the row has and the template does not write."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    answer: dict[str, Any],
    options: dict[str, Any] | None = None,
) -> Rendered:
    """Return prompt and response as the tokenizer's chat template writes them.

    Where a template begins an answer in another way when it generates than in a conversation (an empty
    thought, ``<think>``), the prompt ends where the two part, as in TRL.

    Args:
        tokenizer: with a chat template.
        prompt: the messages before the answer.
        answer: the assistant's whole message.
        options: keyword arguments of ``apply_chat_template``, such as ``tools`` or ``enable_thinking``.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the conversation.
    """
    options = options or {}
    name = repr(tokenizer.name_or_path)
    if tokenizer.chat_template is None:
        raise UserError(
            f"The rows are chat messages, but the tokenizer {name} has no chat template; "
            "name an instruction-tuned model, or write prompt and responses as texts."
        )

    def text_of(messages: Messages, **more: Any) -> str:
        return render_messages(tokenizer, messages, **options, **more)

    try:
        start, whole = text_of(prompt, add_generation_prompt=True), text_of([*prompt, answer])
        if not whole.startswith(start):
            other = text_of([*prompt, {"role": "assistant", "content": "0123"}])
            parts = (i for i, (ours, its) in enumerate(zip(start, other, strict=False)) if ours != its)
            start, plain = start[: next(parts, len(other))], text_of(prompt)
            if not (whole.startswith(start) and start.startswith(plain) and len(start) > len(plain)):
                raise UserError(
                    f"The chat template of {name} writes a prompt in another way once its response follows, "
                    "so the two cannot be told apart; use another template."
                )
        left_out = list(_left_out([*prompt, answer], whole, options, str(tokenizer.chat_template), text_of))
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(
            f"The chat template of {name} refuses the roles {[m['role'] for m in [*prompt, answer]]} "
            f"({error}); change the messages or the template."
        ) from None
    # Templates put a newline after the end of the turn, which nobody has to learn.
    return Rendered(start, whole[len(start) :].rstrip(), left_out)


LEFT_OUT = ("a message", "reasoning", "tool calls", "tools")
"""Parts of a row that a template may leave out."""

_REASONING = ("reasoning_content", "reasoning", "thinking")


def _left_out(
    messages: Messages, whole: str, options: dict[str, Any], template: str, text_of: Callable[[Messages], str]
) -> Iterator[str]:
    """Yield those of ``LEFT_OUT`` that a conversation has and its rendered text lacks."""
    if options.get("tools") and "tools" not in template:
        yield "tools"
    if any(m.get("tool_calls") for m in messages) and "tool_calls" not in template:
        yield "tool calls"
    flat = " ".join(whole.split())
    reasoning, missing = False, False
    for place, message in enumerate(messages):
        content = message.get("content")
        text = content if isinstance(content, str) else ""
        before, mark, rest = text.partition("</think>")
        thoughts = [before.rpartition("<think>")[2]] if mark else []
        thoughts += [
            str(message[key]) for key in ("reasoning_content", "reasoning", "thinking") if message.get(key)
        ]
        reasoning |= any(" ".join(thought.split()) not in flat for thought in thoughts)
        said = " ".join((rest if mark else text).split())
        # A text of another message may hold this one, and templates may change a text: so it is changed.
        if said and (said not in flat or message["role"] not in ("user", "assistant")):
            changed = [*messages[:place], {**message, "content": "0123"}, *messages[place + 1 :]]
            missing |= text_of(changed) == whole
    if reasoning:
        yield "reasoning"
    if missing:
        yield "a message"
