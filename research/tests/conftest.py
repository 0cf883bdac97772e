"""Fixtures of tests/ that experiments need, too."""

from tests.conftest import pytest_collection_finish, tiny_llama, tiny_tokenizer_folder
from tests.pacmr_lightning.sweep.conftest import world, write_sweep

__all__ = ["pytest_collection_finish", "tiny_llama", "tiny_tokenizer_folder", "world", "write_sweep"]
