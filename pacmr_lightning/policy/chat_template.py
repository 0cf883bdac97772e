"""Conversations as prompt and response under the tokenizer's chat template, and what ends a response."""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..errors import UserError

DATE = datetime(2024, 7, 26)
"""The date that ``strftime_now`` writes in templates, whatever the day (Llama 3's default)."""

_DIRECTIVES = [f"%-{letter}" for letter in "dmHIMSjy"] + [f"%{letter}" for letter in "aAbBcdfHIjmMpSUwWxXyY"]
_CODES = [(directive, DATE.strftime(directive)) for directive in _DIRECTIVES]
_DATED = (
    "{%- macro strftime_now(format) -%}{%- set date = namespace(text=format) -%}"
    f"{{%- for code, value in {_CODES!r} -%}}"
    "{%- set date.text = date.text | replace(code, value) -%}{%- endfor -%}{{ date.text }}{%- endmacro -%}"
)
_MARK = re.compile(r"<[|｜][^<>\s]+[|｜]>|<(?:start|end)_of_\w+>")
_SYSTEM, _ANSWER = "4567", "0123"
_TALK = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]


def render_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any
) -> str:
    """Return a conversation's text under the chat template, with ``DATE`` as today."""
    template = tokenizer.get_chat_template(options.pop("chat_template", None), options.get("tools"))
    if "strftime_now" in template:
        template = _DATED + template
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages], chat_template=template, tokenize=False, **options
    )
    assert isinstance(text, str)  # one conversation, not tokenized
    return text


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
    prompt: list[dict[str, Any]],
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

    def text_of(messages: list[dict[str, Any]], **more: Any) -> str:
        return render_messages(tokenizer, messages, **options, **more)

    try:
        start, whole = text_of(prompt, add_generation_prompt=True), text_of([*prompt, answer])
        if not whole.startswith(start):
            other = text_of([*prompt, {"role": "assistant", "content": _ANSWER}])
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


def with_one_prompt(sides: list[Rendered]) -> list[Rendered]:
    """Return responses to one prompt with the shortest of its forms; the rest belongs to the responses."""
    shortest = min((side.prompt for side in sides), key=len)
    return [Rendered(shortest, side.prompt[len(shortest) :] + side.response, side.changed) for side in sides]


_REASONING = ("reasoning_content", "reasoning", "thinking")


def _changes(messages: list[dict[str, Any]], written: str) -> bool:
    """Return whether a text of the messages is not in ``written`` as often as in all of them."""
    fields = (m.get(key) for m in messages for key in ("content", *_REASONING))
    texts = [text for text in fields if isinstance(text, str) and text.strip()]
    return any(written.count(text) < sum(each.count(text) for each in texts) for text in texts)


def end_tokens(tokenizer: PreTrainedTokenizerBase, own: int | list[int] | None = None) -> list[int]:
    """Return the ids of the tokens that end a response, first the one that training responses end in.

    They are the chat template's end of turn, the tokenizer's EOS and ``own``, the ``eos_token_id`` of a
    model's ``generation_config``. Training, ``predict`` and saved folders share this list.
    """
    tokens = [end_of_turn(tokenizer), tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    return list(dict.fromkeys(token for token in tokens if token is not None))


def stop_at_end_tokens(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set a model's ``eos_token_id`` to its ``end_tokens``: one id, or a list of several."""
    ends = end_tokens(tokenizer, config.eos_token_id)
    config.eos_token_id = ends if len(ends) > 1 else ends[0]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token that the chat template writes after an answer, or None."""
    _, answer, after = _probe(tokenizer).rpartition(_ANSWER)
    ids = tokenizer(after if answer else "", add_special_tokens=False)["input_ids"]
    return next((token for token in ids if token in tokenizer.added_tokens_decoder), None)


def template_warnings(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield a sentence for each oddity of the chat template that changes what a model learns."""
    name = f"The chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    probe = _probe(tokenizer)
    if not probe:
        return
    if "strftime_now" in str(tokenizer.chat_template):
        yield (
            f"{name} writes today's date; it is rendered as of {DATE:%d %B %Y} everywhere, so that tokens do "
            "not depend on the day."
        )
    if own := _own_system_prompt(tokenizer):
        yield f"{name} writes a system prompt of its own, {own[:80]!r}, where a conversation has none."
    start = render_messages(tokenizer, _TALK[:1], add_generation_prompt=True)
    if not probe.startswith(start):
        yield (
            f"{name} ends a prompt in {start[-20:]!r} when it generates, but writes none of that before an "
            "answer in a conversation; prompts end where the two part, in training and in predict."
        )
    begins = probe.removeprefix(start).partition(_ANSWER)[0].strip()
    if begins and start == render_messages(tokenizer, _TALK[:1]):
        yield (
            f"{name} ignores add_generation_prompt, so {begins!r} is learned as the beginning of each "
            "response; take a template that ends a prompt with it."
        )
    unknown = [tokenizer.unk_token_id, None]
    marks = [m for m in dict.fromkeys(_MARK.findall(probe)) if tokenizer.convert_tokens_to_ids(m) in unknown]
    if marks:
        yield (
            f"{name} writes {', '.join(marks)}, which the tokenizer splits into pieces; add them as special "
            "tokens, or take a template of this tokenizer's own."
        )
    if end_of_turn(tokenizer) is None:
        yield (
            f"{name} writes no end token after an answer; {tokenizer.eos_token} is added to each response, "
            "and generation stops there."
        )


def _own_system_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that the template writes in place of a missing system message, or none."""
    try:
        given = render_messages(tokenizer, [{"role": "system", "content": _SYSTEM}, *_TALK])
    except (TemplateError, ValueError, TypeError):  # a template without system messages
        return ""
    before, written, after = given.partition(_SYSTEM)
    without = _probe(tokenizer)
    if not (written and without.startswith(before) and without.endswith(after)):
        return ""
    return without[len(before) : len(without) - len(after)].strip()


def _probe(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return render_messages(tokenizer, _TALK)
    except (TemplateError, ValueError, TypeError):
        return ""
