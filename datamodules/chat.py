"""Chat messages: how rows keep them, what of them is prompt and response, and the tokenizer's template.

A conversation is a list of ``{"role": ..., "content": ...}``. Rows keep it as JSON text.
"""

from __future__ import annotations

import json
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError

Messages = list[dict[str, str]]

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


def render(tokenizer: PreTrainedTokenizerBase, prompt: Messages, response: str) -> tuple[str, str, bool]:
    """Prompt and response as the tokenizer's chat template writes them, special tokens included.

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
    answer = {"role": "assistant", "content": response}
    try:
        start = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([*prompt, answer], tokenize=False)
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
    return start, text, not text.endswith(response.rstrip())
