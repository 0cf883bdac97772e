"""Reading of what a chat endpoint sends: a whole answer, or a problem; and the tokens that it bills."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NO_ANSWER, REJECTED = 409, 422
"""Statuses of answers of no use: one that the openai client asks for again, and one that would not change."""
_LONGEST = 200
_CUT_OFF = (
    "error",
    "failed",
    "abort",
    "aborted",
    "cancelled",
    "network_error",
    "insufficient_system_resource",
)
_FILTERED = ("content_filter", "sensitive", "safety", "recitation", "prohibited_content")
_AT_LIMIT = ("length", "max_tokens", "model_length", "model_context_window_exceeded")
"""Finish reasons in small letters, of OpenAI and other providers."""
_ABOUT_ONE = re.compile(
    r"context.?(length|window|size)|too long|content.?(filter|policy|management)|flagged", re.I
)
"""Messages that reject one conversation for its own content or length."""
_NO_CREDIT = re.compile(r"insufficient.?(quota|credit|balance|fund)|credit balance is too low", re.I)
_STATUSES = {"rate.?limit|too.many|exhausted": 429, "api.?key|auth": 401, "not.?found": 404, "invalid": 400}
"""Statuses by the names that providers give to errors."""
_TAGS = "think|thinking|thought|thoughts|reason|reasoning|reflection|scratchpad"
_MARK = re.compile(
    rf"(?P<begin><(?:\w+:)?(?:{_TAGS})>|\[THINK\]|◁think▷|<\|begin_of_thought\|>|<unused94>)"
    rf"|</(?:\w+:)?(?:{_TAGS})>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>|<unused95>",
    re.I,
)


@dataclass(frozen=True)
class Tokens:
    """Tokens that a server bills for some requests."""

    prompt: int = 0
    completion: int = 0
    uncounted: int = 0
    """Requests that may be billed and came back without a count: timed out, broken off, or never counted."""

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.prompt + other.prompt,
            self.completion + other.completion,
            self.uncounted + other.uncounted,
        )

    def __str__(self) -> str:
        missing = f", {self.uncounted:,} requests without a count" if self.uncounted else ""
        return f"{self.prompt:,} in, {self.completion:,} out{missing}"


NO_TOKENS = Tokens()


@dataclass(frozen=True)
class Reply:
    """A whole answer, or a problem."""

    status: int
    """HTTP status: the server's own, or the one that an error inside a 200 amounts to."""
    problem: str | None = None
    text: str | None = None
    """The answer with its reasoning; None where there is a problem."""
    cut: bool = False
    """True if a limit of tokens ended the text."""


def read_response(
    status: int, content: bytes, valid: Callable[[str], bool], max_tokens: int | None
) -> tuple[Reply, Tokens]:
    """Return the answer in an HTTP response, or the problem, and the tokens that it bills.

    A 200 may hold an error of the provider, a text that broke off, or a web page.

    >>> read_response(200, b'{"error": {"code": 429, "message": "slow down"}}', bool, None)[0]
    Reply(status=429, problem='status 429: slow down', text=None, cut=False)
    """
    try:
        body = json.loads(content)
    except ValueError:  # a proxy's page, or half of the JSON
        body = content.decode(errors="replace")
    fields = body[0] if isinstance(body, list) and body else body
    fields = fields if isinstance(fields, dict) else {}
    tokens = _tokens(fields.get("usage"))
    try:
        choice = fields["choices"][0]
        message, error = choice["message"], fields.get("error") or choice.get("error")
        found = _answer(choice, message, valid, max_tokens, tokens)
    except (LookupError, TypeError, AttributeError, UnicodeEncodeError):
        error = fields.get("error") or next(filter(None, map(fields.get, ("message", "detail", "msg"))), None)
        found = Reply(NO_ANSWER, f"the server's answer is no chat completion: {said(body)!r}")
    if status < 400 and not error:
        return found, tokens or Tokens(uncounted=1)
    fields = error if isinstance(error, dict) else fields
    return _error(status, fields, said(error or body)), tokens or NO_TOKENS


def _error(status: int, fields: dict[str, Any], reason: str) -> Reply:
    """Return the problem of an error, whose status may be inside it, in numbers or words."""
    names = " ".join(str(fields.get(name)) for name in ("code", "type", "status"))
    if _NO_CREDIT.search(f"{names} {reason}"):
        status = 402  # some send 429, which would be tried again
    elif status < 400:
        number = re.search(r"\b[45]\d\d\b", names)
        by_name = (known for pattern, known in _STATUSES.items() if re.search(pattern, names, re.I))
        status = int(number[0]) if number else next(by_name, 502)
    problem = f"status {status}: {reason}".removesuffix(": ")
    if status in (400, 403, 413, 422):
        of_one = _ABOUT_ONE.search(f"{names} {reason}")
        return Reply(REJECTED if of_one else 403 if status == 403 else 400, problem)
    return Reply(status, problem)


