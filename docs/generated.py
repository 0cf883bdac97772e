"""Parts of the reference that are read from the code when the site is built.

A page marks the place of one with a comment, such as ``<!-- commands -->``.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS
from collections.abc import Callable

from pacmr_lightning import cli
from pacmr_lightning.command_line.parser import ToolParser, takes_words
from pacmr_lightning.command_line.short_forms import page
from pacmr_lightning.runs.shipped_configs import names, told

HIDDEN = ("help", "config", "print_config")


def commands() -> str:
    """Return a section for each command: purpose, usage and a table of its options."""
    parts = []
    for name in (*cli.RUNS, *cli.TOOLS):
        if name == "fit":
            parts.append(f"## pacmr fit\n\n```text\n{page()}\n```")
        elif name in cli.RUNS:
            usage = f"pacmr {name} --config runs/mine/config.yaml --ckpt_path last"
            parts.append(f"## pacmr {name}\n\n{cli.RUNS[name]}\n\n```bash\n{usage}\n```")
        else:
            parts.append(_tool(name))
    return "\n\n".join(parts)


def _tool(name: str) -> str:
    """Return the section of a command whose options are those of a function."""
    _, function, _ = cli.tool_of([name])
    parser = ToolParser(exit_on_error=False)
    parser.add_function_arguments(function, as_positional=takes_words(function))
    actions = [a for a in parser._actions if a.dest not in HIDDEN and not a.dest.endswith(".help")]
    words = [action.dest.upper() for action in actions if not action.option_strings]
    described = (function.__doc__ or "").partition("Args:")[0]
    paragraphs = [" ".join(part.split()) for part in described.split("\n\n")]
    usage = f"```bash\n{' '.join(['pacmr', name, *words])}\n```"
    table = ["| option | default | meaning |", "| --- | --- | --- |", *(_row(action) for action in actions)]
    options_table = "\n".join(table) if actions else ""
    return "\n\n".join([f"## pacmr {name}", usage, *filter(None, map(_marked, paragraphs)), options_table])


def _marked(text: str) -> str:
    """Return a docstring's words with options as code."""
    return re.sub(r"(?<![\w`-])--[a-z_]+", r"`\g<0>`", text)


def _row(action) -> str:  # type: ignore[no-untyped-def]  # argparse's private class
    option = action.option_strings[0] if action.option_strings else action.dest.upper()
    default = "" if action.default in (None, SUPPRESS) else f"`{action.default}`"
    meaning = " ".join((action.help or "").split()).replace("|", "\\|").replace("<", "&lt;")
    needed = "required" if action.required else default
    return f"| `{option}` | {needed} | {_marked(meaning)} |"


def configs() -> str:
    """Return a table of the shipped configs: name and first sentence."""
    rows = (f"| `{name}` | {told(name).replace('|', '/')} |" for name in names())
    return "\n".join(["| config | content |", "| --- | --- |", *rows])


PARTS: dict[str, Callable[[], str]] = {"commands": commands, "configs": configs}


def filled(text: str) -> str:
    """Return a page's text with its generated parts."""
    for name, part in PARTS.items():
        mark = f"<!-- {name} -->\n"
        if mark in text:
            text = text.replace(mark, f"{part()}\n")
    return text
