"""The LightningDataModule for preference pairs."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError
from pacmr_lightning.prompt_batch import PromptBatch

from .noise import check_rate
from .sources import Source
from .stream import PairBatches, PairedBatches, Pairs, RankSteps, check_shares
from .tokenization import NO_SECOND_VIEW, REASONS, load_tokenizer, prompt_tokens, tokenize_pairs


class _StepLoader(DataLoader):
    """A DataLoader over steps; its ``state_dict`` tells Lightning that it can go on in mid-epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is the trainer's global step."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""


class PreferenceDataModule(LightningDataModule):
    """Preference pairs, tokenized, noised and paired with meta batches; evaluation prompts for generation.

    ``train_dataloader`` yields ``PairedBatch``, ``val_dataloader`` and ``test_dataloader`` yield
    ``PairBatch`` (validation pairs, labels never flipped), ``predict_dataloader`` yields ``PromptBatch``.

    The second view of a pair's prompt is its ``augmented_prompt``, or a rule-based rewording where it has
    none.

    Args:
        source: where the pairs come from.
        tokenizer: a model's folder or Hub id.
        max_length: tokens of a prompt with its longer response; longer pairs are dropped and counted.
        global_batch_size: pairs of an optimizer step, over all ranks.
        validation_batch_size: pairs (or prompts, for predict) of an evaluation step, over all ranks.
        meta_every: optimizer steps between two meta batches (the weighting's ``every``); None for no meta
            batches.
        meta_batch_size: pairs of a meta batch, over all ranks.
        noise_rate: probability that a training label is flipped, in [0, 1).
        noise_seed: which labels are flipped.
        seed: order of the pairs.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        task: a name for the run's folder and summary.
        clean_meta: a source whose training pairs have clean labels, for meta batches of those instead of
            reworded training pairs (the weighting's outer objective has to fit). Pairs that are in both, by
            id, are left out of training.

    Attributes:
        counts: after ``setup``, for ``train`` and ``validation``: ``rows``, ``kept``, dropped pairs by
            reason, ``no second view``, and for ``train`` ``flipped`` (labels the noise changed).
        train_pairs: after ``setup("fit")``, the kept training pairs.
        validation_pairs: after ``setup``, the kept validation pairs.

    Raises:
        UserError: an option is out of range. Later: the data or the tokenizer cannot be used.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: str,
        max_length: int = 768,
        global_batch_size: int = 32,
        validation_batch_size: int = 32,
        meta_every: int | None = None,
        meta_batch_size: int = 64,
        noise_rate: float = 0.0,
        noise_seed: int = 42,
        seed: int = 42,
        num_workers: int = 0,
        task: str = "preferences",
        clean_meta: Source | None = None,
    ):
        super().__init__()
        _check_at_least("max_length (tokens of prompt and response)", max_length, 2)
        _check_at_least("global_batch_size", global_batch_size, 1)
        _check_at_least("validation_batch_size", validation_batch_size, 1)
        _check_at_least("meta_batch_size", meta_batch_size, 1)
        _check_at_least("num_workers", num_workers, 0)
        if meta_every is not None:
            _check_at_least("meta_every (the weighting's every)", meta_every, 1)
        check_rate(noise_rate)
        self.source = source
        self.tokenizer_name = tokenizer
        self.max_length = max_length
        self.global_batch_size = global_batch_size
        self.validation_batch_size = validation_batch_size
        self.meta_every = meta_every
        self.meta_batch_size = meta_batch_size
        self.noise_rate = noise_rate
        self.noise_seed = noise_seed
        self.seed = seed
        self.num_workers = num_workers
        self.task = task
        if clean_meta is not None and meta_every is None:
            raise UserError(
                f"clean_meta is {clean_meta.name}, but nothing learns from meta pairs; give a weighting that "
                "does (VNetWeighting with CleanPreference), or take clean_meta out."
            )
        self.clean_meta = clean_meta
        self.clean_pairs: Pairs | None = None
        self.counts: dict[str, dict[str, int]] = {}
        self.train_pairs: Pairs | None = None
        self.validation_pairs: Pairs | None = None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded when first asked for."""
        return load_tokenizer(self.tokenizer_name)

    @property
    def gold_reward(self):
        """r(prompt, response) -> float of the source, or None where nobody knows it."""
        return self.source.gold_reward

    @property
    def _ranks(self) -> dict[str, int]:
        """This process among the trainer's; alone without a trainer (tools that look at the data)."""
        if self.trainer is None:
            return {"rank": 0, "world_size": 1}
        return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}

    def _global_step(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_step

    def prepare_data(self) -> None:
        """Fills datasets' caches from one process, so that the others read them."""
        for split in ("train", "validation"):
            tokenize_pairs(self.source.load(split), self.tokenizer, self.max_length)

    def setup(self, stage: str) -> None:
        """Loads what the stage needs: training pairs for ``fit`` only, validation pairs always.

        Raises:
            UserError: a batch size cannot be shared by the trainer's processes, or no pair is left.
        """
        check_shares("global_batch_size", self.global_batch_size, self._ranks["world_size"])
        if stage == TrainerFn.FITTING and self.train_pairs is None:
            if self.trainer is not None and self.trainer.overfit_batches:
                raise UserError(
                    f"overfit_batches is {self.trainer.overfit_batches}, but it would undo the order of the "
                    "pairs; give a smaller training file and more epochs instead."
                )
            if self.clean_meta is not None:
                self.clean_pairs = self._pairs("clean_meta", 0.0)
            self.train_pairs = self._pairs("train", self.noise_rate)
        if self.validation_pairs is None:
            self.validation_pairs = self._pairs("validation", 0.0)

    def _pairs(self, split: str, noise_rate: float) -> Pairs:
        clean = split == "clean_meta"
        source = self.clean_meta if clean else self.source
        found = source.load("train" if clean else split)
        rows, counts = tokenize_pairs(found, self.tokenizer, self.max_length)
        if split == "train" and self.clean_pairs is not None:
            taken = set(self.clean_pairs.rows["id"])
            kept = [i for i, name in enumerate(rows["id"]) if name not in taken]
            counts["in clean_meta"] = len(rows) - len(kept)
            rows = rows.select(kept, keep_in_memory=True)
        pairs = Pairs(rows, self.tokenizer.pad_token_id, noise_rate, self.noise_seed)
        if split == "train":
            counts["flipped"] = sum(pairs.swapped)
        self.counts[split] = counts
        rank_zero_info(_summary(source.name, split, counts))
        return pairs

    def train_dataloader(self) -> DataLoader:
        """``PairedBatch`` of this rank, beginning at the trainer's global step."""
        batches = PairedBatches(
            self.train_pairs,
            self.global_batch_size,
            seed=self.seed,
            meta_every=self.meta_every,
            meta_batch_size=self.meta_batch_size,
            clean_meta=self.clean_pairs,
            **self._ranks,
        )
        return self._loader(batches, RankSteps(len(batches), self._global_step))

    def val_dataloader(self) -> DataLoader:
        """``PairBatch`` of this rank, validation pairs in their own order."""
        batches = PairBatches(self.validation_pairs, self.validation_batch_size, **self._ranks)
        return self._loader(batches, RankSteps(len(batches), lambda: 0))

    def test_dataloader(self) -> DataLoader:
        """The same batches as for validation."""
        return self.val_dataloader()

    def _loader(self, batches: PairedBatches | PairBatches, steps: RankSteps) -> DataLoader:
        return _StepLoader(
            batches,
            batch_size=None,
            sampler=steps,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def predict_dataloader(self) -> DataLoader:
        """``PromptBatch`` of the source's prompts, else of the validation pairs' distinct prompts.

        Lightning shares them between the ranks, none twice. Prompts longer than ``max_length`` are left out.
        """
        if self.source.prompts is not None:
            prompts = {prompt: f"prompt-{i}" for i, prompt in enumerate(self.source.prompts)}
        else:
            rows = self.validation_pairs.rows
            # Reversed, so that a prompt goes by the id of the first of its pairs.
            prompts = dict(zip(reversed(rows["prompt"][:]), reversed(rows["id"][:]), strict=True))
            prompts = dict(reversed(prompts.items()))
        tokens = prompt_tokens(self.tokenizer, list(prompts))
        rows = [
            (name, prompt, ids)
            for (prompt, name), ids in zip(prompts.items(), tokens, strict=True)
            if 0 < len(ids) < self.max_length
        ]
        pad_id = self.tokenizer.pad_token_id

        def collate(part: list[tuple[str, str, list[int]]]) -> PromptBatch:
            names, texts, ids = zip(*part, strict=True)
            return PromptBatch.collate(names, texts, ids, pad_id=pad_id)

        share = max(1, self.validation_batch_size // self._ranks["world_size"])
        return DataLoader(rows, batch_size=share, collate_fn=collate)

    def state_dict(self) -> dict[str, Any]:
        """What decides which pairs a step gets; not the position, which is the trainer's global step."""
        if self.train_pairs is None:
            return {}
        ids = hashlib.sha256("\n".join(self.train_pairs.rows["id"]).encode()).hexdigest()
        names = ("global_batch_size", "meta_every", "meta_batch_size", "noise_rate", "noise_seed", "seed")
        return {"training pairs": ids[:16]} | {name: self.__dict__[name] for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Checks that a resumed run goes on with the pairs that it began with.

        Raises:
            UserError: training is resumed with other pairs, another order or other noise.
        """
        now = self.state_dict()
        for name, value in state_dict.items():
            if self.trainer.state.fn == TrainerFn.FITTING and now[name] != value:
                raise UserError(
                    f"The checkpoint has {name} {value}, but this run has {now[name]}; resume with "
                    "the same data options, or start a new run."
                )


def _check_at_least(option: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{option} is {value}, but it must be at least {least}.")


def _summary(name: str, split: str, counts: dict[str, int]) -> str:
    """One line on what became of a split's rows."""
    dropped = [f"{counts[reason]} {reason}" for reason in REASONS if reason in counts]
    parts = [f"{counts['kept']} of {counts['rows']} pairs kept"]
    if dropped:
        parts.append(f"dropped: {', '.join(dropped)}")
    if counts.get("flipped"):
        parts.append(f"{counts['flipped'] / counts['kept']:.1%} of labels flipped")
    if counts[NO_SECOND_VIEW] and split == "train":
        parts.append(f"{counts[NO_SECOND_VIEW]} without a second view")
    return f"{name}, {split}: " + "; ".join(parts)
