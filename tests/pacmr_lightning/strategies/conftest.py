"""The model that the tests of strategies train."""

import pytest

from pacmr_lightning.datamodules import EmbeddedWorld
from pacmr_lightning.datamodules.tokenizer import train_tokenizer

SHAPE = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="session")
def make_base(tmp_path_factory, tiny_llama):
    """Saves a tiny Llama that knows the synthetic benchmark's words, of a width that is given."""
    rows = EmbeddedWorld(pairs=128, validation_pairs=8).load("train")
    tokenizer = train_tokenizer([f"{row['prompt']} {row['chosen']}" for row in rows], vocab_size=400)
    shape = SHAPE | {"vocab_size": len(tokenizer), "initializer_range": 0.3}
    return lambda width: tiny_llama(tmp_path_factory.mktemp("base"), tokenizer, hidden_size=width, **shape)


@pytest.fixture(scope="session")
def base(make_base):
    return make_base(32)
