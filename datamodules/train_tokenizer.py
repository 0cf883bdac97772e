"""A small byte-level BPE tokenizer for models that are trained from scratch."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pacmr_lightning.errors import UserError

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
SMALLEST = 256 + 3
"""All bytes and the special tokens, so that any text can be encoded."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that restores every text exactly, and adds BOS but never EOS."""
    if vocab_size < SMALLEST:
        raise UserError(
            f"vocab_size is {vocab_size}, but a byte-level tokenizer needs at least {SMALLEST} tokens."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        # True removes the space before punctuation when decoding.
        clean_up_tokenization_spaces=False,
    )
