"""Import paths that README, docs and configs name."""

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").rglob("*.yaml")]
PAGES += [ROOT / "research" / "README.md", *(ROOT / "research" / "sweeps").glob("*.yaml")]


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
