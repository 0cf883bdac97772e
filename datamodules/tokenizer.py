"""A model's tokenizer: loading it, training one, and its digest."""

import hashlib
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info
from peft import PeftConfig
from tokenizers import ByteLevelBPETokenizer, Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file, find_adapter_config_file

from pacmr_lightning.errors import UserError
from pacmr_lightning.files import expanded
from pacmr_lightning.policy.hub_access import locate, pretrained

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
SMALLEST = 256 + 3
"""All bytes and the special tokens, so that any text can be encoded."""


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Return a tokenizer from a folder or the Hub, an adapter's own or its base's; EOS pads if need be."""
    name = str(expanded(name))
    place, base = locate(name), None
    with suppress(OSError, ValueError):  # loading the tokenizer reports the error
        if find_adapter_config_file(place) is not None:
            base = PeftConfig.from_pretrained(place).base_model_name_or_path
    if base and not any(_holds(name, file) for file in ("tokenizer_config.json", "tokenizer.json")):
        rank_zero_info(f"The adapter {name} has no tokenizer; that of its base {base} is used.")
        return load_tokenizer(base)
    tokenizer = pretrained(AutoTokenizer, name, "tokenizer")
    if base:
        own = "tokenizer and chat template are used, not those"
        if tokenizer.chat_template is None and _holds(base, "tokenizer_config.json"):
            own = "tokenizer is used, with the chat template"
            tokenizer.chat_template = AutoTokenizer.from_pretrained(base).chat_template
        rank_zero_info(f"The adapter {name}'s own {own} of its base {base}.")
    if tokenizer.eos_token_id is None:
        raise UserError(f"The tokenizer {name!r} has no EOS token, which ends a response; set its eos_token.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that restores every text exactly, and adds BOS but never EOS."""
    if vocab_size < SMALLEST:
        raise UserError(
            f"vocab_size is {vocab_size}, but a byte-level tokenizer needs at least {SMALLEST} tokens."
        )
    special = [BOS, EOS, PAD]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=special
    )
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        # True removes the space before punctuation when decoding.
        clean_up_tokenization_spaces=False,
    )


def _holds(place: str, file: str) -> bool:
    try:
        return cached_file(place, file, _raise_exceptions_for_missing_entries=False) is not None
    except OSError:
        return False


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the tokenizer's saved files, the same in every process and after any use."""
    digest = hashlib.sha256()
    for name in ("is_local", "local_files_only"):  # how it was loaded, which HF_HUB_OFFLINE changes
        tokenizer.init_kwargs.pop(name, None)
    # Padding and truncation of an earlier call would be saved; a plain call resets them.
    tokenizer("", verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file():
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
