"""The bounds of dependencies exclude what an advisory names."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and later read TOML")
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PARTS = (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
REQUIREMENTS = [Requirement(text) for part in PARTS for text in part]
SECURITY = (ROOT / "SECURITY.md").read_text()
ADVISORIES = re.findall(r"^ *\| ([a-z0-9-]+)(?: \(tests\))? \| (before )?(\d[\d., ]*) \|", SECURITY, re.M)


@pytest.mark.parametrize(("name", "before", "versions"), ADVISORIES)
def test_what_an_advisory_names_is_excluded(name, before, versions):
    found = [one.specifier for one in REQUIREMENTS if canonicalize_name(one.name) == name]
    excluded = [f"{versions}.dev0"] if before else versions.split(", ")
    assert found and len(ADVISORIES) == 10
    assert not any(one.contains(version, prereleases=True) for one in found for version in excluded)