def _answer(
    choice: dict[str, Any],
    message: dict[str, Any],
    valid: Callable[[str], bool],
    max_tokens: int | None,
    tokens: Tokens | None,
) -> Reply:
    # A refusal is an answer too, in its own field.
    text = _content(message.get("content")) or message.get("refusal") or ""
    text.encode()
    answer = without_thoughts(text)
    finish = str(choice.get("finish_reason") or "").lower()
    cut = finish in _AT_LIMIT
    if not finish and max_tokens is not None and tokens is not None:
        cut = tokens.completion >= max_tokens
    if finish in _CUT_OFF:
        return Reply(502, f"the answer broke off (finish_reason {finish})")
    if finish in _FILTERED:
        return Reply(REJECTED, "the server's content filter took the answer away")
    if answer.strip() and valid(answer):
        return Reply(200, None, text, cut)
    if answer.strip():
        reason = "the answer is not of the kind that was asked for"
    elif cut:
        reason = f"no text within max_tokens {max_tokens}; the model may need more"
    elif text.strip() or message.get("reasoning_content") or message.get("reasoning"):
        reason = "the answer is nothing but reasoning"
    else:
        reason = "the answer calls a tool" if message.get("tool_calls") else "the answer is empty"
    return Reply(NO_ANSWER, reason)


def _content(content: Any) -> Any:
    """Return a message's content, of which some servers send parts; those of reasoning are left out."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    return "".join(filter(None, parts))


def _tokens(usage: Any) -> Tokens | None:
    """Return the tokens of a ``usage``, also by Anthropic's names; None without any.

    Tokens of a cache count like others. Some servers count reasoning in the total only.
    """

    def number(*names: str) -> int:
        values = [usage.get(name) for name in names]
        return sum(value for value in values if isinstance(value, int))

    if not isinstance(usage, dict):
        return None
    prompt = number("prompt_tokens") or number(
        "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"
    )
    completion = number("completion_tokens") or number("output_tokens")
    completion = max(completion, number("total_tokens") - prompt)
    return Tokens(prompt, completion) if prompt or completion else None


def said(body: Any) -> str:
    """Return the text of an error, which has many forms, on one line of at most 200 characters.

    >>> said({"message": "Provider returned error", "code": 429, "metadata": {"raw": "slow down"}})
    'Provider returned error: slow down'
    >>> said([{"error": {"message": "no such model", "code": 404}}])
    'no such model'
    """
    text = re.sub(r"<(script|style).*?</\1>|<[^<>]*>", " ", _texts(body), flags=re.I | re.S)
    return " ".join(text.split())[:_LONGEST].rstrip(" .")


def _texts(body: Any) -> str:
    if isinstance(body, list):
        return "; ".join(map(_texts, body[:3]))
    if not isinstance(body, dict):
        return "" if body is None else str(body)
    metadata = body.get("metadata")
    found = [body.get(name) for name in ("message", "error", "errors", "detail", "msg")]
    found.append(
        metadata.get("raw") if isinstance(metadata, dict) else None
    )  # OpenRouter: the provider's words
    return ": ".join(filter(None, map(_texts, found))) or json.dumps(body, ensure_ascii=False)


def without_thoughts(text: str) -> str:
    """Return a model's answer without its reasoning; empty if it has only reasoning.

    Reasoning is the text between tags such as ``<think>`` and ``</think>``, before an end tag alone, after an
    unclosed begin tag at the start of a line, or outside the ``final`` channel of gpt-oss.
    """
    start = text.lstrip().removeprefix("<|start|>assistant")
    if start.startswith("<|channel|>"):
        final = start.rpartition("<|channel|>final")[2] if "<|channel|>final" in start else ""
        return re.split(r"<\|(?:return|end)\|>", final.partition("<|message|>")[2])[0].strip()
    if start.startswith("analysis") and "assistantfinal" in start:  # without its special tokens
        return start.rpartition("assistantfinal")[2].strip()
    parts: list[str] = []
    after, begin = 0, None
    for mark in _MARK.finditer(text):
        if mark["begin"]:
            begin = mark.start() if begin is None else begin
            continue
        parts = [] if begin is None else [*parts, text[after:begin]]
        after, begin = mark.end(), None
    # In the middle of a line the tag is only mentioned.
    cut = begin is not None and not text[after:begin].rpartition("\n")[2].strip()
    if not after and not cut:
        return text
    return "".join([*parts, text[after:begin] if cut else text[after:]]).strip()
