"""Back-translation of prompts through Chinese, sentence by sentence, with two models of transformers."""

import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pacmr_lightning.errors import UserError, check_at_least
from pacmr_lightning.evaluation.answer_store import AnswerStore, content_key
from pacmr_lightning.files import expanded
from pacmr_lightning.policy.hub_access import locate, model_state, pretrained
from pacmr_lightning.policy.positions import positions

from .rewriter import Rewriter, Rewriting, loops
from .structure import Part, cut, prompt_sentences

EMPTY = "nothing came back"
ENDLESS = "the translation did not end"
REPEATED = "the translation repeats itself"
TOO_LONG = "longer than the model reads"

_VERSION = 3
"""Part of the settings; raised whenever the same models would give other results."""
# Vocabularies of translation models often lack these.
_QUOTES = str.maketrans("“”„‘’‚", "\"\"\"'''")
_TIMES, _MORE = 4, 32
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
        self._device = device

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that a translation depends on beside the decoding; folders are identified by content."""
        self.config  # noqa: B018 - says what is wrong with the name
        state = model_state(self.name)
        return {"model": self.name, "revision": state, "prefix": self.prefix, "dtype": self._dtype}

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's configuration."""
        try:
            locate(self.name)
        except UserError as error:
            raise UserError(f"{self._option}: {error}") from None
        config = pretrained(AutoConfig, self.name, self._option)
        if not config.is_encoder_decoder:
            raise UserError(
                f"{self._option} is {self.name!r}, a {config.model_type} model, which does not translate; "
                "name a sequence-to-sequence model."
            )
        return config

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        with warnings.catch_warnings():
            # For a normalization that the tokenizer does not use.
            warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
            return pretrained(AutoTokenizer, self.name, self._option)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, ready to generate."""
        model = pretrained(AutoModelForSeq2SeqLM, self.name, self._option, dtype=self._dtype)
        model.eval().to(self._device)
        # A forced end would hide unfinished translations; max_new_tokens is the limit.
        model.generation_config.forced_eos_token_id = None
        model.generation_config.max_length = None
        return model

    @cached_property
    def positions(self) -> int:
        """The most tokens that the model can read or write."""
        return min(self.tokenizer.model_max_length, positions(self.config) or sys.maxsize)

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
        return len(self.tokenizer(self.prefix + text, verbose=False)["input_ids"]) <= limit

    @torch.inference_mode()
    def translate(self, texts: Sequence[str], num_beams: int = 4) -> list[tuple[str, str | None]]:
        """Return translations of N texts of at most ``positions`` tokens, each with its problem or None."""
        if not texts:
            return []
        inputs = self.tokenizer([self.prefix + text for text in texts], padding=True, return_tensors="pt")
        ids, mask = (inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask"))
        room = min(_TIMES * ids.shape[1] + _MORE, self.positions - 1)
        try:
            # The loaded classes have generate; PreTrainedModel, the declared type, does not.
            outputs = self.model.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask, max_new_tokens=room, num_beams=num_beams, do_sample=False
            )
        except torch.OutOfMemoryError:
            raise UserError(
                f"{len(texts)} pieces of {ids.shape[1]} tokens do not fit into the memory of "
                f"{self.model.device}; lower batch_size and run again: what is done is kept."
            ) from None
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        results = []
        for source, row in zip(texts, outputs[:, 1:].tolist(), strict=True):
            end = next((i for i, token in enumerate(row) if token in ends), None)
            decoded = self.tokenizer.decode(row[:end], skip_special_tokens=True)
            assert isinstance(decoded, str)  # of one row
            text = decoded.strip()
            problem = ENDLESS if end is None else EMPTY if not text else None
            results.append((text, REPEATED if loops(text, source) else problem))
        return results


class BackTranslation(Rewriter):
    """A rewriter that translates prompts to another language and back.

    Works with two sequence-to-sequence models of transformers whose target language is fixed or set by a
    prefix. Sentences that are too long are cut; those whose translation fails stay as they are and are
    counted. ``batch_size`` changes only rounding.

    Args:
        forward: folder or Hub id of the model that translates to the other language.
        backward: folder or Hub id of the model that translates back.
        batch_size: sentences that are translated together.
        num_beams: beams of the search.
        dtype: of the models' weights.
        forward_prefix: what texts for the forward model begin with; null is ">>cmn_Hans<< " (simplified
            Chinese) for models that know it, as the default does, and nothing for others.
        backward_prefix: likewise for the backward model; null is ">>eng<< " where it is known.

    Raises:
        UserError: a number is out of range; in use: a model cannot be loaded.
    """

    method = "back-translation"

    def __init__(
        self,
        forward: str = "Helsinki-NLP/opus-mt-en-zh",
        backward: str = "Helsinki-NLP/opus-mt-zh-en",
        batch_size: int = 32,
        num_beams: int = 4,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        forward_prefix: str | None = None,
        backward_prefix: str | None = None,
    ):
        check_at_least(1, batch_size=batch_size, num_beams=num_beams)
        self.batch_size = batch_size
        self.num_beams = num_beams
        device = str(Fabric(accelerator="auto", devices=1).device)
        self.forward = Translator(forward, forward_prefix, ">>cmn_Hans<<", "forward", device, dtype)
        self.backward = Translator(backward, backward_prefix, ">>eng<<", "backward", device, dtype)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Models with their revisions, decoding and precision."""
        return {
            "version": _VERSION,
            "forward": self.forward.settings,
            "backward": self.backward.settings,
            "num_beams": self.num_beams,
        }

    def parts(self, text: str) -> list[Part]:
        """Split a text into frame and sentences that fit the forward model."""
        parts = []
        for part in cut(text):
            parts += prompt_sentences(part.text, self._fits) if part.content else [part]
        return parts

    def _fits(self, text: str) -> bool:
        # Half of the positions, because a translation may be longer than its source.
        return self.forward.fits(text.translate(_QUOTES), self.forward.positions // 2)

    def rewrite(self, prompts: Sequence[Sequence[str]], answers: Path) -> dict[str, Rewriting]:
        """Return the back-translation of every piece, with a progress bar."""
        # Pieces of one length together need the least padding.
        pieces = sorted({piece for own in prompts for piece in own}, key=lambda piece: (len(piece), piece))
        rewritten: dict[str, Rewriting] = {}
        with (
            AnswerStore(answers) as store,
            tqdm(total=len(pieces), desc="Back-translating", unit="sentence") as bar,
        ):
            for start in range(0, len(pieces), self.batch_size):
                # A resumed run has the same batches, so it rounds alike.
                batch = pieces[start : start + self.batch_size]
                keys = {piece: content_key(self.method, self.settings, piece) for piece in batch}
                stored = store.get(list(keys.values()))
                for piece, key in keys.items():
                    if key in stored:
                        rewritten[piece] = Rewriting.checked(piece, **stored[key])
                missing = [piece for piece in batch if piece not in rewritten]
                new = dict(zip(missing, self._there_and_back(missing), strict=True))
                store.put({keys[piece]: asdict(rewriting) for piece, rewriting in new.items()})
                rewritten |= new
                bar.update(len(batch))
        return rewritten

    def _there_and_back(self, pieces: list[str]) -> list[Rewriting]:
        problems = {piece: TOO_LONG for piece in pieces if not self._fits(piece)}
        texts = {piece: piece.translate(_QUOTES) for piece in pieces}
        self._translate(self.forward, texts, problems)
        for piece, text in texts.items():
            if piece not in problems and not self.backward.fits(text, self.backward.positions):
                problems[piece] = TOO_LONG
        self._translate(self.backward, texts, problems)
        return [Rewriting.checked(piece, texts[piece], problems.get(piece)) for piece in pieces]

    def _translate(self, translator: Translator, texts: dict[str, str], problems: dict[str, str]) -> None:
        left = [piece for piece in texts if piece not in problems]
        results = translator.translate([texts[piece] for piece in left], self.num_beams)
        for piece, (text, problem) in zip(left, results, strict=True):
            texts[piece] = text
            if problem is not None:
                problems[piece] = problem
