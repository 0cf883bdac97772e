"""jsonargparse's error messages, which list every guess of a union, cut down to one sentence.

They are nested: what is wrong with an option of a class is said inside of what is wrong with the class. Only
their text holds all guesses of a union, so it is read here; what has another shape is passed on as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from textwrap import dedent

from jsonargparse import ArgumentParser

from .proposals import collapse, expected, listed, name_classes, near_option, shown, split

BESIDE = "beside class_path a class has only init_args, which hold its options"
TYPE, CLASS, OWN, INSIDE = range(4)
"""How near a cause is to what was meant: no guess of the type, no such class, said by a class itself or of an
item, or of an option of a class that was found."""


@dataclass(frozen=True)
class Cause:
    """What is wrong with the value of ``key``, an option's name with dots."""

    key: str
    text: str
    rank: int

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


def short_message(message: str) -> str:
    """The message's first cause as one sentence that names the key, the value and what would be accepted."""
    return str(read(message, None))


def read(message: str, parser: ArgumentParser | None) -> Cause:
    """What the message says is wrong; the parser that it comes from knows which names would be right."""
    cause = _cause(message, parser)
    cause = replace(cause, text=cause.text.replace("{value}", "the class"))
    if "{classes" in cause.text:  # of no option that is known
        return replace(cause, text=name_classes(cause.text, "", None))
    return cause


def _cause(message: str, parser: ArgumentParser | None) -> Cause:
    """Takes one wrapping off, and reads what is inside."""
    message = dedent(message).strip("\n")
    if found := re.match(r"\s*- Expected a path but .*? not accessible or invalid\n- (.*)", message, re.S):
        return _cause(found[1], parser)
    if found := re.match(r'Parser key "([^"]*)"(?: element \d+)?:\s*?(?:\n|[ ]+|$)(.*)', message, re.S):
        return _of_key(found[1], found[2], parser)
    if found := re.match(r"Problem with given class_path '([^']*)':\n(.*)", message, re.S):
        return _of_class(found[1], found[2], parser)
    if found := re.match(
        r"Does not validate .* Union subtypes\nSubtypes: \[(.*?)\]\nErrors:\n(.*)\n"
        r"Given value type: [^\n]*\nGiven value: ?(.*)",
        message,
        re.S,
    ):
        return _of_union(split(found[1]), re.split(r"\n(?=- )", dedent(found[2])), found[3], parser)
    return _leaf(message, parser)


def _of_key(key: str, said: str, parser: ArgumentParser | None) -> Cause:
    """What is said of an option; where no class is found, those are named that there are."""
    inner = _cause(said, None)
    key = _without_command(key, parser)
    text = inner.text
    if "{classes" in text:
        text = name_classes(text, key, parser)
    return replace(inner, key=".".join(filter(None, (key, inner.key.lstrip("-")))), text=text)


def _of_class(path: str, said: str, parser: ArgumentParser | None) -> Cause:
    """What is wrong with a class that was named, or with one of its options."""
    if path.endswith((".yaml", ".yml")) or re.match(
        r"module '.*' has no attribute|Expected a dot import path", said.strip()
    ):
        return _no_class(path)
    if missing := re.match(r"No module named '[^']*'", said.strip()):
        text = f"{path} cannot be imported ({missing[0]}); correct the path, or install what has it."
        return Cause("", text, OWN)
    inner = _cause(said, parser)
    if not inner.key and inner.text == collapse(said):  # no message of a parser
        return Cause("", f"{path} cannot be imported ({inner.text.rstrip('.')}).", OWN)
    text = inner.text
    if "." not in inner.key:
        text = text.replace("there is no such option", f"{path.rpartition('.')[2]} has no such option")
    return Cause(inner.key, text, INSIDE)


def _of_union(types: list[str], errors: list[str], value: str, parser: ArgumentParser | None) -> Cause:
    """The guess that comes nearest, or all types that would do."""
    nested = re.fullmatch(r"NestedArg\(key='(.*)', val='?(.*?)'?\)", value, re.S)
    value = nested[2] if nested else value
    causes = []
    for error in errors:
        error = error.removeprefix("- ")
        if re.match(r"Expected an? (<class |typing\.)", error) and "Got value" not in error:
            causes.append(Cause("", "", TYPE))
        elif "is abstract" in error and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", value):
            causes.append(_abstract(value))
        elif "is abstract" in error or error.startswith("Not a valid subclass of"):
            causes.append(_needs_class(value, nested and nested[1]))
        else:
            causes.append(_cause(error, parser))
    best = max(causes, key=lambda cause: cause.rank)
    best = replace(best, text=best.text.replace("{value}", shown(value)))
    is_word = re.fullmatch(r"[A-Za-z_][\w.]*", value)
    if best.rank > CLASS or (best.rank == CLASS and (is_word or nested or value.startswith(("{", "[")))):
        if best.rank == OWN and (item := re.search(r", but got (.*?)([.;].*)$", best.text, re.S)):
            whole = f" in {shown(value)}" if item[1] != shown(value) else ""
            return replace(best, text=f"{best.text[: item.end(1)]}{whole}{item[2]}")
        return best
    return Cause(nested[1] if nested else "", expected(types, value), TYPE)


