"""Experiments that measure methods and theory, run from a checkout; README.md is their index."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("MPLBACKEND", "agg")


def run_command(name: str, function: Callable[..., Any], arguments: Sequence[str] | None = None) -> None:
    """Call a function with the command line of ``python -m research.NAME``; bad input ends in one sentence.

    The type hints and the docstring of the function make the options and their help, as for ``pacmr``.
    """
    from jsonargparse import auto_cli

    from pacmr_lightning.command_line.exceptions import stop, user_error
    from pacmr_lightning.command_line.parser import ToolParser

    try:
        auto_cli(
            function,
            args=list(sys.argv[1:] if arguments is None else arguments),
            as_positional=True,
            prog=f"python -m research.{name}",
            description=(inspect.getdoc(function) or "").partition("\n\nArgs:")[0].replace("``", ""),
            parser_class=ToolParser,
        )
    except Exception as error:
        cause = user_error(error)
        if cause is None:
            raise
        stop(str(cause))
