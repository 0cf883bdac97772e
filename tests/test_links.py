"""Links between the pages of the repository lead to files, and to headings in them, that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("*.md", "docs/*.md", "benchmarks/*.md", "research/**/*.md", ".github/**/*.md")
PAGES = [page for folder in FOLDERS for page in ROOT.glob(folder)]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links():
    links = [(page, link) for page in PAGES for link in LINK.findall(CODE.sub("", page.read_text()))]
    assert len(links) > 100
    broken = []
    for page, link in links:
        file, _, anchor = link.partition("#")
        found = (page.parent / file) if file else page
        local = not re.match(r"[a-z]+:", link)
        if local and (not found.exists() or (anchor and anchor not in anchors(found))):
            broken.append((str(page), link))
    assert not broken
