"""jsonargparse's parser of options and configs, with errors in one sentence and unique keys in YAML."""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from enum import Enum
from itertools import chain, groupby
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import jsonargparse
import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, _typehints
from jsonargparse._loaders_dumpers import get_yaml_default_loader
from jsonargparse._typehints import NestedArg, parse_value_or_config

from ..errors import UserError, construct, user_error
from ..files import expanded
from .shipped_configs import with_files

UNIONS: list[Any] = [int | float, int | float | None]
"""Types in the order to try: a ``trainer.limit_val_batches`` of 1 is one batch, of 1.0 all batches."""
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
_flatten_mapping = _Loader.flatten_mapping


def _unique_keys(loader: Any, node: Any) -> None:
    """Refuse a key that occurs twice, of which PyYAML takes the last without a word; ``<<`` may repeat it."""
    keys = vars(node).setdefault("own_keys", [key for key, _ in node.value])
    for number, key in enumerate(keys):
        if key.value in [one.value for one in keys[:number]]:
            raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
    _flatten_mapping(loader, node)


def _as_given(value: Any, *rest: Any, **options: Any) -> Any:
    """Leave a text to the parser of the class whose option it is, which would get ``str(None)`` for null."""
    deeper = isinstance(value, NestedArg) and "." in value.key
    return (value, None) if deeper else parse_value_or_config(value, *rest, **options)


_typehints.parse_value_or_config = _as_given
_Loader.flatten_mapping = _unique_keys
# Defaults of Lightning's classes, such as Timer's interval.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, value: dumper.represent_data(value.value))
jsonargparse.add_instantiator(construct, object)
# Classes in the free options of a sweep's cells stay text.
jsonargparse.set_parsing_settings(instantiate_subclass_spec_in_any=False)


class OptionParser(ArgumentParser):
    """jsonargparse's parser with errors in one sentence and without abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)
        self._file: str | None = None

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Try a union's types in the order of ``UNIONS``: ``typing`` may return an equal one in another."""
        action: Any = kwargs.get("action")
        kind = getattr(action, "_typehint", None)
        if kind in UNIONS:
            action._typehint = UNIONS[UNIONS.index(kind)]
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
        own = user_error(ex)  # of a function that links options
        parser = getattr(ex, "subcommand_parser", None) or self
        key, text = ("", str(own)) if own else cause_of(message, parser)
        if not self.exit_on_error:
            raise ArgumentError(None, f'Parser key "{key}":\n  {text}') from ex
        raise UserError(": ".join(filter(None, (self._file, key, text)))) from None

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
    if keys and said.endswith((".", "?")):  # by the parser of a class
        return key, said
    return _leaf(key, text, parser)


def _leaf(key: str, text: str, parser: ArgumentParser | None) -> tuple[str, str]:
    hint = next((getattr(a, "_typehint", None) for a in _actions(parser) if a.dest == key), None)
    value = text.rpartition(" value: ")[2] if " value: " in text else None
    flat = re.sub("Unexpected config:.*", "it has no lines OPTION: VALUE", " ".join(text.split())).rstrip(".")
    if classes := _subclasses(_bases(hint)):
        return key, _no_class(text, value, classes)
    if value is not None and hint is not None:
        return key, _expected([*_kinds(hint)], value)
    if missing := flat.partition("the following arguments are required: ")[2]:
        return key, f"{missing} must be given."
    for word in flat.partition("unrecognized arguments: ")[2].split():
        if word.startswith("-"):
            name = word.partition("=")[0]
            return name, f"unknown option; {_near(name.lstrip('-'), parser, '--')}"
    if match := re.search(r"[oO]ption '([^']+)'", text):
        if match[1] == "class_path":
            return key, "a class has class_path and init_args only."
        return ".".join(filter(None, (key, match[1]))), f"unknown option; {_near(match[1], parser)}"
    return key, f"{flat}."


def _no_class(text: str, value: str | None, classes: Mapping[str, type]) -> str:
    """Return ``X is no class that fits here``, with the reason where the text has one, and what fits."""
    if match := re.search(r"given class_path '(.*?)':\s*(.*)", text):
        said = f"{match[1]} is no class that fits here ({match[2]})"
    elif value is None:
        said = text.rpartition("- ")[2].strip()
    elif value.startswith("NestedArg("):
        said = f"its option {value.split(chr(39))[1]} is given, but not which class"
    else:
        said = f"{_short(value)} is no class that fits here"
    others = [word for word in re.findall(r"[A-Z]\w+", said) if word not in classes]
    near = [get_close_matches(word, classes, 1, 0.75) for word in others]
    own = sorted(name for name, kind in classes.items() if kind.__module__.startswith("pacmr_lightning"))
    choice = f"choose one of {', '.join(own)}, or give an import path." if own else "give another."
    return f"{said}; {_meant([*chain(*near)][:1]) or choice}"


def _kinds(hint: Any) -> Iterator[str]:
    """Yield the values, or the types of values, of a type hint, as YAML has them."""
    if get_origin(hint) in (Union, UnionType):
        for one in get_args(hint):
            yield from _kinds(one)
    elif get_origin(hint) is Literal:
        yield from map(repr, get_args(hint))
    elif hint is bool:
        yield from ("true", "false")
    elif hint is type(None):
        yield "null"
    else:
        yield re.sub(r"[\w.]+\.", "", str(hint)) if get_args(hint) else getattr(hint, "__name__", str(hint))


def _expected(kinds: Sequence[str], value: str) -> str:
    """Return ``expected int or null, but got abc.``"""
    near = get_close_matches(value, [kind.strip("'") for kind in kinds if kind.startswith("'")], 1)
    return f"expected {_either(kinds)}, but got {_short(value)}{f'; {_meant(near)}' if near else '.'}"


def _short(value: str) -> str:
    return (value or "nothing") if len(value) <= LONGEST else f"{value[:LONGEST]}..."


def _bases(hint: Any) -> Iterator[type]:
    """Yield the base classes of which an option takes a subclass."""
    hints = [hint]
    for hint in hints:
        hints += get_args(hint)
        package = getattr(hint, "__module__", "").partition(".")[0]
        if inspect.isclass(hint) and package not in sys.stdlib_module_names and not is_dataclass(hint):
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


def _meant(names: Sequence[str]) -> str:
    return f"did you mean {_either(names)}?" if names else ""


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
