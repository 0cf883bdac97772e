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
    "output_dir": "output",
    "dataset_name": "data",
    "model_name_or_path": "model",
    "num_train_epochs": "trainer.max_epochs",
    "lora_r": "model.policy.rank",
    "lora_alpha": "model.policy.alpha",
    "eval_steps": "trainer.val_check_interval",
    "per_device_train_batch_size": "model.micro_batch_size",
    "logging_steps": "trainer.log_every_n_steps",
    "load_in_4bit": "model.policy.quantization",
}
"""Options of a training run by their short names, and by those of TRL and other tools."""


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
    own = sorted(name for name, kind in classes.items() if kind.__module__.startswith("pacmr_lightning"))
    choice = (
        f"choose one of {', '.join(own)}, or give an import path." if own else "--help lists the options."
    )
    value = _shown((re.findall(r"(?:Given|Got) value: ?(.*)", text) or [""])[-1])
    flat = " ".join(text.split())
    if nested := re.match(r"NestedArg\(key='(.*?)', val='?(.*?)'?\)", value):
        return f"{key}.{nested[1]}", f"got {nested[2]}, but its class must come first; {choice}"
    if found := re.search(
        r"(?:Expected a dot import path string|Unexpected import path format): (\S+)", text
    ):
        near = get_close_matches(found[1].rpartition(".")[2], classes, 1, 0.75)
        return key, f"there is no class or file {found[1]}; {_meant(near) or choice}"
    if found := re.search(r"Problem with given class_path '(.*?)':\s*(.*)", text):
        return key, f"{found[1]} cannot be imported ({found[2].rstrip('.')}); {choice}"
    if "is abstract" in text and re.fullmatch(r"\w+(\.\w+)+", value):
        return key, f"{value} lacks an abstract method of its base class; define it, or {choice}"
    if "is abstract" in text or "Not a valid subclass of" in text or "Option 'class_path'" in text:
        got = f", but got {value}; {choice}" if "alue: " in text else "."
        return key, f"expected a class, with class_path and init_args only{got}"
    if found := re.search(r"path (?:(\S+) )?does not correspond to a subclass of (\w+)", text):
        return key, f"{found[1] or value} is no {found[2]}; {choice}"
    if found := re.search(r"^\s*- (?!Expected|Not a)(.*\.)$", text, re.MULTILINE):  # by the class in a union
        return key, found[1]
    if kinds := re.findall(r"Expected an? (.+?)(?:\. Got value.*)?$", text, re.MULTILINE):
        return key, _expected(kinds, value)
    if found := re.search(r"[oO]ption '([^']+)'", text):
        return ".".join(filter(None, (key, found[1]))), f"unknown option; {_near(found[1], parser)}"
    if found := re.match(r"unrecognized arguments: (.*)", flat):
        words = found[1].split(" ")
        option = next((word for word in words if word.startswith("-")), "").partition("=")[0]
        if not option:
            return "", f"unexpected word {words[0]}; options start with --, see --help."
        return option, f"unknown option; {_near(option.lstrip('-'), parser, '--')}"
    if found := re.match(r"the following arguments are required: (.+)", flat):
        names = [name.strip() for name in found[1].split(",")]
        one = len(names) == 1
        missing = "missing; give it" if one else f"{_listed(names, 'and')} are missing; give them"
        return names[0] if one else "", f"{missing} on the command line or in a config."
    if found := re.match(r"argument (\S+): expected (one|at least one) argument", flat):
        option, words = found[1].split("/")[-1], getattr(parser, "args", [])
        # The option typed last or before another one; argparse prints ``--data`` for ``--data.task``.
        pairs = zip(words, [*words[1:], "--"], strict=True)
        typed = (w for w, following in pairs if w.startswith(option) and following.startswith("--"))
        return next(typed, option), "its value is missing; give it after the option."
    if found := re.match(r"(?:Unexpected config:|Unable to load config) ?(\S*)", flat):
        given = found[1].strip("\"'") or "nothing"
        return key, f"expected options with their values, as in YAML, but got {given}."
    return key, flat.replace("Problems parsing config:", "not valid YAML:").rstrip(".") + "."


def _expected(kinds: list[str], value: str) -> str:
    """Return ``expected int or null, but got abc.`` for types as Python writes them."""
    names = {"NoneType": ["null"], "bool": ["true", "false"]}
    plain = [re.sub(r"^(?:<class '|typing\.|Literal\[)*(.+?)(?:'>|\])?$", r"\1", kind) for kind in kinds]
    plain = [name for kind in dict.fromkeys(plain) for name in names.get(kind, kind.split(", "))]
    # Python may return an equal union written earlier, in another order.
    plain.sort(key=lambda name: (name == "null", name == "float"))
    near = get_close_matches(value, re.findall(r"'([^']*)'", " ".join(plain)), 1)
    return f"expected {_listed(plain, 'or')}, but got {value}{f'; {_meant(near)}' if near else '.'}"


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
    """Propose the option that was probably meant: by its start, its end, another tool's name, or similar."""
    actions = [action for action in _actions(parser) if not action.dest.endswith(".help")]
    if name in (action.dest for action in actions if not action.option_strings):
        return f"give {name} without {dashes}{name} before it."
    names = [action.dest for action in actions if action.option_strings]
    found = [known for known in names if known.startswith(name)][:3]
    if not found and name in ELSEWHERE and "model" in names:
        found = [ELSEWHERE[name]]
    found = found or [known for known in names if known.endswith(f".{name}")][:2]
    found = found or get_close_matches(name, names, 1, 0.75)
    found = found or get_close_matches(name.partition(".")[0], {n.partition(".")[0] for n in names}, 1, 0.75)
    return _meant([dashes + one for one in found]) or "--help lists the options."


def _meant(names: list[str]) -> str:
    return f"did you mean {_listed(names, 'or')}?" if names else ""


def _listed(names: list[str], word: str) -> str:
    return f"{', '.join(names[:-1])} {word} {names[-1]}" if len(names) > 1 else names[0]


def _shown(value: str) -> str:
    return "nothing" if not value else value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
