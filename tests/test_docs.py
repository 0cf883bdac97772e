"""Pages agree with the code: import paths, settings by model size, options; their links lead to files."""

import re
import runpy
from pathlib import Path
from pkgutil import resolve_name

import pytest

from pacmr_lightning.cli import RUNS, TOOLS
from pacmr_lightning.modules.schedule import LEARNING_RATES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *DOCS.glob("*.md"), *(ROOT / "configs").rglob("*.yaml")]
PAGES += [ROOT / "research" / "README.md", *(ROOT / "research" / "sweeps").glob("*.yaml")]
UNITS = {"thousand": 1e3, "million": 1e6, "billion": 1e9}
FOLDERS = ("*.md", "docs/*.md", "benchmarks/*.md", "research/**/*.md", ".github/**/*.md")
LINKING = [page for folder in FOLDERS for page in ROOT.glob(folder)]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")


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


@pytest.fixture(scope="module")
def commands():
    return runpy.run_path(str(DOCS / "generated.py"))["commands"]()


def test_learning_rates_by_model_size():
    row = r"^\| ([\d.]+) (\w+) \| (\S+) \|.* \| (?:measured on )?(.+) \|$"
    rows = re.findall(row, (DOCS / "train.md").read_text(), re.MULTILINE)
    assert len(rows) == 5
    for number, unit, rate, source in rows:
        _, found, why = next(row for row in LEARNING_RATES if float(number) * UNITS[unit] <= row[0])
        assert found == float(rate) and source in why


def test_every_command_has_a_section(commands):
    titles = re.findall(r"^## pacmr (\S+)$", commands, re.MULTILINE)
    assert sorted(titles) == sorted([*RUNS, *TOOLS])


def test_every_option_has_a_meaning(commands):
    rows = re.findall(r"^\| `(\S+)` \| .*? \| (.*) \|$", commands, re.MULTILINE)
    assert len(rows) > 80 and {"--scorer", "--labels", "RUN"} <= {option for option, _ in rows}
    assert [option for option, meaning in rows if not meaning] == []


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links():
    links = [(page, link) for page in LINKING for link in LINK.findall(CODE.sub("", page.read_text()))]
    assert len(links) > 100
    broken = []
    for page, link in links:
        file, _, anchor = link.partition("#")
        found = (page.parent / file) if file else page
        local = not re.match(r"[a-z]+:", link)
        if local and (not found.exists() or (anchor and anchor not in anchors(found))):
            broken.append((str(page), link))
    assert not broken
