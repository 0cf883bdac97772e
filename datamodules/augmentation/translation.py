"""Back-translation of prompts through Chinese, sentence by sentence."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from pacmr_lightning.errors import check_at_least
from pacmr_lightning.evaluation.answer_store import AnswerStore, content_key

from .rewriter import Rewriter, Rewriting
from .structure import Part, cut, prompt_sentences
from .translator import Translator

TOO_LONG = "longer than the model reads"

_VERSION = 3
"""Part of the settings; raised whenever the same models would give other results."""
# Vocabularies of translation models often lack these.
_QUOTES = str.maketrans("“”„‘’‚", "\"\"\"'''")


class BackTranslation(Rewriter):
    """A rewriter that translates prompts to another language and back.

    Works with two sequence-to-sequence models of transformers whose target language is fixed or set by a
    prefix. Sentences that are too long are cut; those whose translation fails stay as they are and are
    counted. ``batch_size`` and ``device`` change only rounding.

    Args:
        forward: folder or Hub id of the model that translates to the other language.
        backward: folder or Hub id of the model that translates back.
        batch_size: sentences that are translated together.
        num_beams: beams of the search.
        device: where the models run (auto, cpu, cuda, ...); auto is a GPU where there is one.
        dtype: of the models' weights.
        forward_prefix: what texts for the forward model begin with; null is ">>cmn_Hans<< " (simplified
            Chinese) for models that know it, as the default does, and nothing for others.
        backward_prefix: likewise for the backward model; null is ">>eng<< " where it is known.

    Raises:
        UserError: a number is out of range or the device is unknown; in use: a model cannot be loaded.
    """

    method = "back-translation"

    def __init__(
        self,
        forward: str = "Helsinki-NLP/opus-mt-en-zh",
        backward: str = "Helsinki-NLP/opus-mt-zh-en",
        batch_size: int = 32,
        num_beams: int = 4,
        device: str = "auto",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        forward_prefix: str | None = None,
        backward_prefix: str | None = None,
    ):
        check_at_least(1, batch_size=batch_size, num_beams=num_beams)
        self.batch_size = batch_size
        self.num_beams = num_beams
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
        found = []
        for part in cut(text):
            found += prompt_sentences(part.text, self._fits) if part.content else [part]
        return found

    def _fits(self, text: str) -> bool:
        # Half of the positions, because a translation may be longer than its source.
        return self.forward.fits(_plain(text), self.forward.positions // 2)

    def rewrite(self, prompts: Sequence[Sequence[str]], answers: Path) -> dict[str, Rewriting]:
        """Return the back-translation of every piece, with a progress bar."""
        # Pieces of one length together need the least padding.
        pieces = sorted({piece for own in prompts for piece in own}, key=lambda piece: (len(piece), piece))
        found: dict[str, Rewriting] = {}
        with (
            AnswerStore(answers) as store,
            tqdm(total=len(pieces), desc="Back-translating", unit="sentence") as bar,
        ):
            for start in range(0, len(pieces), self.batch_size):
                # A resumed run has the same batches, so it rounds alike.
                batch = pieces[start : start + self.batch_size]
                keys = {piece: content_key(self.method, self.settings, piece) for piece in batch}
                stored = store.get(list(keys.values()))
                found |= {piece: Rewriting(**stored[key]) for piece, key in keys.items() if key in stored}
                missing = [piece for piece in batch if piece not in found]
                new = dict(zip(missing, self._there_and_back(missing), strict=True))
                store.put({keys[piece]: asdict(rewriting) for piece, rewriting in new.items()})
                found |= new
                bar.update(len(batch))
        return found

    def _there_and_back(self, pieces: list[str]) -> list[Rewriting]:
        problems = {piece: TOO_LONG for piece in pieces if not self._fits(piece)}
        texts = {piece: _plain(piece) for piece in pieces}
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


def _plain(text: str) -> str:
    return text.translate(_QUOTES)
