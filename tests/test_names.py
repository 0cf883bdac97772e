"""Import paths that people rely on: those that README, docs and configs name, and older ones."""

import re
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

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
    ("old", "new"),
    [
        ("robust_objectives", "objectives:DrDPO"),
        ("robust_objectives", "objectives:ROPO"),
        ("robust_objectives", "objectives:RPOEM"),
        ("vnet_folder", "weighting.vnet_folder:load_vnet"),
        ("vnet_folder", "weighting.vnet_folder:save_vnet"),
    ],
)
def test_what_older_runs_and_exports_name(old, new):
    name = new.partition(":")[2]
    assert getattr(import_module(f"pacmr_lightning.{old}"), name) is resolve_name(f"pacmr_lightning.{new}")
