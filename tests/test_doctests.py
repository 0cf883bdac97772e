"""Examples in docstrings print what stands there; that of ``audit`` needs a model and runs with its tests."""

from doctest import DocTestFinder, DocTestRunner
from importlib import import_module

import pytest

from .conftest import own_modules

NAMES = {name for name, path in own_modules().items() if ">>> " in path.read_text()}


@pytest.mark.parametrize("name", sorted(NAMES - {"pacmr_lightning.audit.pipeline"}))
def test_examples(name):
    found = [test for test in DocTestFinder().find(import_module(name)) if test.examples]
    assert found and all(DocTestRunner().run(test).failed == 0 for test in found)
