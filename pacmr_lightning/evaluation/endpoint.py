"""A chat endpoint that answers many conversations, each of them once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from ..errors import UserError
from .chat_request import OPENAI_URL, Answer, ChatRequests, Failure, Messages
from .store import AnswerStore, content_key

_FEWEST = 3
"""Failures one after the other from which on a server seems to be broken."""
_LOCAL = ("localhost", "127.0.0.1", "::1")


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
        if max_tokens is not None and max_tokens < 1:
            raise UserError(f"max_tokens is {max_tokens}, but it must be at least 1, or null for no limit.")
        if temperature is not None and temperature < 0:
            raise UserError(f"temperature is {temperature}, but it must be 0 or more, or null.")
        if concurrency < 1:
            raise UserError(f"concurrency is {concurrency}, but at least 1 request must be under way.")
        if retries < 0:
            raise UserError(f"retries is {retries}, but it must be 0 or more.")
        if timeout <= 0:
            raise UserError(f"timeout is {timeout} s, but it must be above 0.")
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
        valid: Callable[[str], bool] | None = None,
    ) -> list[Answer]:
        """The model's answers, from the store where they are there, else from the server.

        Each answer is in the store as soon as it has come, so a killed program asks again only what was
        under way.

        Args:
            conversations: N lists of ``{"role": ..., "content": ...}``; equal ones are asked once.
            store: of the answers, under a hash of ``settings`` and conversation.
            description: what the progress bar says.
            valid: an answer for which it is false counts as broken: it is asked again like one that did not
                come, also where it was in the store.

        Returns:
            N answers in the order of the conversations. After all retries one may have no text; it is not
            stored, so that the next call asks again.

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
            if valid is None or valid(value["text"])
        }
        pending = {key: messages for key, messages in asked.items() if key not in found}
        if pending:
            secret = self._key()
            with tqdm(total=len(asked), initial=len(found), desc=description, unit="answer") as bar:
                progress = _Progress(bar, self, len(pending), stored=len(found))
                found |= _run(self._ask_pending(secret, pending, store, valid, progress))
        return [found[key] for key in keys]

    async def _ask_pending(
        self,
        secret: str | None,
        pending: dict[str, Messages],
        store: AnswerStore,
        valid: Callable[[str], bool] | None,
        progress: _Progress,
    ) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        waiting = iter(pending.items())

        async def worker(requests: ChatRequests, waiting: Iterator[tuple[str, Messages]]) -> None:
            for key, messages in waiting:
                result = await requests.answer(messages, valid)
                if isinstance(result, Failure):
                    found[key] = Answer(None, 0, 0, cached=False, problem=result.problem)
                else:
                    store.put({key: result.stored()})
                    found[key] = result
                progress.add(result)

        async with ChatRequests.open(self, secret) as requests:
            workers = [
                asyncio.ensure_future(worker(requests, waiting))
                for _ in range(min(self.concurrency, len(pending)))
            ]
            try:
                await asyncio.gather(*workers)
            finally:
                # Where one has raised, nobody waits for what the others would get.
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        return found

    def _key(self) -> str | None:
        """The API key, None where the server needs none.

        Raises:
            UserError: there is no key, or it is none by its characters.
        """
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


@dataclass
class _Progress:
    """The progress bar, and the watch for a server that answers nobody."""

    bar: tqdm
    endpoint: Endpoint
    pending: int
    stored: int
    answered: int = 0
    failed: int = 0
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    streak: int = 0
    cause: str | None = None

    def add(self, result: Answer | Failure) -> None:
        """Counts a result.

        Raises:
            UserError: there is no hope for those that are waiting.
        """
        if isinstance(result, Failure):
            self.failed += 1
        else:
            self.answered += 1
            self.tokens[0] += result.prompt_tokens
            self.tokens[1] += result.completion_tokens
        costs = f"tokens {self.tokens[0]} in, {self.tokens[1]} out"
        self.bar.set_postfix_str(f"{costs}, {self.stored} stored, {self.failed} failed", refresh=False)
        self.bar.update()
        self._watch(result)

    def _watch(self, result: Answer | Failure) -> None:
        if isinstance(result, Answer):
            self.streak = 0
            return
        # A broken answer after good ones is the conversation's fault; a run must get past it.
        ever_answered = bool(self.answered or self.stored)
        if result.scope == "request" or (result.scope == "unknown" and ever_answered):
            return
        self.streak = self.streak + 1 if result.cause == self.cause else 1
        self.cause = result.cause
        enough = max(self.endpoint.concurrency, _FEWEST)
        if not ever_answered:
            enough = min(enough, self.pending)
        done = self.answered + self.failed == self.pending
        if self.streak >= enough and not (done and ever_answered):
            raise UserError(
                f"{self.endpoint.where} failed {self.streak} requests in a row ({result.problem}); see to "
                "the server, or to model, max_tokens and timeout, and run again: what was answered is kept."
            )


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
