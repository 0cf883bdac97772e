"""The house's arrows: what imports what, wherever the import stands in a file, and that none runs back."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

from .conftest import own_modules

FILES = own_modules()


def imported(name: str, path: Path) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in FILES else base


ARROWS = {name: set(imported(name, path)) & FILES.keys() - {name} for name, path in FILES.items()}
# It imports the command that is asked for by its name.
ARROWS["pacmr_lightning.cli"] |= {name for name in FILES if name.startswith("pacmr_lightning.commands.")}


def room(name: str) -> str:
    """The folder that a module lies in; a file beside the folders is a room of its own."""
    return name.removeprefix("pacmr_lightning.").split(".")[0]


def test_no_circles():
    assert len(ARROWS) > 150 and sum(map(len, ARROWS.values())) > 500  # the imports were found
    rooms: dict[str, set[str]] = {}
    for name, targets in ARROWS.items():
        rooms.setdefault(room(name), set()).update({room(target) for target in targets} - {room(name)})
    for graph in (ARROWS, rooms):
        TopologicalSorter(graph).prepare()  # its error names the circle


def test_who_may_import():
    allowed = {"datamodules": {"commands", "audit"}, "callbacks": {"commands"}, "commands": {"cli"}}
    for target, rooms in (allowed | {"cli": {"__main__"}}).items():
        found = {room(name) for name, targets in ARROWS.items() if target in map(room, targets)}
        assert found - {target} == rooms
