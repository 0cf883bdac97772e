"""Where a chat model is asked: address, key, limits, and what an answer depends on."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from ..errors import UserError

OPENAI_URL = "https://api.openai.com/v1"
_LOCAL = ("localhost", "127.0.0.1", "::1")


class ChatServer:
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

    def api_key(self) -> str | None:
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
