"""Parsers of the commands: errors in one sentence, and options from a function's signature."""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_args, get_origin

import jsonargparse
import yaml
from jsonargparse import ActionYesNo, ArgumentError, ArgumentParser, Namespace, add_instantiator, auto_cli

from ..errors import UserError
from ..files import expanded
from .exceptions import construct, stop
from .help_pages import takes_words
from .output import only_results
from .sentences import cause_of
from .shipped_configs import with_files
from .short_forms import with_source
from .unique_keys import load

NUMBERS = (int | float, int | float | None)
"""Types of options such as ``trainer.limit_val_batches``: 1 is one batch, 1.0 all batches."""

add_instantiator(construct, object)
# Classes in the free options of a sweep's cells stay text.
jsonargparse.set_loader("yaml", load, (yaml.YAMLError,))
jsonargparse.set_parsing_settings(instantiate_subclass_spec_in_any=False)


class OneSentence(ArgumentParser):
    """jsonargparse's parser with errors in one sentence and without abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)
        self._file: str | None = None

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Parse int before float: ``typing`` may return an equal union in another order."""
        action: Any = kwargs.get("action")
        kind = getattr(action, "_typehint", None)
        if kind in NUMBERS:
            action._typehint = NUMBERS[NUMBERS.index(kind)]
        return super().add_argument(*args, **kwargs)

    def parse_args(self, args: Any = None, *rest: Any, **options: Any) -> Any:
        """Resolve names of shipped configs first, and ``~`` in all values, also for other libraries."""
        words = with_files(sys.argv[1:] if args is None else args)
        return _with_homes(super().parse_args(words, *rest, **options))

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a config; its name precedes its errors."""
        self._file = str(cfg_path)
        try:
            return super().parse_path(cfg_path, *args, **kwargs)
        finally:
            self._file = None

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one sentence and exit with status 2; if nested, raise ArgumentError as jsonargparse does."""
        cause = cause_of(message, getattr(ex, "subcommand_parser", None) or self)
        if not self.exit_on_error:
            raise ArgumentError(None, f'Parser key "{cause.key}":\n  {cause.text}') from ex
        stop(f"{self._file}: {cause}" if self._file else str(cause))

    def validate(self, namespace: Any, *args: Any, **kwargs: Any) -> None:
        """Also refuse a value for a group of options, such as ``trainer: 3``."""
        for name in self.groups or ():
            value = namespace.get(name)
            if value is not None and not isinstance(value, Namespace):
                raise TypeError(f'Parser key "{name}": Unable to load config "{value}"')
        super().validate(namespace, *args, **kwargs)


def _with_homes(value: Any) -> Any:
    if isinstance(value, Namespace):
        vars(value).update({name: _with_homes(item) for name, item in vars(value).items()})
        return value
    return [_with_homes(item) for item in value] if isinstance(value, list) else expanded(value)


class ToolParser(OneSentence):
    """jsonargparse's parser with flags without a value, lists as words, and ``--data FILE`` for a source."""

    def parse_args(self, args: Any = None, *rest: Any, **options: Any) -> Any:
        """Expand ``--data`` and ``--help_all`` first."""
        words = [
            "--help" if word == "--help_all" else word for word in (sys.argv[1:] if args is None else args)
        ]
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


def run_tool(name: str, function: Callable[..., Any], arguments: list[str]) -> Any:
    """Call ``function`` with the arguments of ``pacmr NAME``, by its type hints and docstring.

    Prints go to standard error, except those of ``print_result``. Parameters without a default are
    positional, unless they are keyword-only or ``takes_words`` is false.
    """
    told = (inspect.getdoc(function) or "").partition("\n\nArgs:")[0].replace("``", "")
    return auto_cli(
        only_results()(function),
        args=arguments,
        as_positional=takes_words(inspect.signature(function).parameters),
        prog=f"pacmr {name}",
        description=told,
        parser_class=ToolParser,
    )


def run_script(function: Callable[..., Any]) -> None:
    """Call a function with the words of the command line; bad input ends in a sentence and exit status 2."""
    try:
        run_tool(function.__name__, function, sys.argv[1:])
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
