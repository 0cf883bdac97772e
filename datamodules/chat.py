"""Chat messages: how rows keep them, what of them is prompt and response, and the tokenizer's template.

A conversation is a list of ``{"role": ..., "content": ...}``, perhaps with further fields that the template
reads. Rows keep it as JSON text.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from datasets import Dataset
from jinja2 import TemplateError
from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.conversation import Messages

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "chatbot", "model", "ai"), "assistant"),
    "system": "system",
}
"""What chat templates call a role that data may name otherwise."""
_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']:\s.*\}\s*\]\s*$""", re.DOTALL)


def encode_messages(messages: list[Any]) -> str:
    """Return the JSON of a conversation.

    A message keeps all fields that are not null. The ``content`` of an assistant that has other fields, such
    as ``tool_calls``, may be null. A ``content`` that is a list of text parts becomes one text.

    Raises:
        ValueError: an entry is no message, its role has another name in chat templates, or its content is
            no text.
    """
    # The last message is the response, so its faults are named first.
    checked = [_message(m, last=number == 0) for number, m in enumerate(reversed(messages))]
    # Dates and the like are written by templates as they are here.
    return json.dumps(checked[::-1], ensure_ascii=False, default=str)


def _message(message: Any, last: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        hint = ""
        if isinstance(message, dict) and "from" in message:
            hint = (
                "; rename 'from' to 'role' and 'value' to 'content', and the roles to 'user' and 'assistant'"
            )
        raise ValueError(
            f"a list with {message!r}, but a chat message must be an object with two texts, 'role' and "
            f"'content'{hint}"
        )
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
        raise ValueError(
            f"a list with {message!r}, but a chat message must be an object with two texts, 'role' and "
            "'content'"
        )
    return fields | {"content": content}


def messages_of(value: object) -> object:
    """Return what a text of messages holds, as JSON or as Python writes it; any other value as it is.

    Raises:
        ValueError: a text looks like messages and is neither.
    """
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


def _is_message(value: object) -> bool:
    """Return whether a value is a message, perhaps of another layout, or an object that holds messages."""
    if not isinstance(value, dict):
        return False
    kinds = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
    return any(kind <= value.keys() for kind in kinds) or isinstance(value.get("messages"), list)


def fields_of(text: str) -> set[str]:
    """Return the names of the fields beside role and content in what ``encode_messages`` wrote."""
    return {name for message in decode_messages(text) for name in message} - {"role", "content"}


def template_options(tools: str | None, options: str | None) -> dict[str, Any]:
    """Return the keyword arguments of ``apply_chat_template`` of a row.

    Args:
        tools: the row's ``tools`` as JSON; None for none.
        options: the row's ``chat_template_kwargs`` as JSON; None for none.
    """
    found = {} if tools is None else {"tools": json.loads(tools)}
    return found if options is None else found | json.loads(options)


def say_what_the_template_leaves_out(tokenizer: PreTrainedTokenizerBase, rows: Dataset) -> None:
    """Print a line with the ``template_fields`` of rows that the chat template does not name, if any."""
    found = rows.data.column("template_fields").unique().to_pylist()
    fields = {field for names in found if names for field in names.split()}
    template = str(tokenizer.chat_template)
    if unread := sorted(name for name in fields if not re.search(rf"\b{re.escape(name)}\b", template)):
        rank_zero_info(
            f"The chat template of {tokenizer.name_or_path!r} does not read {', '.join(unread)} of the rows."
        )


def decode_messages(text: str) -> Messages:
    """The conversation that ``encode_messages`` wrote."""
    return json.loads(text)


def render(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    answer: dict[str, Any],
    options: dict[str, Any] | None = None,
) -> tuple[str, str, bool]:
    """Prompt and response as the tokenizer's chat template writes them, special tokens included.

    Args:
        tokenizer: has the template.
        prompt: the messages before the answer.
        answer: the assistant's whole message.
        options: further keyword arguments of ``apply_chat_template``, such as ``tools``.

    Returns:
        The prompt's text with the beginning of the assistant's turn; the response's text; and whether the
        template itself ended the turn, with EOS or another token, so that no EOS must be added.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the conversation.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"The rows are chat messages, but the tokenizer {tokenizer.name_or_path!r} has no chat template; "
            "name an instruction-tuned model, or write prompt and responses as texts."
        )
    options = options or {}
    try:
        start = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template([*prompt, answer], tokenize=False, **options)
    except TemplateError as error:
        raise UserError(
            f"The chat template of {tokenizer.name_or_path!r} refuses the roles "
            f"{[m['role'] for m in prompt]} ({error}); change the messages or the template."
        ) from None
    assert isinstance(start, str) and isinstance(whole, str)  # one conversation, not tokenized
    if not whole.startswith(start):
        raise UserError(
            f"The chat template of {tokenizer.name_or_path!r} writes a prompt in another way once its "
            "response follows, so the two cannot be told apart; use another template."
        )
    # Templates put a newline after the end of the turn, which nobody has to learn.
    text = whole[len(start) :].rstrip()
    return start, text, not text.endswith((answer["content"] or "").rstrip())
