"""Chat messages of rows: their check, and their JSON."""

import json
from typing import Any

from pacmr_lightning.evaluation.conversation import Messages

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "chatbot", "model", "ai"), "assistant"),
    "system": "system",
}


def checked_messages(messages: list[Any]) -> Messages:
    """Return a conversation without null fields; an invalid message raises ValueError."""
    # Faults of the last message, the response, are reported first.
    checked = [_message(m, last=number == 0) for number, m in enumerate(reversed(messages))]
    return checked[::-1]


def encode_messages(messages: Messages) -> str:
    """Return a checked conversation as JSON."""
    # Templates also write dates and the like with str.
    return json.dumps(messages, ensure_ascii=False, default=str)


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
        texts = [part.get("text") or "" for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else content
    calls = role == "assistant" and fields.keys() - {"role", "content", "name"}
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(wrong.format(message))
    return fields | {"content": content}


def template_options(tools: str | None, options: str | None) -> dict[str, Any]:
    """Return ``apply_chat_template`` options of a row's JSON ``tools`` and ``chat_template_kwargs``."""
    arguments = {} if tools is None else {"tools": json.loads(tools)}
    return arguments if options is None else arguments | json.loads(options)


def decode_messages(text: str) -> Messages:
    """Return the conversation that ``encode_messages`` wrote."""
    return json.loads(text)
