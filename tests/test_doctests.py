"""Examples in docstrings print what stands there; that of ``audit`` needs a model and runs with its tests."""

import re
from doctest import DocTestFinder, DocTestRunner
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path for name in ("pacmr_lightning", "datamodules", "callbacks") for path in (ROOT / name).rglob("*.py")
]
NAMES = {
    re.sub(
        r"^(datamodules|callbacks)", r"pacmr_lightning.\1", str(path.relative_to(ROOT).with_suffix(""))
    ).replace("/", ".")
    for path in FILES
    if ">>> " in path.read_text()
} - {"pacmr_lightning.audit.pipeline"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_examples(name):
    module = import_module(name)
    found = [test for test in DocTestFinder().find(module) if test.examples]
    assert found and all(DocTestRunner().run(test).failed == 0 for test in found)
