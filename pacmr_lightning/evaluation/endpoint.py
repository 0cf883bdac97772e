"""A client for chat models behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tqdm import tqdm

from ..errors import UserError, check_at_least, check_within
from .answer_store import AnswerStore, content_key
from .chat_completion import FILTERED, NO_ANSWER, NO_TOKENS, Reply, Tokens, read_response, without_thoughts
from .conversation import Messages

if TYPE_CHECKING:
    from openai import AsyncOpenAI

OPENAI_URL = "https://api.openai.com/v1"
_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1")
_HOPELESS = (401, 402, 404)
"""Statuses that all requests would get: a wrong key, no credit, no such model."""
_RETRY_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")
_OF_ONE = (400, 403, 413, FILTERED, NO_ANSWER)
"""Statuses of a conversation that the server refuses for its length or content, or does not answer."""
_FEWEST = 3
"""Least number of consecutive failures after which the server counts as broken."""


@dataclass(frozen=True)
class Answer:
    """A model's answer, or the reason why there is none."""

    text: str | None
    """Without reasoning, which the store keeps; None where there is no answer."""
    billed: Tokens = NO_TOKENS
    """Tokens of all requests for it in this and earlier calls, also of failed ones and answers thrown away. A
    conversation that occurs twice in one call has them at its first place only."""
    now: Tokens = NO_TOKENS
    """The part of ``billed`` of this call."""
    problem: str | None = None
    cut: bool = False
    """True if a limit of tokens ended the text."""


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
        sampling = {"max_tokens": max_tokens, "temperature": temperature}
        self.settings: dict[str, Any] = {"model": model, "base_url": self.base_url, **sampling}

    def ask(
        self,
        conversations: list[Messages],
        store: AnswerStore,
        description: str = "Asking",
        valid: Callable[[str], bool] = bool,
    ) -> list[Answer]:
        """Return the model's N answers to N lists of messages; each new one goes into the store as it comes.

        Answers for which ``valid`` is false are requested again, stored ones included. An answer that failed
        after all retries has no text; the store keeps its tokens.

        Raises:
            UserError: the key or the ``openai`` package is missing, or retries cannot succeed.
        """
        keys = [content_key(self.settings, messages) for messages in conversations]
        asked = dict(zip(keys, conversations, strict=True))
        by_key = _stored(list(asked), store)
        pending = {key: asked[key] for key in asked if not _usable(by_key.get(key), valid)}
        if pending:
            secret = self._api_key()
            stored = len(asked) - len(pending)
            with tqdm(total=len(asked), initial=stored, desc=description, unit="answer") as bar:
                _run(_Asking(self, secret, store, valid, pending, by_key, bar, stored).all())
        answers = []
        for key in keys:
            answers.append(by_key[key])
            by_key[key] = replace(by_key[key], billed=NO_TOKENS, now=NO_TOKENS)
        return answers

    def unanswered(self, conversations: list[Messages], store: AnswerStore) -> list[Messages]:
        """Return those that ``ask`` would send, each once."""
        asked = {content_key(self.settings, messages): messages for messages in conversations}
        stored = _stored(list(asked), store)
        return [messages for key, messages in asked.items() if not _usable(stored.get(key), bool)]

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


def _stored(keys: list[str], store: AnswerStore) -> dict[str, Answer]:
    answers = {}
    for key, value in store.get(keys).items():
        text, cut = value.pop("text"), value.pop("cut")
        answers[key] = Answer(text and without_thoughts(text), Tokens(**value), cut=cut)
    return answers


def _usable(answer: Answer | None, valid: Callable[[str], bool]) -> bool:
    return answer is not None and answer.text is not None and bool(answer.text.strip()) and valid(answer.text)


_BILL: ContextVar[list[Tokens]] = ContextVar("bill")
"""Tokens of the requests for one conversation, which one task sends."""


