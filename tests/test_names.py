"""Import paths that people rely on: those that README, docs and configs name, and older ones."""

import re
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

from pacmr_lightning.old_names import MOVED

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").rglob("*.yaml")]


def named() -> list[str]:
    """Names below the package, and what Python code in the pages imports from there."""
    found: set[str] = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found |= set(re.findall(r"\bpacmr_lightning(?:\.\w+)+", text))
        for module, names in re.findall(r"from (pacmr_lightning[\w.]*) import ([\w, ]+)", text):
            found |= {f"{module}.{name.strip()}" for name in names.split(",")}
    return sorted(found)


@pytest.mark.parametrize("name", named())
def test_what_pages_name_is_there(name):
    assert resolve_name(name) is not None


@pytest.mark.parametrize(
    ("old", "names"), [("robust_objectives", ("DrDPO", "ROPO", "RPOEM")), ("vnet_folder", ("load_vnet",))]
)
def test_what_older_runs_and_exports_name(old, names):
    module = import_module(f"pacmr_lightning.{old}")
    today = import_module(MOVED[f"pacmr_lightning.{old}"])
    assert all(getattr(module, name) is getattr(today, name) for name in names)
    assert today.__spec__.name == today.__name__ == MOVED[f"pacmr_lightning.{old}"]
