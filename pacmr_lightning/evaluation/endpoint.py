"""A client for chat models behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from tqdm import tqdm

from ..errors import UserError, check_at_least, check_within
from .answer_store import AnswerStore, content_key
from .conversation import Messages

if TYPE_CHECKING:
    from openai import APIError, AsyncOpenAI

OPENAI_URL = "https://api.openai.com/v1"
_LOCAL = ("localhost", "127.0.0.1", "::1")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
"""Seconds before an invalid answer is requested again, doubled each time, as in the openai client."""
_NO_KEY = "none"
"""The openai client requires a key, even where the server does not."""
_TOKEN_PARAMETERS = ("max_tokens", "max_completion_tokens")
_OWN_FAULT = re.compile(
    r"context.?(length|window|size)|too long|content.?(filter|policy|management)|flagged", re.I
)
"""Server messages that reject one conversation for its own content or length."""
_FEWEST = 3
"""Least number of consecutive failures after which the server counts as broken."""
_TAGS = "think|thinking|thought|thoughts|reason|reasoning|reflection|scratchpad"
_MARK = re.compile(
    rf"(?P<begin><(?:\w+:)?(?:{_TAGS})>|\[THINK\]|◁think▷|<\|begin_of_thought\|>|<unused94>)"
    rf"|</(?:\w+:)?(?:{_TAGS})>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>|<unused95>",
    re.I,
)


@dataclass(frozen=True)
class Answer:
    """A model's answer, or the reason why there is none."""

    text: str | None
    """Without reasoning, which the store keeps; None where there is no answer."""
    prompt_tokens: int = 0
    """As billed, also for a stored answer; 0 where the server does not count."""
    completion_tokens: int = 0
    cached: bool = False
    problem: str | None = None
    finish_reason: str | None = None

    def is_cut(self, max_tokens: int | None) -> bool:
        """Return whether a token limit ended the text, by its count where the server gives no reason."""
        if self.finish_reason is None:
            return max_tokens is not None and self.completion_tokens >= max_tokens
        return self.finish_reason == "length"


@dataclass(frozen=True)
class _Failure:
    problem: str
    cause: str
    scope: Literal["request", "server", "unknown"]
    example: str = ""


