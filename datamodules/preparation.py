"""From a source's rows to the pairs that batches are made of: tokens, label noise, and what is held out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError

from .augmentation.files import read_augmentations
from .curriculum import easiest_first
from .noise import AnnotatorNoise, LabelNoise
from .pairs import Pairs
from .reference_cache import TEXTS, tokens_digest
from .rows import prompts_of
from .sources import Source
from .tokenization import summary_line, token_warnings, tokenize_pairs


class Preparation:
    """Makes ``Pairs`` of a source, and of clean meta pairs beside it.

    Args:
        source: where the pairs come from.
        tokenizer: encodes them.
        max_length: tokens of a prompt with its longer response; longer pairs are dropped and counted.
        noise: which training labels are flipped; None leaves all as found.
        noise_seed: of the noise.
        clean_meta: a source of clean pairs, or None.
        hold_out: leave pairs of ``clean_meta`` out of the training pairs, by id.
        augmentations: file with second wordings of training prompts, or None.
        curriculum: an audit's file by which the training pairs are put from easy to difficult, or None.
        curriculum_share: of them that is kept, the easiest.

    Attributes:
        counts: by split, what became of the rows.
        noise_flips: for each id of the training rows whether the noise flips its label; None before
            ``train`` and where no noise is injected.
        annotators: for each id of the training rows who gave the label, as the row says or as
            ``AnnotatorNoise`` assigns it, None where that is unknown; None before ``train`` and where no row
            has an annotator.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        noise: LabelNoise | None,
        noise_seed: int,
        clean_meta: Source | None,
        hold_out: bool,
        augmentations: str | None,
        curriculum: str | None = None,
        curriculum_share: float = 1.0,
    ):
        self.source = source
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.noise = noise
        self.noise_seed = noise_seed
        self.clean_meta = clean_meta
        self.hold_out = hold_out
        self.augmentations = augmentations
        self.curriculum = curriculum
        self.curriculum_share = curriculum_share
        self.counts: dict[str, dict[str, int]] = {}
        self.noise_flips: dict[str, bool] | None = None
        self.annotators: dict[str, str | None] | None = None
        self._said: set[str] = set()
        self._filled: dict[str, tuple[Dataset, Dataset, dict[str, int]]] = {}

    def fill_caches(self) -> None:
        """Reads and tokenizes everything, so that other processes find it on disk, and this one has it."""
        splits = ["train", "validation"] + ["clean_meta"] * (self.clean_meta is not None)
        self._filled = {split: self._read(split) for split in splits}

    def validation(self) -> Pairs:
        """The validation pairs, labels as found."""
        return self._as_found(self.source, "validation")

    def clean(self) -> Pairs | None:
        """The clean meta pairs, all that the source has."""
        if self.clean_meta is None:
            return None
        return self._as_found(self.clean_meta, "clean_meta")

    def train(self, clean: Pairs | None) -> Pairs:
        """The training pairs under noise, without those of ``clean`` where these are held out.

        Where there is a curriculum they are its easiest, by rising difficulty.
        """
        found, rows, counts = self._split("train")
        swapped = None
        if self.noise is not None:
            self.noise_flips = self.noise.flips(found, self.noise_seed)
            swapped = [self.noise_flips[name] for name in rows["id"][:]]
        known = found["annotator"][:]
        if isinstance(self.noise, AnnotatorNoise):
            known = self.noise.annotators(found)
        who = None
        if any(name is not None for name in known):
            self.annotators = dict(zip(found["id"][:], known, strict=True))
            who = [self.annotators[name] for name in rows["id"][:]]
        self._everything = Pairs(rows, self.tokenizer.pad_token_id, swapped, who)
        held_out = set(clean.rows["id"][:]) if clean is not None and self.hold_out else set()
        self._kept = [i for i, name in enumerate(rows["id"][:]) if name not in held_out]
        pairs = self._everything.select(self._kept) if held_out else self._everything
        if held_out:
            counts["in clean_meta"] = len(rows) - len(pairs)
        counts["flipped"] = sum(pairs.swapped)
        if self.curriculum is not None:
            easiest = easiest_first(self.curriculum, pairs)[: int(self.curriculum_share * len(pairs))]
            counts["easiest"] = len(easiest)
            self._kept = [self._kept[i] for i in easiest]
            pairs = pairs.select(easiest)
        self._announce(self.source, "train", found, counts)
        return pairs

    def train_reference(self, ask: Callable[[Pairs], np.ndarray]) -> np.ndarray:
        """What ``ask`` says of each of the pairs of ``train``, which is asked of those held out too.

        So runs that hold pairs out and runs that do not share a cache.
        """
        return ask(self._everything)[self._kept]

    def texts_digest(self) -> str:
        """Return a hash of the tokens of all training pairs, held out or not, before any noise."""
        return tokens_digest(self._everything.rows, *TEXTS)

    def _split(self, split: str) -> tuple[Dataset, Dataset, dict[str, int]]:
        return self._filled.pop(split) if split in self._filled else self._read(split)

    def _read(self, split: str) -> tuple[Dataset, Dataset, dict[str, int]]:
        """A split as its source has it, its pairs as tokens, and what became of its rows."""
        if split == "train":
            found = self.source.load("train")
            return found, *self._tokenize_training_rows(found)
        if split == "validation":
            found = self.source.load("validation")
        else:
            assert self.clean_meta is not None
            found = self.clean_meta.load_all()
        return found, *self._tokenize(found)

    def _as_found(self, source: Source, split: str) -> Pairs:
        found, rows, counts = self._split(split)
        self._announce(source, split, found, counts)
        return Pairs(rows, self.tokenizer.pad_token_id)

    def _tokenize_training_rows(self, found: Dataset) -> tuple[Dataset, dict[str, int]]:
        if self.augmentations is None:
            return self._tokenize(found)
        views = read_augmentations(self.augmentations)
        if views.keys().isdisjoint(prompts_of(found)):
            raise UserError(
                f"augmentations is {self.augmentations}, but none of its {len(views)} prompts is a training "
                f"prompt of {self.source.name}; make second wordings of these prompts with pacmr augment."
            )
        return self._tokenize(found, views)

    def _tokenize(
        self, found: Dataset, augmentations: dict[str, str] | None = None
    ) -> tuple[Dataset, dict[str, int]]:
        return tokenize_pairs(found, self.tokenizer, self.max_length, augmentations)

    def _announce(self, source: Source, split: str, found: Dataset, counts: dict[str, int]) -> None:
        self.counts[split] = counts
        rank_zero_info(summary_line(source.name, split, counts))
        for sentence in token_warnings(self.tokenizer, found, counts, f"{source.name}, {split}"):
            if sentence not in self._said:
                rank_zero_info(sentence)
            self._said.add(sentence)
