"""One question to a chat endpoint: retries, broken answers, and errors that no retry mends."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from ..errors import UserError
from .chat_server import OPENAI_URL, ChatServer
from .conversation import Messages
from .thoughts import without_thoughts

if TYPE_CHECKING:
    from openai import APIError, APIStatusError, AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
"""Seconds before a broken answer is asked for again: doubled each time, as the openai client does it."""
_NO_KEY = "none"
"""The openai client wants a key, also where the server does not."""
_TOKEN_PARAMETERS = ("max_tokens", "max_completion_tokens")
_OWN_FAULT = re.compile(
    r"context.?(length|window|size)|too long|content.?(filter|policy|management)|flagged", re.I
)
"""What servers say of a conversation that they refuse for itself, in many words and with many codes."""


@dataclass(frozen=True)
class Answer:
    """What a model said, or why it said nothing.

    Attributes:
        text: None where there is no answer; the store keeps it with the model's reasoning, ``Endpoint.ask``
            returns it without.
        prompt_tokens: that the request cost, by the server's count; 0 where it does not say.
        completion_tokens: likewise, of the answer.
        cached: it comes from the store; the tokens are what it cost then.
        problem: why ``text`` is None.
        finish_reason: why the text ends, in the server's word; None where it does not say.
    """

    text: str | None
    prompt_tokens: int
    completion_tokens: int
    cached: bool
    problem: str | None = None
    finish_reason: str | None = None

    def is_cut(self, max_tokens: int | None) -> bool:
        """Return whether a limit ended the text; of a server that gives no reason, by its count of tokens."""
        if self.finish_reason is None:
            return max_tokens is not None and self.completion_tokens >= max_tokens
        return self.finish_reason == "length"

    def stored(self) -> dict[str, Any]:
        """What the store keeps of it."""
        return {
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason,
        }


@dataclass(frozen=True)
class Failure:
    """A request that failed after all retries."""

    problem: str
    """For people."""
    cause: str
    """The same for failures of the same kind."""
    scope: Literal["request", "server", "unknown"]
    """Whose fault it is: this conversation's, the server's, or one or the other."""
    example: str = ""
    """What the server answered, for messages."""


class ChatRequests:
    """Requests to one endpoint, over one pool of connections.

    Args:
        client: the openai client, open.
        server: where to ask what.
        key: the API key, which no message may repeat; None where there is none.
    """

    def __init__(self, client: AsyncOpenAI, server: ChatServer, key: str | None):
        self.client = client
        self.server = server
        self.key = key
        # OpenAI's newer models refuse the old name, and other servers often do not know the new one.
        self.tokens_as = _TOKEN_PARAMETERS[server.base_url == OPENAI_URL]
        self.tokens_switched = False

    @classmethod
    @asynccontextmanager
    async def open(cls, server: ChatServer, key: str | None) -> AsyncIterator[ChatRequests]:
        """Yields requests that work until the block ends.

        Raises:
            UserError: the ``openai`` package is not installed.
        """
        try:
            from openai import AsyncOpenAI
        except ImportError:
            raise UserError(
                "Asking a chat endpoint needs the openai package; install it with "
                "pip install 'pacmr-lightning[judge]'."
            ) from None
        async with AsyncOpenAI(
            api_key=key or _NO_KEY, base_url=server.base_url, timeout=server.timeout
        ) as client:
            yield cls(client, server, key)

    async def answer(self, messages: Messages, valid: Callable[[str], bool] | None) -> Answer | Failure:
        """The model's answer, after as many retries as it takes and the endpoint allows.

        Raises:
            UserError: neither this nor any other request can succeed.
        """
        from openai import APIError

        left = self.server.retries
        pause = _FIRST_PAUSE
        while True:
            try:
                # The client repeats what HTTP says may be repeated; what it used up is gone.
                response = await self._create(messages, left)
            except APIError as error:
                return self._failure(error)
            left -= response.retries_taken
            result = self._read(response.http_response.content, valid)
            if isinstance(result, Answer) or result.scope == "request" or left <= 0:
                return result
            left -= 1
            await asyncio.sleep(pause * random.uniform(0.75, 1))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _create(self, messages: Messages, retries: int) -> Any:
        from openai import BadRequestError, UnprocessableEntityError

        turns = cast("list[ChatCompletionMessageParam]", messages)
        while True:
            tokens_as = self.tokens_as
            completions = self.client.with_options(max_retries=retries).chat.completions
            try:
                return await completions.with_raw_response.create(messages=turns, **self._parameters())
            except (BadRequestError, UnprocessableEntityError) as error:
                if not self._switch_tokens(tokens_as, error):
                    raise

    def _switch_tokens(self, sent: str, error: APIStatusError) -> bool:
        """Whether the request should be sent again, with the other name for the limit of tokens."""
        if sent != self.tokens_as:
            return True  # Another request has found out in the meantime.
        said = self._said(error)
        if self.tokens_switched or not _names(error, said, sent) or _OWN_FAULT.search(said):
            return False
        self.tokens_switched = True
        self.tokens_as = _TOKEN_PARAMETERS[sent == _TOKEN_PARAMETERS[0]]
        return True

    def _read(self, content: bytes, valid: Callable[[str], bool] | None) -> Answer | Failure:
        """The answer in the body of a response with status 200."""
        try:
            body = json.loads(content)
            choice = body["choices"][0]
            # A refusal is an answer too; it stands in a place of its own.
            text = choice["message"].get("content") or choice["message"].get("refusal") or ""
            text.encode()
            usage = body.get("usage") or {}
            read, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
        except (ValueError, LookupError, TypeError, AttributeError):
            return Failure("the server's answer is no chat completion", "broken answer", "unknown")
        if not without_thoughts(text).strip():
            if choice.get("finish_reason") == "content_filter":
                return Failure("the server's content filter took the answer away", "filtered", "request")
            if choice.get("finish_reason") == "length":
                problem = f"no text within max_tokens {self.server.max_tokens}; the model may need more"
                return Failure(problem, "too few tokens", "unknown")
            message = choice["message"]
            if text.strip() or message.get("reasoning_content") or message.get("reasoning"):
                return Failure("the answer is nothing but reasoning", "reasoning alone", "unknown")
            return Failure("the answer is empty", "empty answer", "unknown")
        if valid is not None and not valid(without_thoughts(text)):
            problem = "the answer is not of the kind that was asked for"
            return Failure(problem, "invalid answer", "unknown", f": {text.strip()[:200]!r}")
        reason = choice.get("finish_reason")
        return Answer(
            text,
            prompt_tokens=read if isinstance(read, int) else 0,
            completion_tokens=written if isinstance(written, int) else 0,
            cached=False,
            finish_reason=reason if isinstance(reason, str) else None,
        )

    def _failure(self, error: APIError) -> Failure:
        """What an error that the client gave up on means for this request.

        Raises:
            UserError: it means the same for all others.
        """
        from openai import APIConnectionError, APIStatusError, APITimeoutError

        if isinstance(error, APITimeoutError):
            return Failure(f"no answer within {self.server.timeout:g} s", "time-out", "server")
        if isinstance(error, APIConnectionError):
            # By name, for the exception belongs to whichever HTTP library the client uses.
            if type(error.__cause__).__name__ == "ConnectError":
                raise UserError(
                    f"{self.server.where} cannot be reached ({error.__cause__}); start the server or check "
                    "base_url."
                )
            return Failure("the connection was cut", "connection cut", "server")
        if isinstance(error, APIStatusError):
            return self._refusal(error)
        return Failure(self._said(error), type(error).__name__, "unknown")

    def _refusal(self, error: APIStatusError) -> Failure:
        status, said = error.status_code, self._said(error)
        cause, problem = f"status {status}", f"status {status}: {said}"
        where = self.server.where
        if status in (400, 403, 413, 422) and _OWN_FAULT.search(f"{error.code} {said}"):
            return Failure(problem, cause, "request")
        if status in (401, 403):
            raise UserError(
                f"{where} refuses the API key ({problem}); put a valid one into the environment variable "
                f"{self.server.key_variable}, or name another one with key_variable."
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
        return Failure(problem, cause, "server" if overloaded else "unknown")

    def _parameters(self) -> dict[str, Any]:
        """What a request says beside its messages."""
        asked = {
            "model": self.server.model,
            self.tokens_as: self.server.max_tokens,
            "temperature": self.server.temperature,
        }
        return {name: value for name, value in asked.items() if value is not None}

    def _said(self, error: APIError) -> str:
        """The server's own words, short and without the key."""
        body = error.body
        said = body.get("message") if isinstance(body, dict) else body
        text = re.sub(r"\s+", " ", said if isinstance(said, str) else error.message).strip()
        if self.key is not None:
            text = text.replace(self.key, "***")
        return text[:200].rstrip(".")


def _names(error: APIStatusError, said: str, parameter: str) -> bool:
    # "model" is in every other sentence about anything.
    by_word = parameter != "model" and re.search(rf"\b{parameter}\b", said) is not None
    return error.param == parameter or by_word
