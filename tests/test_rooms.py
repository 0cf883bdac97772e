"""The house's arrows: what imports what, wherever the import stands in a file, and that none runs back."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "pacmr_lightning"
FOLDERS = {PACKAGE: PACKAGE, "datamodules": f"{PACKAGE}.datamodules", "callbacks": f"{PACKAGE}.callbacks"}
"""Folder of the repository and the name under which it is imported."""


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


FILES = modules()


def imported(name: str, path: Path) -> Iterator[str]:
    """What a module imports of ours, lazily and for type checkers too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if whole in FILES or base in FILES:
                    yield whole if whole in FILES else base


ARROWS = {name: set(imported(name, path)) - {name} for name, path in FILES.items()}
# It imports the command that is asked for by its name.
ARROWS[f"{PACKAGE}.cli"] |= {name for name in FILES if name.startswith(f"{PACKAGE}.commands.")}


def room(name: str) -> str:
    """The folder that a module lies in; a file beside the folders is a room of its own."""
    parts = name.removeprefix(f"{PACKAGE}.").split(".")
    return parts[0]


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_file_imports_itself_by_a_detour():
    assert len(ARROWS) > 150 and sum(map(len, ARROWS.values())) > 500  # the imports were found
    assert circle(ARROWS) == []


def test_no_circle_of_rooms():
    rooms: dict[str, set[str]] = {}
    for name, targets in ARROWS.items():
        rooms.setdefault(room(name), set()).update({room(target) for target in targets} - {room(name)})
    assert circle(rooms) == []


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        ("datamodules", {"commands", "audit"}),
        ("callbacks", {"commands"}),
        ("commands", {"cli"}),
        ("cli", {"__main__"}),
    ],
)
def test_who_may_import(target, allowed):
    found = {room(name) for name, targets in ARROWS.items() if target in map(room, targets)} - {target}
    assert found == allowed
