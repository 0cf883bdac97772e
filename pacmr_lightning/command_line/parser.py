"""What the tools around the trainer's commands share: a function's arguments as command-line options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, auto_cli

from .exceptions import short_message, stop


class ToolParser(ArgumentParser):
    """jsonargparse's parser, which says what is wrong in one sentence."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints one sentence and exits with status 2."""
        stop(short_message(message))


def run_tool(name: str, function: Callable[..., Any], arguments: list[str]) -> Any:
    """Calls ``function`` with the arguments of ``pacmr NAME``.

    Its type hints and docstring make the options and their help; objects are given as in LightningCLI's
    YAML (``--source Files --source.train pairs.jsonl``), and ``--config FILE`` reads options from a file.
    """
    return auto_cli(
        function, args=arguments, as_positional=False, prog=f"pacmr {name}", parser_class=ToolParser
    )
