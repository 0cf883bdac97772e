"""Training pairs of a source, tokenized for a model that was trained elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError

from .tokenization import summary_line, token_warnings, tokenize_pairs
from .tokenized_pairs import TokenizedPairs
from .tokenizer import load_tokenizer


class TokenizedSource:
    """Tokenized pairs with their labels as found.

    Args:
        rows: of the source.
        name: of the source.
        tokenizers: folders or Hub ids of models; the first with a tokenizer is used.
        max_length: tokens of a prompt with its longer response; longer pairs are left out.

    Attributes:
        rows: as given.
        train_pairs: N pairs that are kept.
        annotators: by id; None if no row has one.
    """

    def __init__(self, rows: Dataset, name: str, tokenizers: Sequence[str], max_length: int):
        self.rows = rows
        encodes = _first_tokenizer(tokenizers)
        print(f"Tokenizer and chat template: {encodes.name_or_path}")
        tokens, counts = tokenize_pairs(rows, encodes, max_length)
        print(summary_line(name, "audited", counts))
        for sentence in token_warnings(encodes, rows, counts, name):
            print(sentence)
        self.train_pairs = TokenizedPairs(tokens, encodes.pad_token_id)
        names = dict(zip(rows["id"][:], rows["annotator"][:], strict=True))
        self.annotators = names if any(name is not None for name in names.values()) else None


def _first_tokenizer(names: Sequence[str]) -> PreTrainedTokenizerBase:
    for name in names[:-1]:
        try:
            return load_tokenizer(name)
        except UserError:  # a model saved without one, or an adapter's base moved
            continue
    return load_tokenizer(names[-1])
