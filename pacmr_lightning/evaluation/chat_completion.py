"""Reading of what a chat endpoint sends: a whole answer, or a problem; and the tokens that it bills."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NO_ANSWER, FILTERED = 409, 422
"""Statuses of answers of no use: one that the openai client asks for again, and one that would not change."""
_LONGEST = 200
_AT_LIMIT = ("length", "max_tokens", "model_length", "model_context_window_exceeded")
_BROKEN = re.compile("error|fail|abort|cancel|insufficient|filter|sensitive|safety|recitation|prohibited")
"""Finish reasons in small letters, of OpenAI and other providers, of an answer that broke off."""
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
    """Return the problem of an error, whose status may be a number inside it."""
    if status < 400:
        number = re.search(r"\b[45]\d\d\b", f"{fields.get('code')} {fields.get('status')}")
        status = int(number[0]) if number else 502
    return Reply(status, f"status {status}: {reason}".removesuffix(": "))


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
    if _BROKEN.search(finish):
        # A content filter takes it away again.
        status = FILTERED if "filter" in finish else NO_ANSWER
        return Reply(status, f"the answer broke off (finish_reason {finish})")
    if answer.strip() and valid(answer):
        return Reply(200, None, text, cut)
    if answer.strip():
        return Reply(NO_ANSWER, "the answer is not of the kind that was asked for")
    short = f"no text within max_tokens {max_tokens}; the model may need more"
    return Reply(NO_ANSWER, short if cut else "the answer has no text, beside reasoning or tools")


def _content(content: Any) -> Any:
    """Return a message's content, of which some servers send parts; those of reasoning are left out."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    return "".join(filter(None, parts))


def _tokens(usage: Any) -> Tokens | None:
    """Return the tokens of a ``usage``; None without any. Some servers count reasoning in the total only."""
    if not isinstance(usage, dict):
        return None
    found = (usage.get(f"{name}_tokens") for name in ("prompt", "completion", "total"))
    prompt, completion, total = (number if isinstance(number, int) else 0 for number in found)
    completion = max(completion, total - prompt)
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
