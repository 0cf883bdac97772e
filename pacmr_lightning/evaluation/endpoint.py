"""A chat model behind an OpenAI-compatible API that answers many conversations, each of them once."""

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

from ..errors import UserError
from .answer_store import AnswerStore, content_key
from .conversation import Messages

if TYPE_CHECKING:
    from openai import APIError, AsyncOpenAI

OPENAI_URL = "https://api.openai.com/v1"
_LOCAL = ("localhost", "127.0.0.1", "::1")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
"""Seconds before a broken answer is asked for again: doubled each time, as the openai client does it."""
_NO_KEY = "none"
"""The openai client wants a key, also where the server does not."""
_TOKEN_PARAMETERS = ("max_tokens", "max_completion_tokens")
_OWN_FAULT = re.compile(
    r"context.?(length|window|size)|too long|content.?(filter|policy|management)|flagged", re.I
)
"""What servers say of a conversation that they refuse for itself, in many words and with many codes."""
_FEWEST = 3
"""Failures one after the other from which on a server seems to be broken."""
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
    """None where there is no answer; the store keeps it with the model's reasoning."""
    prompt_tokens: int = 0
    """Paid for the request, now or when the answer was stored; 0 where the server does not count."""
    completion_tokens: int = 0
    cached: bool = False
    """True if the answer comes from the store."""
    problem: str | None = None
    """Why ``text`` is None."""
    finish_reason: str | None = None
    """Why the text ends, in the server's word; None where it does not say."""

    def is_cut(self, max_tokens: int | None) -> bool:
        """Return whether a limit ended the text; of a server that gives no reason, by its count of tokens."""
        if self.finish_reason is None:
            return max_tokens is not None and self.completion_tokens >= max_tokens
        return self.finish_reason == "length"


@dataclass(frozen=True)
class _Failure:
    """A request that failed after all retries."""

    problem: str
    """For people."""
    cause: str
    """The same for failures of the same kind."""
    scope: Literal["request", "server", "unknown"]
    """Whose fault it is: this conversation's, the server's, or one or the other."""
    example: str = ""
    """The server's answer, for messages."""


class Endpoint:
    """A model behind an OpenAI-compatible chat API: OpenAI itself, another provider, or a local server.

    The key comes from an environment variable and is never written or printed; a server on this machine
    needs none.

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
        where: what errors call the endpoint.

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
        limits = {
            f"max_tokens is {max_tokens}, but it must be at least 1, or null": max_tokens is not None
            and max_tokens < 1,
            f"temperature is {temperature}, but it must be 0 or more, or null": (temperature or 0) < 0,
            f"concurrency is {concurrency}, but it must be at least 1": concurrency < 1,
            f"retries is {retries}, but it must be 0 or more": retries < 0,
            f"timeout is {timeout} s, but it must be above 0": timeout <= 0,
        }
        for sentence, is_broken in limits.items():
            if is_broken:
                raise UserError(f"{sentence}.")
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
        """Return the model's answers, from the store where they are there, else from the server.

        Each answer is stored as soon as it has come, so a killed program asks again only what was under way.

        Args:
            conversations: N lists of ``{"role": ..., "content": ...}``; equal ones are asked once.
            store: of the answers, under a hash of ``settings`` and conversation.
            description: title of the progress bar.
            valid: an answer for which it is false, without the model's reasoning, counts as broken: it is
                asked again like one that did not come, also where it was in the store.

        Returns:
            N answers in the order of the conversations, without the model's reasoning. After all retries one
            may have no text; it is not stored, so that the next call asks again.

        Raises:
            UserError: there is no key, or the ``openai`` package is missing; no request can succeed (wrong
                key, unknown model, refused parameter, no server); or one after the other fails for the same
                reason. What was answered before is kept.
        """
        keys = [content_key(self.settings, messages) for messages in conversations]
        asked = dict(zip(keys, conversations, strict=True))
        found = {
            key: Answer(**value, cached=True)
            for key, value in store.get(list(asked)).items()
            if (answer := without_thoughts(value["text"])).strip() and valid(answer)
        }
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
                # Where one has raised, nobody waits for what the others would get.
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        return found

    def _api_key(self) -> str | None:
        """Return the API key; None where the server needs none."""
        # Keys that are read from a file often end in a newline, which no header may hold.
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
    """Return a model's answer without its reasoning; empty where it never came to an answer.

    Reasoning is the text between tags such as ``<think>`` and ``</think>``, before an end without a
    beginning (which then stood in the prompt), after a beginning of a line without an end (which a limit of
    tokens cut off), or in another channel of gpt-oss than ``final``. Text without such marks is
    returned as it is.
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
    # In the middle of a line it is only mentioned.
    cut = begin is not None and not text[after:begin].rpartition("\n")[2].strip()
    if not after and not cut:
        return text
    return "".join([*parts, text[after:begin] if cut else text[after:]]).strip()


