"""Parsers of the commands, from the signatures of their functions."""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin

from jsonargparse import ActionYesNo, auto_cli

from ..errors import UserError
from ..runs.option_parser import OptionParser
from .output import only_results
from .short_forms import with_source


class ToolParser(OptionParser):
    """jsonargparse's parser with flags without a value, lists as words, and ``--data FILE`` for a source."""

    def parse_args(self, args: Any = None, *rest: Any, **options: Any) -> Any:
        """Expand ``--data`` first."""
        words = sys.argv[1:] if args is None else args
        if any(action.dest == "source" for action in self._actions):
            words = with_source(words)
        return super().parse_args(words, *rest, **options)

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Make ``--merged`` of ``merged: bool = False``, ``--taus 0.6 0.7`` of ``taus: list[float]``."""
        if kwargs.get("help"):
            kwargs["help"] = kwargs["help"].replace("``", "")
        kind = getattr(kwargs.get("action"), "_typehint", kwargs.get("type"))
        if kind is bool and kwargs.get("default") is False:
            del kwargs["type"]
            kwargs["action"] = ActionYesNo()
        elif get_origin(kind) in (list, Sequence) and get_args(kind)[0] in (str, int, float):
            del kwargs["action"]
            kwargs |= {"type": get_args(kind)[0], "nargs": "+"}
            if "default" in kwargs:
                kwargs["default"] = list(kwargs["default"])
            args = args[:1]  # without --taus+, which appends
        return super().add_argument(*args, **kwargs)


def takes_words(function: Callable[..., Any]) -> bool:
    """Return whether required parameters are given without their names: not if the first is a source."""
    return next(iter(inspect.signature(function).parameters), None) != "source"


def run_tool(prog: str, function: Callable[..., Any], arguments: list[str]) -> Any:
    """``call``; prints go to standard error, except those of ``print_result``."""
    return call(prog, only_results()(function), arguments, takes_words(function))


def call(prog: str, function: Callable[..., Any], arguments: list[str], as_positional: bool = True) -> Any:
    """Call ``function`` with the arguments of the program ``prog``, by its type hints and docstring.

    If ``as_positional``, parameters without a default are, unless they are keyword-only.
    """
    told = (inspect.getdoc(function) or "").partition("\n\nArgs:")[0].replace("``", "")
    if "source" in inspect.signature(function).parameters:
        told += "\n\n--data FILE (JSON Lines, Parquet, or a dataset of the Hub) is short for --source."
    return auto_cli(
        function,
        args=arguments,
        as_positional=as_positional,
        prog=prog,
        description=told,
        parser_class=ToolParser,
    )


def run_script(function: Callable[..., Any]) -> None:
    """Call a function with the words of the command line; bad input ends in a sentence and exit status 2."""
    try:
        run_tool(f"python {sys.argv[0]}", function, sys.argv[1:])
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
