"""The trained tokenizer keeps its promises in memory and after a save and a load by AutoTokenizer."""

import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from pacmr_lightning.datamodules.tokenizer import train_tokenizer
from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError

TEXTS = [text for row in World().sft_rows(500, 0) for text in row.values()]
HARD = [
    "Describe the ocean in a calm mood:",
    " bright cold deep wild",
    "  two leading spaces, one trailing ",
    "Don 't tidy , this up . I 'm n't",
    "line\n\n\tbreaks\r\n and é, ﬁ, 漢字, 🙂, \u200b, \u0301",
    "",
]


def test_the_trained_tokenizer(tmp_path):
    """In memory, and loaded again."""
    trained = train_tokenizer(TEXTS, vocab_size=420)
    trained.save_pretrained(tmp_path)
    for tokenizer in (trained, AutoTokenizer.from_pretrained(tmp_path)):
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<pad>")
        assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
        for text in HARD:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
        frequent = tokenizer(" bright cold deep wild", add_special_tokens=False)["input_ids"]
        assert len(frequent) == 4 and len(tokenizer) <= 420


@pytest.mark.slow
def test_the_same_texts_give_the_same_tokenizer_in_every_process():
    script = (
        "from pacmr_lightning.datamodules.tokenizer import train_tokenizer;"
        "from pacmr_lightning.embedded_world import World;"
        "texts = [text for row in World().sft_rows(500, 0) for text in row.values()];"
        "print(train_tokenizer(texts, vocab_size=420).backend_tokenizer.to_str())"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == train_tokenizer(TEXTS, vocab_size=420).backend_tokenizer.to_str()


def test_a_vocabulary_that_cannot_hold_all_bytes():
    with pytest.raises(UserError, match=r"vocab_size is 258, but .* at least 259"):
        train_tokenizer(TEXTS, vocab_size=258)
    assert len(train_tokenizer(TEXTS, vocab_size=259)) == 259
