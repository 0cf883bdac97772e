"""Rows and files for the tests of the datamodules."""

import gzip
import json
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture
def write_rows(tmp_path):
    """Writes rows as JSON Lines and returns the path."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        opener = gzip.open if name.endswith(".gz") else open
        with opener(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return str(path)

    return write


@pytest.fixture
def tokenizer(tiny_tokenizer_folder):
    from pacmr_lightning.datamodules.tokenizer import load_tokenizer

    return load_tokenizer(tiny_tokenizer_folder)


@pytest.fixture
def shared_data():
    """Real rows, where this checkout has them beside it; never part of the repository."""
    if not SHARED.is_dir():
        pytest.skip("the real preference rows are not beside this checkout")
    return SHARED


@pytest.fixture
def pair_rows():
    """Makes pairs with distinct prompts that the rules can reword."""

    def make(count, **columns):
        return [
            {
                "prompt": f"What is the best of {i} books?",
                "chosen": f" I do not know all {i}.",
                "rejected": f" The {i} of rain.",
            }
            | columns
            for i in range(count)
        ]

    return make
