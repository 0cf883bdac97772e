"""Fixtures of tests/ that experiments need, too."""

from tests.conftest import inside, pytest_collection_finish, tiny_llama, tiny_tokenizer_folder
from tests.pacmr_lightning.conftest import make_batch, make_policy, save_model
from tests.pacmr_lightning.sweep.conftest import world, write_sweep

__all__ = [
    "inside",
    "make_batch",
    "make_policy",
    "pytest_collection_finish",
    "save_model",
    "tiny_llama",
    "tiny_tokenizer_folder",
    "world",
    "write_sweep",
]