class _Requests:
    """Requests to one endpoint: retries, broken answers, and errors that no retry mends."""

    def __init__(self, client: AsyncOpenAI, endpoint: Endpoint, key: str | None):
        self.client = client
        self.endpoint = endpoint
        self.key = key  # which no message may repeat
        # OpenAI's newer models refuse the old name, and other servers often do not know the new one.
        self.tokens_as = _TOKEN_PARAMETERS[endpoint.base_url == OPENAI_URL]
        self.tokens_switched = False

    async def answer(self, messages: Any, valid: Callable[[str], bool]) -> Answer | _Failure:
        """Return the model's answer, after as many retries as it takes and the endpoint allows.

        Raises:
            UserError: neither this nor any other request can succeed.
        """
        from openai import APIError

        left = self.endpoint.retries
        pause = _FIRST_PAUSE
        while True:
            tokens_as = self.tokens_as
            # The client repeats what HTTP says may be repeated; what it used up is gone.
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
        """Return whether to send the request again, with the other name for the limit of tokens."""
        if getattr(error, "status_code", None) not in (400, 422):
            return False
        if sent != self.tokens_as:
            return True  # Another request has found out in the meantime.
        said = self._said(error)
        if self.tokens_switched or not _names(error, said, sent) or _OWN_FAULT.search(said):
            return False
        self.tokens_switched = True
        self.tokens_as = _TOKEN_PARAMETERS[sent == _TOKEN_PARAMETERS[0]]
        return True

    def _read(self, content: bytes, valid: Callable[[str], bool]) -> Answer | _Failure:
        """Return the answer in the body of a response with status 200."""
        try:
            body = json.loads(content)
            choice = body["choices"][0]
            message = choice["message"]
            # A refusal is an answer too; it stands in a place of its own.
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
        """Return what an error that the client gave up on means for this request.

        Raises:
            UserError: it means the same for all others.
        """
        from openai import APIConnectionError, APIStatusError, APITimeoutError

        where, said = self.endpoint.where, self._said(error)
        if isinstance(error, APITimeoutError):
            return _Failure(f"no answer within {self.endpoint.timeout:g} s", "time-out", "server")
        if isinstance(error, APIConnectionError):
            # By name, for the exception belongs to whichever HTTP library the client uses.
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
                    # What the user has set, under whatever name it was sent.
                    option = "max_tokens" if name in _TOKEN_PARAMETERS else name
                    fix = "set temperature: null" if name == "temperature" else f"change {option}"
                    raise UserError(f"{where} refuses {name} {value} ({problem}); {fix}.")
        overloaded = status in (408, 409, 429) or status >= 500
        return _Failure(problem, cause, "server" if overloaded else "unknown")

    def _parameters(self) -> dict[str, Any]:
        """Return the fields of a request beside its messages."""
        asked = {
            "model": self.endpoint.model,
            self.tokens_as: self.endpoint.max_tokens,
            "temperature": self.endpoint.temperature,
        }
        return {name: value for name, value in asked.items() if value is not None}

    def _said(self, error: APIError) -> str:
        """Return the server's own words, short and without the key."""
        body = error.body
        said = body.get("message") if isinstance(body, dict) else body
        text = re.sub(r"\s+", " ", said if isinstance(said, str) else error.message).strip()
        if self.key is not None:
            text = text.replace(self.key, "***")
        return text[:200].rstrip(".")


@dataclass
class _Progress:
    """The progress bar, and the watch for a server that answers nobody."""

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
        """Count a result.

        Raises:
            UserError: there is no hope for those that are waiting.
        """
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
        # A broken answer after good ones is the conversation's fault; a run must get past it.
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
    # "model" is in every other sentence about anything.
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
    # A notebook has a loop of its own in this thread, in which another one cannot run.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
