"""Reading of what a chat endpoint sends: a whole answer, or a problem; and the tokens that it bills."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import astuple, dataclass
from operator import add
from typing import Any

NO_ANSWER, FILTERED = 409, 422
"""Statuses of answers of no use: one that the openai client repeats, and one that would not change."""
_LONGEST = 200
_AT_LIMIT = ("length", "max_tokens", "model_length", "model_context_window_exceeded")
_BROKEN = re.compile("error|fail|abort|cancel|insufficient|filter|sensitive|safety|recitation|prohibited")
"""Finish reasons in small letters, of OpenAI and other providers, of an answer that broke off."""
_TAGS, _RARE = "think|thinking|thought|reasoning", "thoughts|reason|reflection|scratchpad"
_BEGIN = re.compile(
    rf"(?im)\A\s*<(?:\w+:)?(?:{_RARE})>|^[ \t]*(?:<((?:\w+:)?(?:{_TAGS}))>(?![\s\S]*</\1>)"
    r"|\[THINK\]|◁think▷|<\|begin_of_thought\|>|(?:<\|start\|>assistant)?<\|channel\|>analysis)"
)
_END = re.compile(
    rf"(?i)</(?:\w+:)?(?:{_TAGS}|({_RARE}))>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>"
    r"|<\|channel\|>final<\|message\|>|assistantfinal"
)


@dataclass(frozen=True)
class Tokens:
    """Tokens that a server bills for some requests."""

    prompt: int = 0
    completion: int = 0
    uncounted: int = 0
    """Requests that may be billed and came back without a count: timed out, broken off, or never counted."""

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(*map(add, astuple(self), astuple(other)))

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


def read_response(status: int, content: bytes, valid: Callable[[str], bool]) -> tuple[Reply, Tokens]:
    """Return the answer in an HTTP response, or the problem, and the tokens that it bills.

    A 200 may hold an error of the provider, a text that broke off, or a web page.

    >>> read_response(200, b'{"error": {"code": 429, "message": "slow down"}}', bool)[0].status
    429
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
        reply = _answer(choice, message, valid)
    except (LookupError, TypeError, AttributeError, UnicodeEncodeError):
        error = fields.get("error") or next(filter(None, map(fields.get, ("message", "detail", "msg"))), None)
        reply = Reply(NO_ANSWER, f"the server's answer is no chat completion: {said(body)!r}")
    if status < 400 and not error:
        return reply, tokens or Tokens(uncounted=1)
    if isinstance(error, dict) and error.get("code") == "insufficient_quota":
        status = 402  # OpenAI's 429 for no credit
    if status < 400:  # its own status may be a number inside the error
        inside = error if isinstance(error, dict) else fields
        number = re.search(r"\b[45]\d\d\b", f"{inside.get('code')} {inside.get('status')}")
        status = int(number[0]) if number else 502
    return Reply(status, f"status {status}: {said(error or body)}".removesuffix(": ")), tokens or NO_TOKENS


def _answer(choice: dict[str, Any], message: dict[str, Any], valid: Callable[[str], bool]) -> Reply:
    # A refusal is an answer too, in its own field.
    text = _content(message.get("content")) or message.get("refusal") or ""
    text.encode()
    answer = without_thoughts(text)
    finish = str(choice.get("finish_reason") or "").lower()
    cut = finish in _AT_LIMIT
    if _BROKEN.search(finish):
        # A content filter takes it away again.
        status = FILTERED if "filter" in finish else NO_ANSWER
        return Reply(status, f"the answer broke off (finish_reason {said(finish)})")
    if answer.strip():
        wrong = None if valid(answer) else "the answer is not of the kind that was asked for"
        return Reply(NO_ANSWER, wrong) if wrong else Reply(200, None, text, cut)
    short = "no text within max_tokens; the model may need more"
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
    counts = (usage.get(f"{name}_tokens") for name in ("prompt", "completion", "total"))
    prompt, completion, total = (number if isinstance(number, int) else 0 for number in counts)
    completion = max(completion, total - prompt)
    return Tokens(prompt, completion) if prompt or completion else None


def said(body: Any) -> str:
    """Return an error as a server sent it, without HTML tags, on one line of at most 200 characters.

    >>> said({"message": "Provider returned error", "code": 429, "metadata": {"raw": "slow down"}})
    '{"message": "Provider returned error", "code": 429, "metadata": {"raw": "slow down"}}'
    >>> said("<html><p>Bad gateway</p></html>")
    'Bad gateway'
    """
    if isinstance(body, dict) and body.keys() <= {"message", "type", "param", "code"}:
        body = body.get("message")
    text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    text = text.encode(errors="replace").decode()  # without halves of surrogate pairs
    return " ".join(re.sub("<[^<>]*>", " ", text).split())[:_LONGEST].rstrip(" .")


def without_thoughts(text: str) -> str:
    """Return a model's answer without its reasoning; empty if it has only reasoning.

    The answer is what follows the last end of reasoning, such as ``</think>`` or the begin of gpt-oss's
    ``final`` channel, up to a line that begins reasoning anew. A tag that begins in the answer ends nothing.

    >>> without_thoughts("<think>A or B?</think> B is shorter.")
    'B is shorter.'
    """
    start = 0
    for end in _END.finditer(text):
        begin, before = end[0].lower().replace("</", "<"), text[start : end.start()].lower()
        if before.lstrip().startswith(begin) or not (end[1] or begin in before):
            start = end.end()
    answer = _BEGIN.split(text[start:], 1)[0]
    return text if answer == text else answer.removesuffix("<|return|>").strip()