class Endpoint:
    """A model behind an OpenAI-compatible chat API: OpenAI, another provider or a local server.

    The key comes from an environment variable and is never written or printed; local servers need none.

    Args:
        model: the model's name, as the server knows it.
        base_url: the server's address, which mostly ends in /v1; None is OpenAI's.
        key_variable: environment variable that holds the API key.
        max_tokens: tokens of an answer at most; None leaves it to the server.
        temperature: of sampling; None leaves it to the server (some models accept nothing else).
        concurrency: requests under way at a time.
        retries: how often a request is repeated, after growing pauses or the pause that the server asks for.
        timeout: seconds to wait for an answer.

    Attributes:
        settings: what an answer depends on beside the conversation, JSON-serialisable.
        where: the endpoint's name in errors.

    Raises:
        UserError: an option is out of range.
    """

    def __init__(
        self,
        model: str = "gpt-5.1",
        base_url: str | None = None,
        key_variable: str = "OPENAI_API_KEY",
        max_tokens: int | None = 96,
        temperature: float | None = 0.0,
        concurrency: int = 8,
        retries: int = 6,
        timeout: float = 120.0,
    ):
        self.model = model
        self.base_url = _checked_url(base_url or OPENAI_URL)
        self.key_variable = key_variable
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.concurrency = concurrency
        self.retries = retries
        self.timeout = timeout
        check_within("[1, inf)", ", or null", max_tokens=max_tokens)
        check_within("[0, inf)", ", or null", temperature=temperature)
        check_at_least(1, concurrency=concurrency)
        check_at_least(0, retries=retries)
        check_within("(0, inf)", timeout=timeout)
        self.where = f"{self.base_url} (model {model!r})"
        self.settings: dict[str, Any] = {
            "model": model,
            "base_url": self.base_url,
            "max_tokens": max_tokens,
            "temperature": temperature,
        }

    def ask(
        self,
        conversations: list[Messages],
        store: AnswerStore,
        description: str = "Asking",
        valid: Callable[[str], bool] = bool,
    ) -> list[Answer]:
        """Return the model's N answers to N lists of messages; each new one goes into the store as it comes.

        Answers for which ``valid`` is false are requested again, stored ones included. An answer that failed
        after all retries has no text and is not stored.

        Raises:
            UserError: the key or the ``openai`` package is missing, or retries cannot succeed.
        """
        keys = [content_key(self.settings, messages) for messages in conversations]
        asked = dict(zip(keys, conversations, strict=True))
        found = self._stored(asked, store, valid)
        pending = {key: messages for key, messages in asked.items() if key not in found}
        if pending:
            key = self._api_key()
            with tqdm(total=len(asked), initial=len(found), desc=description, unit="answer") as bar:
                progress = _Progress(bar, self, len(pending), stored=len(found))
                found |= _run(self._ask_pending(key, pending, store, valid, progress))
        return [
            answer if answer.text is None else replace(answer, text=without_thoughts(answer.text))
            for answer in map(found.__getitem__, keys)
        ]

    def unanswered(self, conversations: list[Messages], store: AnswerStore) -> list[Messages]:
        """Return those that ``ask`` would send, each once."""
        asked = {content_key(self.settings, messages): messages for messages in conversations}
        found = self._stored(asked, store, bool)
        return [messages for key, messages in asked.items() if key not in found]

    def _stored(
        self, asked: dict[str, Messages], store: AnswerStore, valid: Callable[[str], bool]
    ) -> dict[str, Answer]:
        return {
            key: Answer(**value, cached=True)
            for key, value in store.get(list(asked)).items()
            if (answer := without_thoughts(value["text"])).strip() and valid(answer)
        }

    async def _ask_pending(
        self,
        key: str | None,
        pending: dict[str, Messages],
        store: AnswerStore,
        valid: Callable[[str], bool],
        progress: _Progress,
    ) -> dict[str, Answer]:
        try:
            from openai import AsyncOpenAI
        except ImportError:
            raise UserError(
                "Asking a chat endpoint needs the openai package; install it with "
                "pip install 'pacmr-lightning[judge]'."
            ) from None
        found: dict[str, Answer] = {}
        waiting = iter(pending.items())

        async def worker(requests: _Requests) -> None:
            for name, messages in waiting:
                result = await requests.answer(messages, valid)
                if isinstance(result, Answer):
                    store.put({name: _stored(result)})
                    found[name] = result
                else:
                    found[name] = Answer(None, problem=result.problem)
                progress.add(result)

        async with AsyncOpenAI(
            api_key=key or _NO_KEY, base_url=self.base_url, timeout=self.timeout
        ) as client:
            requests = _Requests(client, self, key)
            count = min(self.concurrency, len(pending))
            workers = [asyncio.ensure_future(worker(requests)) for _ in range(count)]
            try:
                await asyncio.gather(*workers)
            finally:
                # After an error, cancel the rest.
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        return found

    def _api_key(self) -> str | None:
        # Keys read from a file often end in a newline, which is invalid in a header.
        key = os.environ.get(self.key_variable, "").strip()
        if not key:
            if urlsplit(self.base_url).hostname in _LOCAL:
                return None
            raise UserError(
                f"The environment variable {self.key_variable} holds no API key for {self.base_url}; set it, "
                "or name another one with key_variable."
            )
        if not key.isascii() or not key.isprintable():
            raise UserError(
                f"The environment variable {self.key_variable} holds characters that no API key has; copy "
                "the key again."
            )
        return key


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


