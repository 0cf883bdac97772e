"""Proposes the option, class or type that was probably meant where one is mistyped."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, get_args

from jsonargparse import ArgumentParser

LISTED = "--help lists those that there are."
ALIKE = 0.75
"""How alike names are, from 0 to 1, of which one is proposed for the other."""
LONGEST = 80
"""Characters of a value that are shown."""


def near_option(name: str, parser: ArgumentParser | None, dashes: str = "") -> str:
    """The option that was probably meant: begun alike, spelled alike, or so up to its first dot."""
    actions = [action for action in _actions(parser) if not action.dest.endswith(".help")]
    if name in (action.dest for action in actions if not action.option_strings):
        return f"give {name} without {dashes}{name} before it."
    names = [action.dest for action in actions if action.option_strings]
    if parser is not None and not parser.exit_on_error:  # of a class
        names += ["class_path", "init_args"]
    head, dot, rest = name.partition(".")
    heads = {known.partition(".")[0] for known in names}
    found = [known for known in names if known.startswith(name)][:3] or get_close_matches(
        name, names, 1, ALIKE
    )
    if not found and head not in heads:
        found = [near + dot + rest for near in get_close_matches(head, heads, 1, ALIKE)]
    return f"did you mean {listed([dashes + one for one in found], 'or')}?" if found else LISTED


def _actions(parser: ArgumentParser | None) -> Iterator[Any]:
    """The options of a parser and of its commands."""
    for action in parser._actions if parser is not None else ():
        commands = getattr(action, "_name_parser_map", None)
        if commands is None:
            yield action
        else:
            for command in commands.values():
                yield from _actions(command)


def _classes(hint: Any) -> Iterator[type]:
    """The classes in a type hint whose subclasses can be named on the command line."""
    for part in get_args(hint):
        yield from _classes(part)
    if inspect.isclass(hint) and not get_args(hint) and hint.__module__ != "builtins":
        yield hint


def name_classes(text: str, key: str, parser: ArgumentParser | None) -> str:
    """Fills in, for ``{classes:NAME}.``, which class was probably meant, or those that the option can have.

    For ``{classes:.OPTION}.``, those of them that have the option. They are this package's.
    """
    hints = [getattr(action, "_typehint", None) for action in _actions(parser) if action.dest == key]
    bases = [base for hint in hints for base in _classes(hint)]
    blank = re.search(r"\{classes:?(\.?)(.*?)\}\.", text)
    assert blank is not None  # callers looked for it
    found: set[type] = set()
    queue = bases
    while queue:
        one = queue.pop()
        queue += one.__subclasses__()
        if not inspect.isabstract(one) and not one.__name__.startswith(("_", "LazyInstance_")):
            found.add(one)
    classes = {one for one in found if one.__module__.startswith("pacmr_lightning")}
    option = blank[2].partition(".")[0] if blank[1] else None
    having = sorted(one.__name__ for one in classes if option in inspect.signature(one).parameters)
    own = sorted(one.__name__ for one in classes)
    near = get_close_matches(blank[2].rpartition(".")[2], {one.__name__ for one in found}, 1, ALIKE)
    if having:
        filled = f"it is an option of {listed(having, 'or')}."
    elif near and option is None:
        filled = f"did you mean {near[0]}?"
    elif own:
        filled = f"choose one of {', '.join(own)}, or give an import path."
    else:
        filled = LISTED
    return text.replace(blank[0], filled)


def expected(types: list[str], value: str) -> str:
    """``expected an int or null, but got abc.``, of types as Python writes them."""
    literals = [one for kind in types if kind.startswith("typing.Literal") for one in split(kind[15:-1])]
    names = [f"one of {', '.join(literals)}" if len(literals) > 1 else literals[0]] if literals else []
    for kind in types:
        if not kind.startswith("typing.Literal"):
            names += ["true", "false"] if kind == "<class 'bool'>" else [_type_name(kind)]
    # Python may return an equal union that was written first, so int and float come in either order.
    names.sort(key=lambda name: (name == "null", name == "a float"))
    near = get_close_matches(value, [one.strip("'") for one in literals], 1, ALIKE)
    end = f"; did you mean {near[0]}?" if near else "."
    return f"expected {listed(names, 'or')}, but got {shown(value)}{end}"


def listed(names: list[str], word: str) -> str:
    """``a, b or c``."""
    return f"{', '.join(names[:-1])} {word} {names[-1]}" if len(names) > 1 else names[0]


def _type_name(text: str) -> str:
    """``an int`` of ``<class 'int'>``, ``a list[float]``."""
    short = re.sub(r"[\w.]+\.(\w+)", r"\1", re.sub(r"<class '([^']+)'>", r"\1", text))
    if short == "NoneType":
        return "null"
    return f"{'an' if short[0] in 'aeiouAEIOU' else 'a'} {short}"


def shown(value: str) -> str:
    """A value as a sentence quotes it."""
    value = collapse(value)
    return "nothing" if not value else value if len(value) <= LONGEST else f"{value[:LONGEST]}..."


def collapse(text: str) -> str:
    """On one line."""
    return re.sub(r"\s+", " ", text).strip()


def split(text: str) -> list[str]:
    """At commas outside of brackets."""
    return [part.strip() for part in re.findall(r"(?:[^,\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])+", text)]
