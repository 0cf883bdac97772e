"""Training pairs of a source, tokenized for a model that was trained elsewhere."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError

from .sources import Source
from .tokenization import summary_line, token_warnings, tokenize_pairs
from .tokenized_pairs import TokenizedPairs
from .tokenizer import load_tokenizer


def tokenized_source(source: Source, tokenizers: Sequence[str], max_length: int) -> TokenizedPairs:
    """Return all training pairs, labels as found, without those of more than ``max_length`` tokens.

    ``tokenizers`` are folders or Hub ids of models; the first with a tokenizer is used.
    """
    rows, name = source.load_all(), source.name
    encodes = _first_tokenizer(tokenizers)
    print(f"Tokenizer and chat template: {encodes.name_or_path}")
    tokens, counts = tokenize_pairs(rows, encodes, max_length)
    print(summary_line(name, "audited", counts))
    for sentence in token_warnings(encodes, rows, counts, name):
        print(sentence)
    names = dict(zip(rows["id"][:], rows["annotator"][:], strict=True))
    who = [names[pair] for pair in tokens["id"][:]]
    return TokenizedPairs(tokens, encodes.pad_token_id, annotators=who if any(names.values()) else None)


def _first_tokenizer(names: Sequence[str]) -> PreTrainedTokenizerBase:
    for name in names[:-1]:
        try:
            return load_tokenizer(name)
        except UserError:  # a model saved without one, or an adapter's base moved
            continue
    return load_tokenizer(names[-1])
