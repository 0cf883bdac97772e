"""Translation in one direction with a sequence-to-sequence model of transformers."""

import re
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pacmr_lightning.errors import UserError, first_line
from pacmr_lightning.files import expanded
from pacmr_lightning.policy.hub_access import locate, model_state

from .loops import loops

EMPTY = "nothing came back"
ENDLESS = "the translation did not end"
REPEATED = "the translation repeats itself"

_ROOM = (4, 32)
"""Token limit of a translation: factor and addend to its source's tokens; few need half of that."""
_CODE = re.compile(r">>\w+<<")


class Translator:
    """A translation model, loaded on first use; ``option`` is the name of its option in errors.

    ``prefix`` begins every text; None: ``code``, the target language, where the model has that token.
    """

    def __init__(self, name: str, prefix: str | None, code: str, option: str, device: str, dtype: str):
        self.name: str = expanded(name)
        self._prefix = prefix
        self._code = code
        self._option = option
        self._dtype = dtype
        self._device = _device(device)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that a translation depends on beside the decoding; folders are identified by content."""
        self.config  # noqa: B018 - says what is wrong with the name
        revision = model_state(self.name)
        if revision is not None and Path(self.name).is_dir():
            revision = revision[:16]
        return {"model": self.name, "revision": revision, "prefix": self.prefix, "dtype": self._dtype}

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's configuration."""
        config = self._load(AutoConfig)
        if not config.is_encoder_decoder:
            raise UserError(
                f"{self._option} is {self.name!r}, a {config.model_type} model, which does not translate; "
                "name a sequence-to-sequence model."
            )
        return config

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        self.config  # noqa: B018 - says what is wrong with the name
        with warnings.catch_warnings():
            # For a normalization that the tokenizer does not use.
            warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
            return self._load(AutoTokenizer)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, ready to generate."""
        self.config  # noqa: B018 - says what is wrong with the name
        model = self._load(AutoModelForSeq2SeqLM, dtype=self._dtype).eval()
        model.to(self._device)
        # A forced end would hide unfinished translations; max_new_tokens is the limit.
        model.generation_config.forced_eos_token_id = None
        model.generation_config.max_length = None
        return model

    def _load(self, factory: Any, **options: Any) -> Any:
        try:
            return factory.from_pretrained(locate(self.name), **options)
        except UserError as error:
            raise UserError(f"{self._option}: {error}") from None
        except (ImportError, OSError, ValueError) as error:
            raise UserError(
                f"{self._option} is {self.name!r}, but it could not be loaded ({first_line(error)}); give a "
                "model's folder or Hub id, and install pacmr-lightning[augment]."
            ) from None

    @cached_property
    def positions(self) -> int:
        """The most tokens that the model can read or write."""
        config = self.config.to_dict()
        sizes = [config.get(name) for name in ("max_position_embeddings", "n_positions")]
        return min(self.tokenizer.model_max_length, *(size for size in sizes if size is not None))

    @cached_property
    def prefix(self) -> str:
        """The beginning of every text."""
        if self._prefix is not None:
            return self._prefix
        codes = sorted(filter(_CODE.fullmatch, self.tokenizer.get_vocab()))
        if codes and self._code not in codes:
            raise UserError(
                f"{self._option} is {self.name!r}, which has several target languages "
                f"({', '.join(codes[:20])}); choose one with {self._option}_prefix."
            )
        return f"{self._code} " if codes else ""

    def fits(self, text: str, limit: int) -> bool:
        """Return whether a text, with prefix and special tokens, has at most ``limit`` tokens."""
        # A token has at least one ASCII character; tokenizing takes much longer.
        if text.isascii() and len(text) + self._overhead <= limit:
            return True
        return len(self.tokenizer(self.prefix + text, verbose=False)["input_ids"]) <= limit

    @cached_property
    def _overhead(self) -> int:
        # SentencePiece puts a space before a text.
        return len(self.tokenizer(self.prefix)["input_ids"]) + 1

    @torch.inference_mode()
    def translate(self, texts: Sequence[str], num_beams: int = 4) -> list[tuple[str, str | None]]:
        """Return translations of N texts of at most ``positions`` tokens, each with its problem or None."""
        if not texts:
            return []
        inputs = self.tokenizer([self.prefix + text for text in texts], padding=True, return_tensors="pt")
        ids, mask = (inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask"))
        times, more = _ROOM
        room = min(times * ids.shape[1] + more, self.positions - 1)
        try:
            # The loaded classes have generate; PreTrainedModel, the declared type, does not.
            found = self.model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=room,
                num_beams=num_beams,
                do_sample=False,
            )
        except torch.OutOfMemoryError:
            raise UserError(
                f"{len(texts)} pieces of {ids.shape[1]} tokens do not fit into the memory of "
                f"{self.model.device}; lower batch_size and run again: what is done is kept."
            ) from None
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        results = []
        for source, row in zip(texts, found[:, 1:].tolist(), strict=True):
            end = next((i for i, token in enumerate(row) if token in ends), None)
            decoded = self.tokenizer.decode(row[:end], skip_special_tokens=True)
            assert isinstance(decoded, str)  # of one row
            text = decoded.strip()
            problem = ENDLESS if end is None else EMPTY if not text else None
            results.append((text, REPEATED if loops(text, source) else problem))
        return results


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device is {name!r}, which does not work here ({first_line(error)}); give auto, cpu, cuda "
            "or the like."
        ) from None