class _Requests:
    """Requests to one endpoint, with retries and classified errors."""

    def __init__(self, client: AsyncOpenAI, endpoint: Endpoint, key: str | None):
        self.client = client
        self.endpoint = endpoint
        self.key = key  # must not appear in messages
        # OpenAI's newer models refuse the old name; other servers often lack the new one.
        self.tokens_as = _TOKEN_PARAMETERS[endpoint.base_url == OPENAI_URL]
        self.tokens_switched = False

    async def answer(self, messages: Any, valid: Callable[[str], bool]) -> Answer | _Failure:
        from openai import APIError

        left = self.endpoint.retries
        pause = _FIRST_PAUSE
        while True:
            tokens_as = self.tokens_as
            # The client does HTTP retries; subtract those used.
            completions = self.client.with_options(max_retries=left).chat.completions.with_raw_response
            try:
                response = await completions.create(messages=messages, **self._parameters())
            except APIError as error:
                if self._other_name_helps(tokens_as, error):
                    continue
                return self._failure(error)
            left -= response.retries_taken
            result = self._read(response.http_response.content, valid)
            if isinstance(result, Answer) or result.scope == "request" or left <= 0:
                return result
            left -= 1
            await asyncio.sleep(pause * random.uniform(0.75, 1))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _other_name_helps(self, sent: str, error: APIError) -> bool:
        if getattr(error, "status_code", None) not in (400, 422):
            return False
        if sent != self.tokens_as:
            return True  # Another request has switched in the meantime.
        said = self._said(error)
        if self.tokens_switched or not _names(error, said, sent) or _OWN_FAULT.search(said):
            return False
        self.tokens_switched = True
        self.tokens_as = _TOKEN_PARAMETERS[sent == _TOKEN_PARAMETERS[0]]
        return True

    def _read(self, content: bytes, valid: Callable[[str], bool]) -> Answer | _Failure:
        try:
            body = json.loads(content)
            choice = body["choices"][0]
            message = choice["message"]
            # A refusal is an answer too, in its own field.
            text = message.get("content") or message.get("refusal") or ""
            text.encode()
            usage = body.get("usage") or {}
            read, written = (usage.get(f"{kind}_tokens") for kind in ("prompt", "completion"))
            answer = without_thoughts(text)
        except (ValueError, LookupError, TypeError, AttributeError):
            return _Failure("the server's answer is no chat completion", "broken answer", "unknown")
        reason = choice.get("finish_reason")
        if not answer.strip():
            if reason == "content_filter":
                return _Failure("the server's content filter took the answer away", "filtered", "request")
            if reason == "length":
                problem = f"no text within max_tokens {self.endpoint.max_tokens}; the model may need more"
                return _Failure(problem, "too few tokens", "unknown")
            if text.strip() or message.get("reasoning_content") or message.get("reasoning"):
                return _Failure("the answer is nothing but reasoning", "reasoning alone", "unknown")
            return _Failure("the answer is empty", "empty answer", "unknown")
        if not valid(answer):
            problem = "the answer is not of the kind that was asked for"
            return _Failure(problem, "invalid answer", "unknown", f": {text.strip()[:200]!r}")
        return Answer(
            text,
            prompt_tokens=read if isinstance(read, int) else 0,
            completion_tokens=written if isinstance(written, int) else 0,
            finish_reason=reason if isinstance(reason, str) else None,
        )

    def _failure(self, error: APIError) -> _Failure:
        """Return the failure of one request, or raise UserError if all requests would fail alike."""
        from openai import APIConnectionError, APIStatusError, APITimeoutError

        where, said = self.endpoint.where, self._said(error)
        if isinstance(error, APITimeoutError):
            return _Failure(f"no answer within {self.endpoint.timeout:g} s", "time-out", "server")
        if isinstance(error, APIConnectionError):
            # By name: the class belongs to the client's HTTP library.
            if type(error.__cause__).__name__ == "ConnectError":
                raise UserError(
                    f"{where} cannot be reached ({error.__cause__}); start the server or check base_url."
                )
            return _Failure("the connection was cut", "connection cut", "server")
        if not isinstance(error, APIStatusError):
            return _Failure(said, type(error).__name__, "unknown")
        status = error.status_code
        cause, problem = f"status {status}", f"status {status}: {said}"
        if status in (400, 403, 413, 422) and _OWN_FAULT.search(f"{error.code} {said}"):
            return _Failure(problem, cause, "request")
        if status in (401, 403):
            raise UserError(
                f"{where} refuses the API key ({problem}); put a valid one into the environment variable "
                f"{self.endpoint.key_variable}, or name another one with key_variable."
            )
        if status == 404:
            raise UserError(
                f"{where} does not exist ({problem}); check model, and base_url, which mostly ends in /v1."
            )
        if status == 402 or error.code == "insufficient_quota":
            raise UserError(f"{where} has no quota left ({problem}); buy some, or name another model.")
        if status in (400, 422):
            for name, value in self._parameters().items():
                if _names(error, said, name):
                    # The option as the user set it.
                    option = "max_tokens" if name in _TOKEN_PARAMETERS else name
                    fix = "set temperature: null" if name == "temperature" else f"change {option}"
                    raise UserError(f"{where} refuses {name} {value} ({problem}); {fix}.")
        overloaded = status in (408, 409, 429) or status >= 500
        return _Failure(problem, cause, "server" if overloaded else "unknown")

    def _parameters(self) -> dict[str, Any]:
        asked = {
            "model": self.endpoint.model,
            self.tokens_as: self.endpoint.max_tokens,
            "temperature": self.endpoint.temperature,
        }
        return {name: value for name, value in asked.items() if value is not None}

    def _said(self, error: APIError) -> str:
        body = error.body
        said = body.get("message") if isinstance(body, dict) else body
        text = re.sub(r"\s+", " ", said if isinstance(said, str) else error.message).strip()
        if self.key is not None:
            text = text.replace(self.key, "***")
        return text[:200].rstrip(".")


