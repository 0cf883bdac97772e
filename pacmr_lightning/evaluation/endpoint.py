"""A chat endpoint that answers many conversations, each of them once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from ..errors import UserError
from .answer_store import AnswerStore, content_key
from .chat_request import Answer, ChatRequests, Failure
from .chat_server import ChatServer
from .conversation import Messages
from .thoughts import without_thoughts

_FEWEST = 3
"""Failures one after the other from which on a server seems to be broken."""


class Endpoint(ChatServer):
    """A chat model that answers many conversations, each of them once. Its options are ``ChatServer``'s."""

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
            if (answer := without_thoughts(value["text"])).strip() and (valid is None or valid(answer))
        }
        pending = {key: messages for key, messages in asked.items() if key not in found}
        if pending:
            secret = self.api_key()
            with tqdm(total=len(asked), initial=len(found), desc=description, unit="answer") as bar:
                progress = _Progress(bar, self, len(pending), stored=len(found))
                found |= _run(self._ask_pending(secret, pending, store, valid, progress))
        return [
            answer if answer.text is None else replace(answer, text=without_thoughts(answer.text))
            for answer in map(found.__getitem__, keys)
        ]

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


@dataclass
class _Progress:
    """The progress bar, and the watch for a server that answers nobody."""

    bar: tqdm[Any]
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
                f"{self.endpoint.where} failed {self.streak} requests in a row ({result.problem}"
                f"{result.example}); see to the server, or to model, max_tokens and timeout, and run again: "
                "what was answered is kept."
            )


def _run(work: Coroutine[Any, Any, dict[str, Answer]]) -> dict[str, Answer]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # A notebook has a loop of its own in this thread, in which another one cannot run.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
