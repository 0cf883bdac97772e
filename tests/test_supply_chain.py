"""The bounds of dependencies exclude what an advisory names, and admit the versions of constraints.txt."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info < (3, 11):
    pytest.skip("tomllib is new in Python 3.11", allow_module_level=True)
import tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(text)
    for part in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in part
]
PINNED = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
}
ADVISORIES = {
    "lightning": ("2.6.2", "2.6.3"),
    "torch": ("2.5.1", "2.9.1"),
    "transformers": ("5.2.0", "5.4.0", "5.9.0"),
    "jinja2": ("3.1.5",),
    "sentencepiece": ("0.2.0",),
    "pyarrow": ("21.0.0", "23.0.0"),
    "mlflow-skinny": ("3.12.0",),
    "scikit-learn": ("1.4.2",),
    "tqdm": ("4.66.2",),
    "filelock": ("3.20.2",),
}
"""Newest releases that each advisory in SECURITY.md names."""


@pytest.mark.parametrize("name", ADVISORIES)
def test_what_an_advisory_names_is_excluded(name):
    found = [one.specifier for one in REQUIREMENTS if canonicalize_name(one.name) == name]
    assert found and not any(version in one for one in found for version in ADVISORIES[name])
    assert re.search(rf"\| {name}\b", (ROOT / "SECURITY.md").read_text())


@pytest.mark.parametrize("one", REQUIREMENTS, ids=str)
def test_constraints_are_within_the_bounds(one):
    if version := PINNED.get(canonicalize_name(one.name)):
        assert version in one.specifier


def test_lightning_by_its_other_name():
    assert PINNED["pytorch-lightning"] == PINNED["lightning"]
    assert PINNED["lightning"] not in ADVISORIES["lightning"]
