"""One sentence for jsonargparse's nested error messages, which list all guesses of a union."""

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from textwrap import dedent
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentParser

BESIDE = "beside class_path a class has only init_args, with its options"
LISTED = "--help lists the options."
ALIKE = 0.75
"""Minimum similarity, from 0 to 1, of a suggested name."""
LONGEST = 80
TYPE, CLASS, OWN, INSIDE = range(4)
"""Ranks of a cause: wrong type, unknown class, error of a class or item, option of a known class."""

ELSEWHERE = {
    "lr": "model.learning_rate",
    "epochs": "trainer.max_epochs",
    "seed": "seed_everything",
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
"""Options of a training run by their names in TRL and other tools."""

LEAVES = {
    r".*[oO]ption 'class_path'": f"{BESIDE}.",
    r"(?:File|Path) does not exist: '(.*)'": r"there is no file \1.",
    r"Path is not a file: '(.*)'": r"\1 is not a file.",
    r'expected "subcommand" to be one of': "no command is given; pacmr --help lists them.",
}


@dataclass(frozen=True)
class Cause:
    """An error in the value of ``key``, an option's name with dots."""

    key: str
    text: str
    rank: int = OWN
    classes: str | None = None
    """Name of the classes to suggest, or ``.NAME`` of an option that they have."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


def short_message(message: str) -> str:
    """Return the first cause in a message as a sentence: key, value, allowed values."""
    return str(cause_of(message, None))


def cause_of(message: str, parser: ArgumentParser | None) -> Cause:
    """Return the cause in a parser's message; the parser has the names to suggest."""
    cause = _cause(message, parser)
    return _with_classes(replace(cause, text=cause.text.replace("{value}", "the class")), None)


def _cause(message: str, parser: ArgumentParser | None) -> Cause:
    """Unwrap one level of a nested parser error."""
    message = dedent(message).strip("\n")
    if found := re.match(r"\s*- Expected a path but .*? not accessible or invalid\n- (.*)", message, re.S):
        return _cause(found[1], parser)
    if found := re.match(r'Parser key "([^"]*)"(?: element \d+)?:\s*?(?:\n|[ ]+|$)(.*)', message, re.S):
        key = _without_command(found[1], parser)
        inner = _with_classes(_cause(found[2], None), parser, key)
        return replace(inner, key=".".join(filter(None, (key, inner.key.lstrip("-")))))
    if found := re.match(r"Problem with given class_path '([^']*)':\n(.*)", message, re.S):
        return _of_class(found[1], found[2], parser)
    if found := re.match(
        r"Does not validate .* Union subtypes\nSubtypes: \[(.*?)\]\nErrors:\n(.*)\n"
        r"Given value type: [^\n]*\nGiven value: ?(.*)",
        message,
        re.S,
    ):
        return _of_union(_split(found[1]), re.split(r"\n(?=- )", dedent(found[2])), found[3], parser)
    return _leaf(_collapse(message), parser)


def _of_class(path: str, said: str, parser: ArgumentParser | None) -> Cause:
    said = said.strip()
    if path.endswith((".yaml", ".yml")) or said.startswith(("module '", "Expected a dot import path")):
        return _no_class(path)
    if missing := re.match(r"No module named '[^']*'", said):
        return Cause(
            "", f"{path} cannot be imported ({missing[0]}); correct the path, or install its package."
        )
    inner = _cause(said, parser)
    if not inner.key and inner.text == _collapse(said):  # not a parser's message
        return Cause("", f"{path} cannot be imported ({inner.text.rstrip('.')}).")
    text = inner.text
    if "." not in inner.key:
        text = text.replace("unknown option", f"{path.rpartition('.')[2]} has no such option")
    return replace(inner, text=text, rank=INSIDE)


def _of_union(types: list[str], errors: list[str], value: str, parser: ArgumentParser | None) -> Cause:
    nested = re.fullmatch(r"NestedArg\(key='(.*)', val='?(.*?)'?\)", value, re.S)
    value = nested[2] if nested else value
    causes = []
    for error in (error.removeprefix("- ") for error in errors):
        if re.match(r"Expected an? (<class |typing\.)", error) and "Got value" not in error:
            causes.append(Cause("", "", TYPE))
        elif "is abstract" in error and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", value):
            text = f"{value} lacks an abstract method of its base class; define it, or"
            causes.append(Cause("", text, classes=""))
        elif "is abstract" in error or error.startswith("Not a valid subclass of"):
            causes.append(_needs_class(value, nested[1] if nested else None))
        else:
            causes.append(_cause(error, parser))
    best = max(causes, key=lambda cause: cause.rank)
    best = replace(best, text=best.text.replace("{value}", _shown(value)))
    named = nested or value.startswith(("{", "[")) or re.fullmatch(r"[A-Za-z_][\w.]*", value)
    if best.rank == OWN and (item := re.search(r", but got (.*?)([.;].*)$", best.text, re.S)):
        whole = f" in {_shown(value)}" if item[1] != _shown(value) else ""
        return replace(best, text=f"{best.text[: item.end(1)]}{whole}{item[2]}")
    if best.rank > CLASS or (best.rank == CLASS and named):
        return best
    return Cause(nested[1] if nested else "", _expected(types, value), TYPE)


def _leaf(text: str, parser: ArgumentParser | None) -> Cause:
    for pattern, sentence in LEAVES.items():
        if found := re.match(pattern, text):
            return Cause("", found.expand(sentence))
    if found := re.search(r"(?:Expected a dot import path string|Unexpected import path format): (.*)", text):
        return _no_class(found[1], text.partition(":")[0].strip("- ") if text.startswith("--") else "")
    if "is abstract" in text or text.startswith("Not a valid subclass of"):
        return _needs_class((re.findall(r"Got value: (.*?) Subclass types", text) or [""])[0], None)
    if found := re.match(r"Import path ?(\S*) does not correspond to a subclass of (\S+)", text):
        return Cause("", f"{found[1] or '{value}'} is no {found[2]};", classes="")
    if found := re.match(r"Expected an? (.+?)\. Got value: ?(.*)", text):
        return Cause("", _expected([found[1]], found[2]))
    if found := re.match(r"Value not boolean: (.*)\.", text):
        return Cause("", _expected(["<class 'bool'>"], found[1]))
    if found := re.search(r"[oO]ption '([^']+)'", text):
        return Cause(found[1], f"unknown option; {_near_option(found[1], parser)}")
    if found := re.match(r"unrecognized arguments: (.*)", text):
        words = found[1].split(" ")
        option = next((word for word in words if word.startswith("-")), "").partition("=")[0]
        if not option:
            return Cause("", f"unexpected word {words[0]}; options start with --, see --help.")
        return Cause(option, f"unknown option; {_near_option(option.lstrip('-'), parser, '--')}")
    if found := re.match(r"the following arguments are required: (.+)", text):
        names = [_without_command(name.strip(), parser) for name in found[1].split(",")]
        if len(names) == 1:
            return Cause(names[0], "missing; give it on the command line or in a config.")
        named = _listed(names, "and")
        return Cause("", f"{named} are missing; give them on the command line or in a config.")
    if found := re.match(r"argument (\S+): expected (one|at least one) argument", text):
        option, words = found[1].split("/")[-1], getattr(parser, "args", [])
        # The option typed last or before another one; argparse prints ``--data`` for ``--data.task``.
        pairs = zip(words, [*words[1:], "--"], strict=True)
        typed = (w for w, following in pairs if w.startswith(option) and following.startswith("--"))
        return Cause(next(typed, option), "its value is missing; give it after the option.")
    if found := re.match(r"argument (\S+): ignored explicit argument '(.*)'", text):
        name = found[1].split("/")[0].lstrip("-")
        return Cause(name, f"a flag takes no value, but got {_shown(found[2])}; leave the value out.")
    if found := re.match(r"Problems parsing config: (.*)", text):
        where = found[1].replace('in "<unicode string>", ', "at ").rstrip(".")
        return Cause("", f"not valid YAML ({where}).")
    if found := re.match(r"Unexpected config: ?(.*)|Unable to load config (\S+)", text):
        value = found[1] if found[2] is None else found[2].strip("\"'")
        return Cause("", f"expected options with their values, as in YAML, but got {_shown(value)}.")
    return Cause("", text)


def _no_class(name: str, option: str = "") -> Cause:
    if name.endswith((".yaml", ".yml")):
        return Cause(option, f"there is no file {name}.")
    return Cause(option, f"there is no class {name};", CLASS, name)


def _needs_class(value: str, option: str | None) -> Cause:
    if option:
        text = f"got {_shown(value)}, but its class must come first;"
        return Cause(option, text, CLASS, f".{option}")
    expected = BESIDE if "class_path" in value else "expected a class (its name, or class_path and init_args)"
    return Cause("", f"{expected}, but got {_shown(value)}.", CLASS)


def _with_classes(cause: Cause, parser: ArgumentParser | None, key: str = "") -> Cause:
    """Add the most similar class name, or this package's classes that the option allows."""
    if cause.classes is None:
        return cause
    hints = [getattr(action, "_typehint", None) for action in _actions(parser) if action.dest == key]
    found = _subclasses(base for hint in hints for base in _classes(hint))
    own = _own(found)
    if cause.classes.startswith("."):
        option = cause.classes[1:].partition(".")[0]
        having = [one.__name__ for one in own if option in inspect.signature(one).parameters]
        proposal = f"it is an option of {_listed(having, 'or')}." if having else ""
    else:
        names = {one.__name__ for one in found}
        near = get_close_matches(cause.classes.rpartition(".")[2], names, 1, ALIKE)
        proposal = f"did you mean {near[0]}?" if near else ""
    all_own = f"choose one of {', '.join(one.__name__ for one in own)}, or give an import path."
    text = f"{cause.text} {proposal or (all_own if own else LISTED)}"
    return replace(cause, text=text, classes=None)


def _subclasses(bases: Iterable[type]) -> set[type]:
    """Return the concrete subclasses of ``bases``."""
    found: set[type] = set()
    queue = list(bases)
    while queue:
        one = queue.pop()
        queue += one.__subclasses__()
        if not inspect.isabstract(one) and not one.__name__.startswith(("_", "LazyInstance_")):
            found.add(one)
    return found


def _own(bases: Iterable[type]) -> list[type]:
    """Return those of this package, by name."""
    own = (one for one in _subclasses(bases) if one.__module__.startswith("pacmr_lightning"))
    return sorted(own, key=lambda one: one.__name__)


def _classes(hint: Any) -> Iterator[type]:
    for part in get_args(hint):
        yield from _classes(part)
    if inspect.isclass(hint) and not get_args(hint) and hint.__module__ != "builtins":
        yield hint


def _actions(parser: ArgumentParser | None) -> Iterator[Any]:
    for action in parser._actions if parser is not None else ():
        commands = getattr(action, "_name_parser_map", None)
        if commands is None:
            yield action
        else:
            for command in commands.values():
                yield from _actions(command)


def _near_option(name: str, parser: ArgumentParser | None, dashes: str = "") -> str:
    """Propose the option that was probably meant: same start, or similar, also up to the first dot."""
    actions = [action for action in _actions(parser) if not action.dest.endswith(".help")]
    if name in (action.dest for action in actions if not action.option_strings):
        return f"give {name} without {dashes}{name} before it."
    names = [action.dest for action in actions if action.option_strings]
    if parser is not None and not parser.exit_on_error:  # of a class
        names += ["class_path", "init_args"]
    head, dot, rest = name.partition(".")
    heads = {known.partition(".")[0] for known in names}
    found = [known for known in names if known.startswith(name)][:3]
    if dashes and not found:
        found = _elsewhere(name, actions)
    found = found or get_close_matches(name, names, 1, ALIKE)
    if not found and head not in heads:
        found = [near + dot + rest for near in get_close_matches(head, heads, 1, ALIKE)]
    return f"did you mean {_listed([dashes + one for one in found], 'or')}?" if found else LISTED


def _elsewhere(name: str, actions: list[Any]) -> list[str]:
    """Return options that end in ``.name``, those of classes (two levels) among them; the least nested."""
    known = [action.dest for action in actions]
    hints = [(action.dest, getattr(action, "_typehint", None)) for action in actions]
    if name in ELSEWHERE and any(dest == "model" for dest in known):
        return [ELSEWHERE[name]]
    for _ in range(2):
        if found := [dest for dest in dict.fromkeys(known) if dest.endswith(f".{name}")]:
            return found[:2]
        hints = [
            (f"{dest}.{option}", hint)
            for dest, kind in hints
            for one in _own(_classes(kind))
            for option, hint in _options_of(one).items()
        ]
        known = [dest for dest, _ in hints]
    return [dest for dest in dict.fromkeys(known) if dest.endswith(f".{name}")][:2]


def _options_of(one: type) -> dict[str, Any]:
    hints = get_type_hints(one.__init__)  # type: ignore[misc]
    return {name: hints.get(name) for name in inspect.signature(one).parameters}


def _without_command(key: str, parser: ArgumentParser | None) -> str:
    action = getattr(parser, "_subcommands_action", None)
    head, _, rest = key.partition(".")
    return rest if action is not None and head in action.choices and rest else key


def _expected(types: list[str], value: str) -> str:
    """Return ``expected an int or null, but got abc.`` for types as Python writes them."""
    literals = [one for kind in types if kind.startswith("typing.Literal") for one in _split(kind[15:-1])]
    names = [f"one of {', '.join(literals)}" if len(literals) > 1 else literals[0]] if literals else []
    for kind in types:
        if kind == "<class 'bool'>":
            names += ["true", "false"]
        elif not kind.startswith("typing.Literal"):
            name = re.sub(r"[\w.]+\.(\w+)", r"\1", re.sub(r"<class '([^']+)'>", r"\1", kind))
            article = "an" if name[0] in "aeiouAEIOU" else "a"
            names.append("null" if name == "NoneType" else f"{article} {name}")
    # Python may return an equal union written earlier, so the order of int and float varies.
    names.sort(key=lambda name: (name == "null", name == "a float"))
    near = get_close_matches(value, [one.strip("'") for one in literals], 1, ALIKE)
    end = f"; did you mean {near[0]}?" if near else "."
    return f"expected {_listed(names, 'or')}, but got {_shown(value)}{end}"


def _listed(names: list[str], word: str) -> str:
    return f"{', '.join(names[:-1])} {word} {names[-1]}" if len(names) > 1 else names[0]


def _shown(value: str) -> str:
    value = _collapse(value)
    return "nothing" if not value else value if len(value) <= LONGEST else f"{value[:LONGEST]}..."


def _collapse(text: str) -> str:
    return " ".join(text.split())


def _split(text: str) -> list[str]:
    return [part.strip() for part in re.findall(r"(?:[^,\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])+", text)]
