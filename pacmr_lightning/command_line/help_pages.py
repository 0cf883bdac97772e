"""Help of the commands on one page, read from the source of their functions: PyTorch is not imported."""

import argparse
import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
WIDTH = 100

RUNS = """\
usage: pacmr {command} --config RUN/config.yaml --ckpt_path last [options]

{told}

  --config FILE                  the run's config.yaml; several compose, later ones win
  --ckpt_path PATH               last, or a file of the run's folder checkpoints
{more}  --trainer.devices N            GPUs (default: auto, all of them)

Any option of pacmr fit can be given as well; --help_all lists all of them."""
PREDICT = """\
  --data.predict_prompts N       prompts to answer; null for all (default: 800)
  --model.max_new_tokens TOKENS  longest response (default: 128)
  --generation.temperature T     0 is greedy (default: 0)
  --generation.output FILE       default: generations.jsonl in the run's folder
"""


@dataclass(frozen=True)
class _Option:
    name: str
    type: str
    help: str
    default: str | None
    """As Python source; None for a required one."""
    file: Path
    """Where its type is named."""


def run_page(command: str, told: str) -> str:
    """Return the help of ``pacmr validate``, ``test`` or ``predict``."""
    return RUNS.format(command=command, told=told, more=PREDICT if command == "predict" else "")


def takes_words(parameters: Iterable[str]) -> bool:
    """Return whether required parameters are given without their names: not if the first is a source."""
    return next(iter(parameters), None) != "source"


def tool_page(command: str) -> str:
    """Return the help of a command that ``run_tool`` runs: its docstring and options, with their defaults."""
    name = command.replace("-", "_")
    file = PACKAGE / "commands" / f"{name}.py"
    function, _ = _defined(file, name)
    assert isinstance(function, ast.FunctionDef)
    options = list(_options(function, file))
    positional = takes_words(option.name for option in options)
    required = [
        option.name.upper() + (" ..." if option.type.startswith("list") else "")
        for option in options
        if option.default is None
    ]
    parser = argparse.ArgumentParser(
        prog=f"pacmr {command}",
        usage=" ".join([f"pacmr {command}", *(required if positional else []), "[options]"]),
        description=_told(function),
        epilog="--help_all lists all options, those of classes among them.",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, 2, 24, WIDTH),
        add_help=False,
    )
    words = parser.add_argument_group("arguments") if positional and required else None
    named = parser.add_argument_group("options")
    for option in options:
        text = option.help.replace("%", "%%").replace("``", "")
        shown = text if option.default in (None, "None", "False") else f"{text} [{option.default}]"
        if option.name == "source":
            named.add_argument("--data", metavar="FILE", help="pairs: JSON Lines, Parquet, or a Hub dataset")
        if words and option.default is None:
            words.add_argument(option.name, metavar=option.name.upper(), help=shown)
        elif option.type == "bool":
            named.add_argument(f"--{option.name}", action="store_true", help=shown)
        else:
            named.add_argument(f"--{option.name}", metavar=_metavar(option), help=shown)
    return parser.format_help().rstrip()


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _told(node: ast.FunctionDef) -> str:
    text = (ast.get_docstring(node) or "").partition("\n\nArgs:")[0].replace("``", "")
    return text.partition("\n\nRaises:")[0]


def _options(node: ast.stmt, file: Path) -> Iterator[_Option]:
    """Yield the parameters of a function, or a dataclass's fields; ``**name`` are those of a dataclass."""
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    described = _described(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value:
                name = field.target.id
                kind, default = ast.unparse(field.annotation), _value(field.value, file)
                yield _Option(name, kind, described.get(name, ""), default, file)
        return
    given = node.args
    defaults: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults))
    for argument, assigned in zip(
        [*given.args, *given.kwonlyargs], [*defaults, *given.defaults, *given.kw_defaults], strict=True
    ):
        kind = ast.unparse(argument.annotation) if argument.annotation else "str"
        value = None if assigned is None else _value(assigned, file)
        yield _Option(argument.arg, kind, described.get(argument.arg, ""), value, file)
    if given.kwarg:
        for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
            if any(word.arg is None and ast.unparse(word.value) == given.kwarg.arg for word in call.keywords):
                yield from _options(*_defined(file, ast.unparse(call.func)))


def _value(default: ast.expr, file: Path) -> str:
    """Return a default as it is written; a constant of the module by its value, an object as nothing."""
    if isinstance(default, ast.Name):
        assigned, _ = _defined(file, default.id)
        value = getattr(assigned, "value", None)
        return (
            "None" if not isinstance(value, ast.expr) or isinstance(value, ast.Call) else ast.unparse(value)
        )
    return "None" if isinstance(default, ast.Call) else ast.unparse(default).strip("'")


def _described(docstring: str) -> dict[str, str]:
    """Return the texts of a docstring's section Args by parameter."""
    section = re.search(r"Args:\n(.*?)(?:\n\n(?:Returns|Raises):|\Z)", inspect.cleandoc(docstring), re.S)
    found = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", section[1] if section else "", re.S | re.M)
    return {name: " ".join(text.split()) for name, text in found}


def _metavar(option: _Option) -> str:
    kind = option.type.removesuffix(" | None")
    if several := re.fullmatch(r"(?:list|Sequence)\[(\w+)\]", kind):
        kind = several[1]
    if kind.isidentifier() and kind not in ("str", "int", "float"):
        node, _ = _defined(option.file, kind)
        if isinstance(node, ast.ClassDef):
            return "CLASS"
        kind = ast.unparse(getattr(node, "value", node))
    if kind.startswith("Literal["):
        return f"{{{','.join(map(str, ast.literal_eval(f'({kind[8:-1]},)')))}}}"
    return option.name.upper()


def _defined(file: Path, name: str) -> tuple[ast.FunctionDef | ast.ClassDef | ast.Assign, Path]:
    """Return the definition of a name used in one of our files, and the file that has it."""
    for node in _parsed(file).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node, file
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            return node, file
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            [original] = [a.name for a in node.names if name == (a.asname or a.name)]
            folder = file.parents[node.level - 1] if file.name != "__init__.py" else file.parent
            place = folder.joinpath(*(node.module or "").split("."))
            if (
                not place.exists() and not place.with_suffix(".py").exists()
            ):  # beside the package in a checkout
                place = folder.parent.joinpath(*(node.module or "").split("."))
            return _defined(place / "__init__.py" if place.is_dir() else place.with_suffix(".py"), original)
    raise KeyError(f"{file}: {name}")