def _leaf(message: str, parser: ArgumentParser | None) -> Cause:
    """A message without another one inside."""
    text = collapse(message)
    if found := re.search(r"(?:Expected a dot import path string|Unexpected import path format): (.*)", text):
        option = text.partition(":")[0].strip("- ") if text.startswith("--") else ""
        return _no_class(found[1], option)
    if "is abstract" in text or text.startswith("Not a valid subclass of"):
        return _needs_class((re.findall(r"Got value: (.*?) Subclass types", text) or [""])[0], None)
    if found := re.match(r"Import path ?(\S*) does not correspond to a subclass of (\S+)", text):
        return Cause("", f"{found[1] or '{value}'} is no {found[2]}; {{classes}}.", OWN)
    if found := re.match(r"Expected an? (.+?)\. Got value: ?(.*)", text):
        return Cause("", expected([found[1]], found[2]), OWN)
    if found := re.match(r"Value not boolean: (.*)\.", text):
        return Cause("", expected(["<class 'bool'>"], found[1]), OWN)
    if found := re.search(r"(?:Option|option) '([^']+)'(?: is not accepted)?", text):
        if found[1] == "class_path":  # of a class that is named already
            return Cause("", f"{BESIDE}.", OWN)
        return Cause(found[1], f"there is no such option; {near_option(found[1], parser)}", OWN)
    if found := re.match(r"unrecognized arguments: (.*)", text):
        return _unknown_word(found[1].split(" "), parser)
    if found := re.match(r"the following arguments are required: (.+)", text):
        names = [_without_command(name.strip(), parser) for name in found[1].split(",")]
        if len(names) == 1:
            return Cause(names[0], "missing; give it on the command line or in a config.", OWN)
        named = listed(names, "and")
        return Cause("", f"{named} are missing; give them on the command line or in a config.", OWN)
    if found := re.match(r"argument (\S+): expected (one|at least one) argument", text):
        option = _without_value(found[1].split("/")[-1], getattr(parser, "args", []))
        return Cause(option, "its value is missing; give it after the option.", OWN)
    if found := re.match(r"argument (\S+): ignored explicit argument '(.*)'", text):
        name = found[1].split("/")[0].lstrip("-")
        return Cause(name, f"it takes no value, but got {shown(found[2])}; give it alone.", OWN)
    if found := re.match(r"(?:File|Path) does not exist: '(.*)'", text):
        return Cause("", f"there is no file {found[1]}.", OWN)
    if found := re.match(r"Path is not a file: '(.*)'", text):
        return Cause("", f"{found[1]} is no file.", OWN)
    if found := re.match(r"Problems parsing config: (.*)", text):
        said = found[1].replace('in "<unicode string>", ', "at ").rstrip(".")
        return Cause("", f"this is no YAML ({said}).", OWN)
    if found := re.match(r"Unexpected config: ?(.*)|Unable to load config (\S+)", text):
        value = found[1] if found[2] is None else found[2].strip("\"'")
        told = "expected options with their values, as in YAML"
        return Cause("", f"{told}, but got {shown(value)}.", OWN)
    if text.startswith('expected "subcommand" to be one of'):
        return Cause("", "no command is given; pacmr --help lists them.", OWN)
    return Cause("", text, OWN)


def _no_class(name: str, option: str = "") -> Cause:
    if name.endswith((".yaml", ".yml")):
        return Cause(option, f"there is no file {name}.", OWN)
    return Cause(option, f"there is no class {name}; {{classes:{name}}}.", CLASS)


def _abstract(name: str) -> Cause:
    return Cause(
        "", f"{name} leaves an abstract method of its base class out; define it, or {{classes}}.", OWN
    )


def _needs_class(value: str, option: str | None) -> Cause:
    """An option of a class that is not named, or something that names none."""
    if option:
        told = f"got {shown(value)}, but its class is not named before it"
        return Cause(option, f"{told}; {{classes:.{option}}}.", CLASS)
    if "class_path" in value:
        return Cause("", f"{BESIDE}, but got {shown(value)}.", CLASS)
    return Cause(
        "", f"expected a class (its name, or class_path and init_args), but got {shown(value)}.", CLASS
    )


def _unknown_word(words: list[str], parser: ArgumentParser | None) -> Cause:
    option = next((word for word in words if word.startswith("-")), None)
    if option is None:
        return Cause("", f"nothing takes the word {words[0]}; options start with --, see --help.", OWN)
    name = option.lstrip("-").partition("=")[0]
    return Cause(option.partition("=")[0], f"there is no such option; {near_option(name, parser, '--')}", OWN)


def _without_value(option: str, words: list[str]) -> str:
    """The option that was typed last or before another one; argparse says ``--data`` of ``--data.task``."""
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return next((w for w, following in pairs if w.startswith(option) and following.startswith("--")), option)


def _without_command(key: str, parser: ArgumentParser | None) -> str:
    """Without the ``fit.`` that stands before the options of a parser of several commands."""
    action = getattr(parser, "_subcommands_action", None)
    head, _, rest = key.partition(".")
    return rest if action is not None and head in action.choices and rest else key