@dataclass
class _Progress:
    """A progress bar that raises when the server fails consistently."""

    bar: tqdm[Any]
    endpoint: Endpoint
    pending: int
    stored: int
    answered: int = 0
    failed: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    streak: int = 0
    cause: str | None = None

    def add(self, result: Answer | _Failure) -> None:
        """Count a result; raise UserError if the remaining requests cannot succeed."""
        if isinstance(result, Answer):
            self.answered += 1
            self.tokens_in += result.prompt_tokens
            self.tokens_out += result.completion_tokens
            self.streak = 0
        else:
            self.failed += 1
        tokens = f"tokens {self.tokens_in} in, {self.tokens_out} out"
        self.bar.set_postfix_str(f"{tokens}, {self.stored} stored, {self.failed} failed", refresh=False)
        self.bar.update()
        # An invalid answer after good ones concerns one conversation and must not end the run.
        ever_answered = bool(self.answered or self.stored)
        harmless = ("request", "unknown") if ever_answered else ("request",)
        if isinstance(result, Answer) or result.scope in harmless:
            return
        self.streak = self.streak + 1 if result.cause == self.cause else 1
        self.cause = result.cause
        enough = max(self.endpoint.concurrency, _FEWEST)
        if not ever_answered:
            enough = min(enough, self.pending)
        done = self.answered + self.failed == self.pending
        if self.streak >= enough and not (done and ever_answered):
            raise UserError(
                f"{self.endpoint.where} failed {self.streak} requests in a row ({result.problem}"
                f"{result.example}); see to the server, or to model, max_tokens and timeout, and run again: "
                "what was answered is kept."
            )


def _stored(answer: Answer) -> dict[str, Any]:
    names = ("text", "prompt_tokens", "completion_tokens", "finish_reason")
    return {name: getattr(answer, name) for name in names}


def _names(error: APIError, said: str, parameter: str) -> bool:
    # Most messages hold the word "model".
    by_word = parameter != "model" and re.search(rf"\b{parameter}\b", said) is not None
    return error.param == parameter or by_word


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"base_url is {url!r}, but it must look like http://localhost:8000/v1.")
    if parts.username or parts.password:
        raise UserError(
            f"base_url holds a password for {parts.hostname}; put it into the environment variable of "
            "key_variable instead."
        )
    return url.rstrip("/")


def _run(work: Coroutine[Any, Any, dict[str, Answer]]) -> dict[str, Answer]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # A notebook already runs an event loop in this thread.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
