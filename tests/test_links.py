"""Links between the pages of the repository lead to files, and to headings in them, that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("research/**/*.md"),
        *ROOT.glob(".github/**/*.md"),
    ]
)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    broken = []
    for target in LINK.findall(CODE.sub("", page.read_text())):
        file, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        found = (page.parent / file) if file else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken


def test_there_are_links():
    """Else the pattern above would find nothing in anything."""
    assert sum(len(LINK.findall(CODE.sub("", page.read_text()))) for page in PAGES) > 100
