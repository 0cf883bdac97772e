"""Chat messages: as JSON text in rows, and as prompt and response in the tokenizer's template."""

import ast
import json
import re
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.conversation import Messages
from pacmr_lightning.policy.chat_template import render_messages

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "chatbot", "model", "ai"), "assistant"),
    "system": "system",
}
_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']:\s.*\}\s*\]\s*$""", re.DOTALL)


def encode_messages(messages: list[Any]) -> str:
    """Return a conversation as JSON without null fields; an invalid message raises ValueError."""
    # Faults of the last message, the response, are reported first.
    checked = [_message(m, last=number == 0) for number, m in enumerate(reversed(messages))]
    # Templates also write dates and the like with str.
    return json.dumps(checked[::-1], ensure_ascii=False, default=str)


def _message(message: Any, last: bool) -> dict[str, Any]:
    wrong = "a list with {!r}, but a chat message must be an object with two texts, 'role' and 'content'"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        if isinstance(message, dict) and "from" in message:
            wrong += (
                "; rename 'from' to 'role' and 'value' to 'content', and the roles to 'user' and 'assistant'"
            )
        raise ValueError(wrong.format(message))
    role = message["role"]
    known = _ROLES.get(role.strip().lower(), role)
    if known != role:
        raise ValueError(
            f"a list of chat messages in which {'the last' if last else 'one'} has the role {role!r}, but "
            f"chat templates call it {known!r} (the response must be from 'assistant'); rename the role"
        )
    fields = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        other = [part for part in content if not isinstance(part, dict) or part.get("type") != "text"]
        if other:
            kind = other[0].get("type") if isinstance(other[0], dict) else other[0]
            raise ValueError(
                f"a list of chat messages with a part of content that is {kind!r}, but only parts of "
                "the type 'text' are read; remove the part or the row"
            )
        content = "".join(part.get("text") or "" for part in content)
    calls = role == "assistant" and fields.keys() - {"role", "content", "name"}
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(wrong.format(message))
    return fields | {"content": content}


def messages_of(value: object) -> object:
    """Return messages that a text holds as JSON or Python literals (ValueError if broken), else the value."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        messages = found if isinstance(found, list) else [found]
        return found if messages and all(map(_is_message, messages)) else value
    if _LIKE_MESSAGES.match(value):  # as NumPy writes them, without commas
        raise ValueError(
            f"{value[:80]!r}..., which looks like a list of chat messages but cannot be read; write "
            "it as JSON"
        )
    return value


def looks_like_messages(value: str) -> bool:
    """Return whether a text holds chat messages as JSON or Python literals, perhaps broken ones."""
    try:
        return not isinstance(messages_of(value), str)
    except ValueError:
        return True


def _is_message(value: object) -> bool:
    """True for a message, perhaps with ``from`` and ``value``, and for an object that holds ``messages``."""
    if not isinstance(value, dict):
        return False
    kinds = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
    return any(kind <= value.keys() for kind in kinds) or isinstance(value.get("messages"), list)


def template_options(tools: str | None, options: str | None) -> dict[str, Any]:
    """Return ``apply_chat_template`` options of a row's JSON ``tools`` and ``chat_template_kwargs``."""
    found = {} if tools is None else {"tools": json.loads(tools)}
    return found if options is None else found | json.loads(options)


def decode_messages(text: str) -> Messages:
    """Return the conversation that ``encode_messages`` wrote."""
    return json.loads(text)


class Rendered(NamedTuple):
    """A prompt and its response as the chat template writes them, special tokens included."""

    prompt: str
    """With the beginning of the assistant's turn."""
    response: str
    """With the end of the turn, without whitespace after it."""
    changed: bool
    """True if the template has changed or left out a text of the row's messages, reasoning included."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    answer: dict[str, Any],
    options: dict[str, Any] | None = None,
) -> Rendered:
    """Return prompt and response as the tokenizer's chat template writes them.

    If a template begins an answer differently when it generates (an empty thought, ``<think>``), the prompt
    ends where the two differ, as in TRL. ``options`` are keyword arguments of ``apply_chat_template``.
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
                    "so the two cannot be separated; use another template."
                )
        # Templates write a newline after the end of the turn; it is not trained on.
        response = whole[len(start) :].rstrip()
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(
            f"The chat template of {name} refuses the roles {[m['role'] for m in [*prompt, answer]]} "
            f"({error}); change the messages or the template."
        ) from None
    return Rendered(start, response, _changes([*prompt, answer], start + response))


_REASONING = ("reasoning_content", "reasoning", "thinking")


def _changes(messages: Messages, written: str) -> bool:
    """Return whether a text of the messages is not in ``written`` as often as in all of them."""
    fields = (m.get(key) for m in messages for key in ("content", *_REASONING))
    texts = [text for text in fields if isinstance(text, str) and text.strip()]
    return any(written.count(text) < sum(each.count(text) for each in texts) for text in texts)
