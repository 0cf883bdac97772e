"""jsonargparse's parser of options and configs, with errors in one sentence and unique keys in YAML."""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from enum import Enum
from itertools import groupby
from typing import Any, NoReturn, get_args

import jsonargparse
import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse._loaders_dumpers import get_yaml_default_loader

from ..errors import UserError
from ..files import expanded
from .shipped_configs import with_files

NUMBERS = (int | float, int | float | None)
"""Types of options such as ``trainer.limit_val_batches``: 1 is one batch, 1.0 all batches."""
LONGEST = 80
"""Characters of a value in a message."""

ELSEWHERE = {
    "lr": "model.learning_rate",
    "learning_rate": "model.learning_rate",
    "beta": "model.objective.beta",
    "epochs": "trainer.max_epochs",
    "seed": "seed_everything",
    "source": "data.source",
    "max_length": "data.max_length",
    "noise_rate": "data.noise_rate",
    "batch_size": "data.global_batch_size",
}
"""Options of a training run by their short names."""


_Loader: Any = get_yaml_default_loader()
_construct_mapping = _Loader.construct_mapping


def _unique_keys(loader: Any, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    """Refuse a key that occurs twice, of which PyYAML takes the last without a word."""
    keys = [key for key, _ in node.value]
    for number, key in enumerate(keys):
        if key.value in [one.value for one in keys[:number]]:
            raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
    return _construct_mapping(loader, node, deep)


_Loader.construct_mapping = _unique_keys
# Defaults of Lightning's classes, such as Timer's interval.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, value: dumper.represent_data(value.value))
# Classes in the free options of a sweep's cells stay text.
jsonargparse.set_parsing_settings(instantiate_subclass_spec_in_any=False)


class OptionParser(ArgumentParser):
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
        """Raise a UserError of one sentence; if nested, an ArgumentError as jsonargparse does."""
        key, text = cause_of(message, getattr(ex, "subcommand_parser", None) or self)
        if not self.exit_on_error:
            raise ArgumentError(None, f'Parser key "{key}":\n  {text}') from ex
        raise UserError(": ".join(filter(None, (self._file, key, text)))) from None

    def instantiate(self, *args: Any, **options: Any) -> Any:
        """Make the objects; a union's error has its first type's as cause, be it no more than a mismatch."""
        try:
            return super().instantiate(*args, **options)
        except ValueError as error:
            if "Union subtypes" in str(error) and str(error.__cause__).startswith("Expected a"):
                self.error(str(error))
            raise

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


def short_message(error: ArgumentError) -> str:
    """Return option and cause of a parser's error in one sentence."""
    return ": ".join(filter(None, cause_of(str(error))))


def cause_of(message: str, parser: ArgumentParser | None = None) -> tuple[str, str]:
    """Return the option, with dots, and the sentence of the innermost error in jsonargparse's message.

    The parser has the names to suggest.
    """
    _, *parts = re.split(r'Parser key "([^"]*)"(?: element \d+)?:', f"\n{message}")
    keys, text = parts[::2], parts[-1] if parts else message
    key = ".".join(name.lstrip("-") for name, _ in groupby(keys) if name)
    said = text.strip().partition("\n")[0]
    if len(keys) > 1 and said.endswith((".", "?")):  # by the parser of the class
        return key, said
    return _leaf(key, re.sub(r"- Expected a path but .*? not accessible or invalid\n", "", text), parser)


def _leaf(key: str, text: str, parser: ArgumentParser | None) -> tuple[str, str]:
    classes = _subclasses(_bases(next((a for a in _actions(parser) if a.dest == key), None)))
    value = (re.findall(r"(?:Given|Got) value: ?(.*)", text) or [""])[-1] or "nothing"
    value = value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
    flat = " ".join(text.split())
    if match := _NO_CLASS.search(text):
        # An option of a class that is not given yet.
        value = re.sub(
            r"NestedArg\(key='(.*?)', val='?(.*?)'?\)", r"\1 = \2", match[1] or match[2] or match[3] or value
        )
        own = sorted(name for name, kind in classes.items() if kind.__module__.startswith("pacmr_lightning"))
        choice = f"choose one of {', '.join(own)}, or give an import path." if own else "give another."
        near = get_close_matches(value.rpartition(".")[2], classes, 1, 0.75)
        what = f"{value} is no class that fits here{f' ({match[4]})' if match[4] else ''}"
        return key, f"{what}; {_meant(near) or choice}"
    if "ption 'class_path'" in text:
        return key, "a class has class_path and init_args only."
    if match := re.search(r"^\s*- (?!Expected|Not a)(.*\.)$", text, re.MULTILINE):  # by the class in a union
        return key, match[1]
    if kinds := re.findall(r"Expected an? (.+?)(?:\. Got value.*)?$", text, re.MULTILINE):
        return key, _expected(kinds, value)
    if match := re.search(r"[oO]ption '([^']+)'", text):
        return ".".join(filter(None, (key, match[1]))), f"unknown option; {_near(match[1], parser)}"
    if match := re.match(r"unrecognized arguments:.*? (-[^\s=]+)", flat):
        return match[1], f"unknown option; {_near(match[1].lstrip('-'), parser, '--')}"
    if match := re.match(r"the following arguments are required: (.+)", flat):
        return key, f"{match[1]} must be given."
    return key, flat.rstrip(".") + "."


_NO_CLASS = re.compile(
    r"import path (?:string|format): (\S+)|Import path (?!does )(\S+) "
    r"|Problem with given class_path '(.*?)':\s*(.*)"
    r"|does not correspond to a subclass|is abstract|Not a valid subclass of"
)
"""Words of jsonargparse about a class; the groups are its name, in three ways, and what is wrong with it."""


def _expected(kinds: list[str], value: str) -> str:
    """Return ``expected int or null, but got abc.`` for types as Python writes them."""
    names = {"NoneType": ["null"], "bool": ["true", "false"]}
    plain = [re.sub(r"^(?:<class '|typing\.|Literal\[)*(.+?)(?:'>|\])?$", r"\1", kind) for kind in kinds]
    plain = [name for kind in dict.fromkeys(plain) for name in names.get(kind, kind.split(", "))]
    near = get_close_matches(value, re.findall(r"'([^']*)'", " ".join(plain)), 1)
    return f"expected {_either(plain)}, but got {value}{f'; {_meant(near)}' if near else '.'}"


def _bases(action: Any) -> Iterator[type]:
    hints = [getattr(action, "_typehint", None)]
    for hint in hints:
        hints += get_args(hint)
        if inspect.isclass(hint) and not get_args(hint) and hint.__module__ != "builtins":
            yield hint


def _subclasses(bases: Iterable[type]) -> dict[str, type]:
    """Return the concrete subclasses of ``bases`` by name."""
    queue = list(bases)
    for one in queue:
        queue += one.__subclasses__()
    hidden = ("_", "LazyInstance_")
    return {
        one.__name__: one for one in queue if not (inspect.isabstract(one) or one.__name__.startswith(hidden))
    }


def _actions(parser: ArgumentParser | None) -> Iterator[Any]:
    for action in parser._actions if parser is not None else ():
        commands = getattr(action, "_name_parser_map", None)
        if commands is None:
            yield action
        else:
            for command in commands.values():
                yield from _actions(command)


def _near(name: str, parser: ArgumentParser | None, dashes: str = "") -> str:
    """Propose the option that was probably meant: by its start, its short name, its end, or similar."""
    names = [a.dest for a in _actions(parser) if a.option_strings and not a.dest.endswith(".help")]
    matches = [known for known in names if known.startswith(name)][:3]
    if not matches and name in ELSEWHERE and "model" in names:
        matches = [ELSEWHERE[name]]
    matches = matches or [known for known in names if known.endswith(f".{name}")][:2]
    matches = matches or get_close_matches(name, names, 1, 0.75)
    return _meant([dashes + one for one in matches]) or "--help lists the options."


def _meant(names: list[str]) -> str:
    return f"did you mean {_either(names)}?" if names else ""


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
