"""Conversion between transcripts and chat messages."""

import json
import re
from typing import Any

Messages = list[dict[str, Any]]

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""Columns that a row's chat template reads beside the messages."""

_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_NAMES = {role: name for name, role in _ROLES.items()}


def checked_text(text: str) -> str:
    """Return a text; raise ValueError for half of a surrogate pair in it, which UTF-8 does not have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is no valid text; remove that character") from None
    return text


def as_messages(prompt: str | Messages) -> Messages:
    """Return a prompt as chat messages, without a transcript's empty last ``Assistant:`` turn."""
    if not isinstance(prompt, str):
        return prompt
    start, *parts = _TURN.split(prompt)
    if start.strip() or not parts or parts[0] != "Human":
        return [{"role": "user", "content": prompt.strip()}]
    turns = [
        {"role": _ROLES[name], "content": text.strip()}
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def message_text(message: dict[str, Any]) -> str:
    """Return a message's content, then its other fields, such as ``tool_calls``, as JSON."""
    fields = {name: value for name, value in message.items() if name not in ("role", "content")}
    parts = [message.get("content") or "", json.dumps(fields, ensure_ascii=False) if fields else ""]
    return "\n".join(filter(None, parts))


def as_text(messages: Messages) -> str:
    """Return a transcript of ``Human:`` and ``Assistant:`` turns; other roles by their own names."""
    return "\n\n".join(
        f"{_NAMES.get(m['role'], m['role'].title())}: {message_text(m).strip()}" for m in messages
    )