@dataclass
class _Asking:
    """One call of ``ask``: the openai client repeats requests and waits; this reads what comes back."""

    endpoint: Endpoint
    secret: str | None
    """The key, which must not appear in messages."""
    store: AnswerStore
    valid: Callable[[str], bool]
    pending: dict[str, Messages]
    """Conversations to ask, by their keys."""
    found: dict[str, Answer]
    """Answers by the same keys, also of earlier calls."""
    bar: tqdm[Any]
    answered: int
    """Conversations with an answer, stored ones included."""
    streak: int = 0

    async def all(self) -> None:
        """Put all answers into ``found`` and the store."""
        try:
            from openai import AsyncOpenAI
        except ImportError:
            raise UserError(
                "Asking a chat endpoint needs the openai package; install it with "
                "pip install 'pacmr-lightning[judge]'."
            ) from None
        waiting = iter(self.pending.items())

        async def worker(client: AsyncOpenAI) -> None:
            for name, messages in waiting:
                await self.one(client, name, messages)

        async with AsyncOpenAI(
            api_key=self.secret or "none",  # which the client requires even where the server does not
            base_url=self.endpoint.base_url,
            timeout=self.endpoint.timeout,
            max_retries=self.endpoint.retries,
            http_client=_http_client(self.valid),
        ) as client:
            count = min(self.endpoint.concurrency, len(self.pending))
            workers = [asyncio.ensure_future(worker(client)) for _ in range(count)]
            try:
                await asyncio.gather(*workers)
            finally:
                # After an error, cancel the rest.
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def one(self, client: AsyncOpenAI, name: str, messages: Any) -> None:
        """Ask one conversation; its tokens are stored whatever happens."""
        bill: list[Tokens] = []
        _BILL.set(bill)
        earlier = self.found.get(name, Answer(None)).billed
        reply = Reply(0, "stopped")
        try:
            reply = await self.request(client, messages)
        finally:
            now = sum(bill, NO_TOKENS)
            text = reply.text and without_thoughts(reply.text)
            self.found[name] = Answer(text, earlier + now, now, problem=reply.problem, cut=reply.cut)
            if text or now != NO_TOKENS:
                self.store.put({name: {"text": reply.text, "cut": reply.cut, **vars(earlier + now)}})
            self.bar.update()
        self.stop_if_broken(reply)

    def stop_if_broken(self, reply: Reply) -> None:
        """Raise a UserError if the server fails consistently."""
        if reply.text:
            self.answered, self.streak = self.answered + 1, 0
            return
        if reply.status in _OF_ONE and self.answered:  # must not end the run
            return
        self.streak += 1
        enough = max(self.endpoint.concurrency, _FEWEST)
        if self.streak >= (enough if self.answered else min(enough, len(self.pending))):
            raise UserError(
                f"{self.endpoint.where} failed {self.streak} requests in a row ({reply.problem}); see to the "
                "server and its key, or to model, max_tokens, temperature (null leaves it out) and timeout, "
                "and run again: what was answered is kept."
            )

    async def request(self, client: AsyncOpenAI, messages: Any) -> Reply:
        """Send a request until it succeeds; raise UserError if all requests would fail alike."""
        from openai import APIConnectionError, APIStatusError, APITimeoutError

        asked = self.endpoint
        # OpenAI's newer models have another name for it than most servers.
        limit = "max_completion_tokens" if asked.base_url == OPENAI_URL else "max_tokens"
        options = {"model": asked.model, "temperature": asked.temperature, limit: asked.max_tokens}
        sent: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        try:
            response = await client.chat.completions.with_raw_response.create(messages=messages, **sent)
            return response.http_response.extensions["reply"]
        except APITimeoutError:
            return Reply(408, f"no answer within {asked.timeout:g} s")
        except APIConnectionError as error:
            # By name: the class belongs to the client's HTTP library.
            if type(error.__cause__).__name__ != "ConnectError":
                return Reply(502, "the connection was cut")
            raise UserError(
                f"{asked.where} cannot be reached ({error.__cause__}); start the server or check base_url."
            ) from None
        except APIStatusError as error:
            reply: Reply = error.response.extensions["reply"]
        problem = str(reply.problem).replace(self.secret or "\0", "***")
        if reply.status in _HOPELESS:
            raise UserError(
                f"{asked.where} refuses all requests ({problem}); check the key in the environment variable "
                f"{asked.key_variable} and its credit, model, and base_url, which mostly ends in /v1."
            )
        return replace(reply, problem=problem)


def _http_client(valid: Callable[[str], bool]) -> Any:
    """Return the openai client's own HTTP client, with bills counted, and without errors inside a 200.

    A response that is no answer gets the status of what went wrong, so that the openai client repeats it,
    waits or stops as with any such status.
    """
    from openai import DefaultAsyncHttpxClient

    class Client(DefaultAsyncHttpxClient):
        async def send(self, request: Any, **options: Any) -> Any:
            try:
                response = await super().send(request, **options)
            except BaseException as error:
                if not type(error).__name__.startswith(("Connect", "Pool")):  # it was sent
                    _BILL.get().append(Tokens(uncounted=1))
                raise
            reply, tokens = read_response(response.status_code, response.content, valid)
            _BILL.get().append(tokens)
            if reply.problem is not None:
                kept = {name: response.headers[name] for name in _RETRY_HEADERS if name in response.headers}
                response = type(response)(reply.status, headers=kept, text=reply.problem, request=request)
            response.extensions["reply"] = reply
            return response

    return Client()


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of a port or an address
        usable = None
    if not usable:
        raise UserError(f"base_url is {url!r}, but it must look like http://localhost:8000/v1.")
    if parts.username or parts.password:
        raise UserError(
            f"base_url holds a password for {parts.hostname}; put it into the environment variable of "
            "key_variable instead."
        )
    return url.rstrip("/")


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    # A notebook already runs an event loop in this thread.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()
