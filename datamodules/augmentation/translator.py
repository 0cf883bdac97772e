"""One direction of a translation: a sequence-to-sequence model of transformers, and how it draws tokens."""

from __future__ import annotations

import hashlib
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
    LogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pacmr_lightning.errors import UserError
from pacmr_lightning.model_folder import first_line, model_place, model_state

EMPTY = "nothing came back"
ENDLESS = "the translation did not end"
REPEATED = "the translation repeats itself"

_ROOM = (4, 32)
"""A translation may have so many times the tokens of its source and so many more; few need half of that."""
_LONGEST_CYCLE, _REPEATS = 4, 6
_CODE = re.compile(r">>\w+<<")


class GumbelNoise(LogitsProcessor):
    """Gumbel noise, under which the largest logit is a draw from the softmax.

    A draw depends on the seed and its text alone (up to rounding), so it is the same in every batch and
    order, and after a resume. (transformers' own sampling has one stream of numbers for a whole batch.)
    """

    def __init__(self, texts: Sequence[str], seed: int):
        digests = (hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=8).digest() for text in texts)
        self.generators = [
            torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1) for digest in digests
        ]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return logits with noise."""
        size = scores.shape[-1]
        # -log(E) of an exponential E is Gumbel. Drawn on the CPU, so that it is the same on every device.
        noise = torch.stack([-torch.empty(size).exponential_(generator=g).log() for g in self.generators])
        # To torch's types the sum is no longer a FloatTensor.
        return scores + noise.to(scores)  # type: ignore[return-value]


class Translator:
    """A model that translates, loaded when it is first needed.

    Args:
        name: folder or Hub id of a sequence-to-sequence model with a tokenizer.
        prefix: beginning of every text, such as ``>>fra<<`` for a model with several target languages;
            None: ``code`` where the model knows it, else nothing.
        code: the target language as a token, for ``prefix``.
        option: name in errors of the option that holds ``name``.
        device: where it runs; ``auto`` is an accelerator where there is one.
        dtype: of the weights.

    Raises:
        UserError: the device does not work. Later: there is no such model, it is of another kind, a package
            is missing, or it needs a prefix.
    """

    def __init__(self, name: str, prefix: str | None, code: str, option: str, device: str, dtype: str):
        self.name = str(name)
        self._prefix = prefix
        self._code = code
        self._option = option
        self._dtype = dtype
        self._device = _device(device)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that a translation depends on beside the decoding; a folder is known by its content."""
        self.config  # noqa: B018 - says what is wrong with the name
        place = model_place(self.name) or self.name
        revision = model_state(place)
        if revision is not None and Path(place).is_dir():
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
        # A forced end would hide that a translation did not come to one, and max_new_tokens is the limit.
        model.generation_config.forced_eos_token_id = None
        model.generation_config.max_length = None
        return model

    def _load(self, factory: Any, **options: Any) -> Any:
        place = model_place(self.name)
        if place is None:
            raise UserError(
                f"{self._option} is {self.name!r}, but there is no such folder; give a model's folder or "
                "Hub id."
            )
        try:
            return factory.from_pretrained(place, **options)
        except ImportError as error:
            if "sentencepiece" not in str(error).lower():
                raise
            raise UserError(
                f"The tokenizer of {self.name} needs the sentencepiece package; install it with "
                "pip install 'pacmr-lightning[augment]'."
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self._option} is {self.name!r}, but it could not be loaded ({first_line(error)}); give a "
                "model's folder or Hub id."
            ) from None

    @cached_property
    def positions(self) -> int:
        """Tokens that the model can read, and write, at most."""
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
        # No token is shorter than a character of ASCII; counting takes much longer.
        if text.isascii() and len(text) + self._overhead <= limit:
            return True
        return len(self.tokenizer(self.prefix + text, verbose=False)["input_ids"]) <= limit

    @cached_property
    def _overhead(self) -> int:
        # SentencePiece puts a space before a text.
        return len(self.tokenizer(self.prefix)["input_ids"]) + 1

    @torch.inference_mode()
    def translate(self, texts: Sequence[str], **decoding: Any) -> list[tuple[str, str | None]]:
        """Return translations of N texts of at most ``positions`` tokens each, with what makes one useless.

        Raises:
            UserError: the batch does not fit into memory.
        """
        if not texts:
            return []
        inputs = self.tokenizer([self.prefix + text for text in texts], padding=True, return_tensors="pt")
        ids, mask = (inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask"))
        times, more = _ROOM
        room = min(times * ids.shape[1] + more, self.positions - 1)
        try:
            # AutoModelForSeq2SeqLM's classes generate, but PreTrainedModel, their base, does not.
            found = self.model.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask, max_new_tokens=room, **decoding
            )
        except torch.OutOfMemoryError:
            raise UserError(
                f"{len(texts)} pieces of {ids.shape[1]} tokens do not fit into the memory of "
                f"{self.model.device}; lower batch_size and run again: what is done is kept."
            ) from None
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        results = []
        for row in found[:, 1:].tolist():
            end = next((i for i, token in enumerate(row) if token in ends), None)
            decoded = self.tokenizer.decode(row[:end], skip_special_tokens=True)
            assert isinstance(decoded, str)  # of one row
            text = decoded.strip()
            problem = ENDLESS if end is None else EMPTY if not text else None
            results.append((text, REPEATED if _repeats(row[:end]) else problem))
        return results


def _repeats(ids: list[int]) -> bool:
    """Return whether up to four tokens come over and over again: six times or more in a row."""
    for width in range(1, _LONGEST_CYCLE + 1):
        same = 0
        for before, after in zip(ids, ids[width:], strict=False):
            same = same + 1 if before == after else 0
            if same == (_REPEATS - 1) * width:
                return True
    return False


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
