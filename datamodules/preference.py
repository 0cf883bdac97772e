"""The LightningDataModule: source -> tokens -> noise -> pairs held out or ordered -> reference -> batches."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import numpy as np
from datasets import Dataset
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.batch import PairBatch, TrainingBatch
from pacmr_lightning.errors import UserError, check_at_least, check_choice, check_is, check_within
from pacmr_lightning.evaluation.answer_store import content_key
from pacmr_lightning.evaluation.prompt_batch import PromptBatch
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.weighting.audited import AuditTable

from .augmentation.augmented_prompts import read_augmentations
from .evaluation_prompts import EvaluationPrompt, draw_prompts, prompt_loader
from .hub import pairs_of
from .noise.base import LabelNoise, SymmetricNoise
from .noise.groups import AnnotatorNoise
from .sampling import stratified_sample
from .sources import DEFAULT_SEED, Source
from .stream import EvaluationStream, RankSteps, StepLoader, TrainingStream, check_rank_shares
from .token_report import NO_AUGMENTED_PROMPT, summary_line, token_warnings
from .tokenization import OWN_NUMBERS, Tokenization, tokenize_pairs
from .tokenized_pairs import TokenizedPairs, check_model, row_bytes, tokens_digest
from .tokenizer import load_tokenizer

_TEXTS = "texts of the training pairs"
"""Name of their hash in ``fit_options``."""

AskedReference = Literal["live", "cached"]


class PreferenceDataModule(LightningDataModule):
    """Preference pairs, tokenized, noised and paired with meta-batches; evaluation prompts for generation.

    ``train_dataloader`` yields ``TrainingBatch``, ``val_dataloader`` and ``test_dataloader`` yield
    ``PairBatch`` (validation pairs, labels never flipped), ``predict_dataloader`` yields ``PromptBatch``. A
    pair's augmented prompt comes from the file ``augmentations``; without one from the row's
    ``augmented_prompt``, else from rules.

    Args:
        source: where the pairs come from; in Python also a file or Hub id, as in ``pairs_of``.
        tokenizer: a model's folder or Hub id.
        max_length: tokens of a prompt with its longer response; longer pairs are dropped and counted.
        tokenization: "openrlhf" for OpenRLHF's rules: no BOS but that of a text or template, a space and EOS
            after a response, long responses cut at max_length, prompts over max_length - 3 dropped.
        global_batch_size: pairs of an optimizer step, over all ranks.
        validation_batch_size: pairs (or prompts, for predict) of an evaluation step, over all ranks.
        meta_every: optimizer steps between two meta-batches (the weighting's ``every``); None for no
            meta-batches.
        meta_batch_size: pairs of a meta-batch, over all ranks.
        noise_rate: probability that a training label is flipped, in [0, 1): short for ``SymmetricNoise``.
        noise: any kind of noise instead.
        noise_seed: which labels are flipped.
        seed: order of the pairs.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        task: a name for the run's folder and summary.
        clean_meta: a source whose training pairs have clean labels, for meta-batches of those instead of
            augmented training pairs (the weighting's outer objective has to fit). Training leaves these pairs
            out, by id or texts.
        augmentations: Parquet file of ``pacmr augment``, whose prompts' pairs are then those of meta-batches;
            read where meta-batches are training pairs under augmented prompts.
        reference: "live" computes the reference's log-probabilities with each batch, "cached" those of all
            pairs before training, on disk for every later run with the same model and pairs.
        predict_prompts: prompts to answer, drawn from those of the source; None, or too many, for all.
        predict_seed: which prompts are drawn.
        predict_max_length: tokens of a prompt to answer; longer ones are left out and counted.
        curriculum: ``pairs.parquet`` of ``pacmr audit --scorer dpo`` of a run on these pairs and labels: the
            easiest are trained on in each epoch, from easy to difficult; None for all, shuffled.
        curriculum_share: of the training pairs that are the easiest, above 0 and at most 1.
        validation_sample: validation pairs to take, the same in each run; None, or too many, for all.

    Raises:
        UserError: an option is out of range. Later: the data or the tokenizer cannot be used.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: str,
        max_length: int = 768,
        tokenization: Tokenization = "default",
        global_batch_size: int = 32,
        validation_batch_size: int = 32,
        meta_every: int | None = None,
        meta_batch_size: int = 64,
        noise_rate: float = 0.0,
        noise: LabelNoise | None = None,
        noise_seed: int = 42,
        seed: int = 42,
        num_workers: int = 0,
        task: str = "preferences",
        clean_meta: Source | None = None,
        augmentations: str | None = None,
        reference: AskedReference = "live",
        predict_prompts: int | None = 800,
        predict_seed: int = 42,
        predict_max_length: int = 4096,
        curriculum: str | None = None,
        curriculum_share: float = 0.5,
        validation_sample: int | None = None,
    ):
        super().__init__()
        source, clean_meta = pairs_of(source), clean_meta and pairs_of(clean_meta)
        check_at_least(2, **{"max_length (tokens of prompt and response)": max_length})
        check_at_least(1, global_batch_size=global_batch_size, validation_batch_size=validation_batch_size)
        check_at_least(1, predict_prompts=predict_prompts, predict_max_length=predict_max_length)
        check_at_least(1, validation_sample=validation_sample, meta_batch_size=meta_batch_size)
        check_at_least(1, **{"meta_every (the weighting's every)": meta_every})
        check_at_least(0, num_workers=num_workers)
        if clean_meta is not None and meta_every is None:
            raise UserError(
                f"clean_meta is {clean_meta.name}, but the weighting has no meta-batch; give one that "
                "has (VNetWeighting with CleanPreference), or remove clean_meta."
            )
        check_is((LabelNoise, type(None)), "a LabelNoise, such as SymmetricNoise(0.3)", noise=noise)
        check_within("(0, 1]", curriculum_share=curriculum_share)
        if curriculum is None and curriculum_share != 0.5:
            raise UserError(
                f"curriculum_share is {curriculum_share}, but there is no curriculum; give pairs.parquet of "
                "an audit, or leave it out."
            )
        self.source = source
        self.gold_reward = source.gold_reward
        """r(prompt, response) of the source, or None if unknown."""
        self.tokenizer_name = str(tokenizer)
        self.max_length = max_length
        check_choice(Tokenization, tokenization=tokenization)
        self.tokenization = tokenization
        self.global_batch_size = global_batch_size
        self.validation_batch_size = validation_batch_size
        self.meta_every = meta_every
        self.meta_batch_size = meta_batch_size
        if noise is not None and noise_rate:
            raise UserError("noise_rate and noise are given together; take out one of them.")
        self.noise = noise = SymmetricNoise(noise_rate) if noise_rate else noise
        self.uniform_noise = noise is None or noise.rate is not None
        """True if all pairs have the same flip probability."""
        self.noise_rate = 0.0 if noise is None or noise.rate is None else noise.rate
        """That probability; otherwise the share of flipped pairs after ``setup("fit")``."""
        self.noise_seed = noise_seed
        self.seed = seed
        self.num_workers = num_workers
        self.task = task
        self.clean_meta = clean_meta
        self.augmentations = augmentations
        check_choice(AskedReference, reference=reference)
        self.reference = reference
        self.predict_prompts = predict_prompts
        self.predict_seed = predict_seed
        self.predict_max_length = predict_max_length
        self.curriculum = curriculum
        self.curriculum_share = curriculum_share
        self.validation_sample = validation_sample
        self.trained_options: dict[str, Any] = {}
        """``fit_options`` of a run under inspection; ``setup`` compares the texts."""
        self.counts: dict[str, dict[str, int]] = {}
        """Counts after ``setup``, by split: ``rows``, ``kept``, ``flipped``, those left out by reason."""
        self.noise_flips: dict[str, bool] | None = None
        """After ``setup("fit")``, by id of the training rows: whether the noise flips the label."""
        self.noise_texts: dict[str, str] = {}
        """Hashes of their texts."""
        self.annotators: dict[str, str | None] | None = None
        """After ``setup("fit")``, annotators by id of the training rows; None alone if all are unknown."""
        self.clean_pairs: TokenizedPairs | None = None
        """Kept pairs after ``setup``, as the following two."""
        self.train_pairs: TokenizedPairs | None = None
        self.validation_pairs: TokenizedPairs | None = None
        self._filled: dict[str, tuple[Dataset, Dataset, dict[str, int]]] = {}
        self._said: set[str] = set()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded on first access."""
        return load_tokenizer(self.tokenizer_name)

    def prepare_data(self) -> None:
        """Fill datasets' caches from one process, so that the others read them."""
        if not self._predicts:
            splits = ["train", "validation"] + ["clean_meta"] * (self.clean_meta is not None)
            self._filled = {split: self._read(split) for split in splits}
        elif self.source.prompts is None:
            self.source.load("validation")

    def setup(self, stage: str) -> None:
        """Load training pairs for ``fit``, validation pairs, nothing for ``predict``."""
        check_rank_shares("global_batch_size", self.global_batch_size, self._ranks[1])
        if stage == TrainerFn.FITTING and self.train_pairs is None:
            if self.clean_meta is not None:
                self.clean_pairs = self._pairs_as_found("clean_meta", self.clean_meta.name)
            self.train_pairs = self._training_pairs()
            if not self.uniform_noise:
                self.noise_rate = sum(self.train_pairs.swapped) / max(1, len(self.train_pairs))
            if self.trained_options.get(_TEXTS) not in (None, self._texts_digest):
                raise UserError(
                    f"The texts of {self.source.name} differ from those of the run; restore "
                    "them, or use pacmr audit with a model, which takes any pairs."
                )
            if self.trainer is not None:
                self._training_stream()  # refuses too few pairs before the model is loaded
                rank_zero_info(self._epoch_line())
                self._warn_of_rules()
        if self.validation_pairs is None and stage != TrainerFn.PREDICTING:
            self.validation_pairs = self._sampled(self._pairs_as_found("validation", self.source.name))

    def _read(self, split: str) -> tuple[Dataset, Dataset, dict[str, int]]:
        if split in self._filled:
            return self._filled.pop(split)
        if split == "clean_meta":
            assert self.clean_meta is not None
            raw = self.clean_meta.load_all()
        else:
            raw = self.source.load("train" if split == "train" else "validation")
        views = None
        # Augmented prompts are needed only for meta-batches of training pairs.
        if split == "train" and self.augmentations is not None and self._rewords:
            views = read_augmentations(self.augmentations)
        options = (self.tokenizer, self.max_length, views, self.tokenization)
        rows, counts = tokenize_pairs(raw, *options, f"{split} pairs")
        if views is not None and counts[NO_AUGMENTED_PROMPT] == len(rows):
            raise UserError(
                f"augmentations is {self.augmentations}, but none of its prompts augments a training pair of "
                f"{self.source.name}; write augmented prompts for these with pacmr augment."
            )
        return raw, rows, counts

    @property
    def _rewords(self) -> bool:
        return self.meta_every is not None and self.clean_meta is None

    def _pairs_as_found(self, split: str, name: str) -> TokenizedPairs:
        raw, rows, counts = self._read(split)
        self._announce(name, split, raw, rows, counts)
        pairs = TokenizedPairs(rows, self.tokenizer.pad_token_id)
        better = np.flatnonzero(~pairs.ties).tolist()
        if len(better) == len(pairs) or (split == "validation" and not better):
            return pairs
        if not better:
            raise UserError(f"All {len(pairs):,} pairs of clean_meta are ties; give pairs with a preference.")
        rank_zero_info(
            f"{name}, {split}: {len(pairs) - len(better):,} of {len(pairs):,} pairs are ties, "
            "of which no response is better; they are left out."
        )
        return pairs.select(better)

    def _sampled(self, pairs: TokenizedPairs) -> TokenizedPairs:
        if (size := self.validation_sample) is None or size >= len(pairs):
            return pairs
        rank_zero_info(f"{self.source.name}, validation: a sample of {size:,} of {len(pairs):,} pairs.")
        names = [f"validation {name}" for name in pairs.rows["id"][:]]
        return pairs.select(stratified_sample(names, [None] * len(names), size, DEFAULT_SEED))

    def _warn_of_rules(self) -> None:
        """Warn if VNet learns from prompts with rule-based rewording."""
        assert self.train_pairs is not None
        if self._rewords and (count := sum(self.train_pairs.rows["by_rules"][:])):
            rank_zero_warn(
                f"VNet learns from {count:,} prompts of {self.source.name} with rule-based "
                "rewording, which changes the surface only; Qu et al. translate them to Chinese and back: "
                "run pacmr augment with BackTranslation, and give its file as --data.augmentations."
            )

    def _training_pairs(self) -> TokenizedPairs:
        raw, rows, counts = self._read("train")
        ids = rows["id"][:]
        swapped = None
        if self.noise is not None:
            self.noise_flips = self.noise.flips(raw, self.noise_seed)
            swapped = [self.noise_flips[name] for name in ids]
            self.noise_texts = dict(zip(raw["id"][:], raw["texts"][:], strict=True))
        known = raw["annotator"][:]
        if isinstance(self.noise, AnnotatorNoise):
            known = self.noise.annotators(raw)
        who = None
        if any(name is not None for name in known):
            self.annotators = dict(zip(raw["id"][:], known, strict=True))
            who = [self.annotators[name] for name in ids]
        # The reference cache covers all pairs, so that runs with and without held-out pairs share it.
        self._all_train_pairs = pairs = TokenizedPairs(rows, self.tokenizer.pad_token_id, swapped, who)
        self._kept = list(range(len(pairs)))
        if self.clean_pairs is not None:
            ours, clean = _contents(rows), _contents(self.clean_pairs.rows)
            held_out = dict(zip(self.clean_pairs.rows["id"][:], clean, strict=True))
            self._check_held_out(dict(zip(ids, ours, strict=True)), held_out)
            texts = set(clean)  # made ids of a pair with the other label differ
            self._kept = [i for i, name in enumerate(ids) if name not in held_out and ours[i] not in texts]
            pairs = pairs.select(self._kept)
            counts["in clean_meta"] = len(rows) - len(pairs)
        counts["flipped"] = int(np.logical_and(pairs.swapped, ~pairs.ties).sum())
        if self.curriculum is not None:
            easiest = _easiest_first(self.curriculum, pairs)[: int(self.curriculum_share * len(pairs))]
            counts["easiest"] = len(easiest)
            self._kept = [self._kept[i] for i in easiest]
            pairs = pairs.select(easiest)
        self._announce(self.source.name, "train", raw, rows, counts)
        return pairs

    def _check_held_out(self, ours: dict[str, Any], clean: dict[str, Any]) -> None:
        """Refuse clean pairs with the ids of training pairs and other texts; labels may differ."""
        shared = ours.keys() & clean.keys()
        if other := sorted(name for name in shared if ours[name] != clean[name]):
            raise UserError(
                f"clean_meta has the id {other[0]!r} of a training pair with other texts ({len(other)} of "
                f"{len(shared)} common ids), so it cannot be held out; give clean pairs of these data, or "
                "other ids."
            )

    def _announce(self, name: str, split: str, raw: Dataset, rows: Dataset, counts: dict[str, int]) -> None:
        self.counts[split] = counts
        rank_zero_info(summary_line(name, split, counts))
        for sentence in token_warnings(self.tokenizer, raw, rows, f"{name}, {split}"):
            if sentence not in self._said:
                rank_zero_info(sentence)
            self._said.add(sentence)

    def _epoch_line(self) -> str:
        assert self.train_pairs is not None
        line = f"An epoch: {_batches(len(self.train_pairs), self.global_batch_size, 'update')}"
        if self.meta_every is not None:
            meta = len(self.clean_pairs or self.train_pairs.with_augmented_prompt)
            line += f"; an epoch of meta-batches: {_batches(meta, self.meta_batch_size, 'batch')}"
        return f"{line}."

    def longest_pairs(self, count: int) -> PairBatch:
        """Return the longest training pairs, or those of meta-batches if they are longer, longest first."""
        assert self.train_pairs is not None
        batches = [self.train_pairs.longest(count)]
        if self.clean_pairs is not None:
            batches.append(self.clean_pairs.longest(count))
        elif self._rewords:
            batches.append(self.train_pairs.longest(count, augmented=True))
        return max(batches, key=lambda batch: batch.token_count)

    def check_model(self, policy: PolicyModel) -> None:
        """Check the policy on the loaded pairs (``tokenized_pairs.check_model``)."""
        splits = (self.train_pairs, self.validation_pairs, self.clean_pairs)
        check_model(policy, *(pairs for pairs in splits if pairs is not None))

    def fill_reference(self, policy: PolicyModel) -> None:
        """Set the reference log-probabilities of training pairs and meta-batches for ``reference: cached``.

        Validation needs the reference's logits for the KL, so it runs the reference itself.
        """
        self.check_model(policy)
        if self.reference == "live":
            return
        assert self.train_pairs is not None
        everything, trainer = self._all_train_pairs, self.trainer
        self.train_pairs.reference = everything.reference_log_probs(policy, trainer=trainer)[self._kept]
        if self.clean_pairs is not None:
            self.clean_pairs.reference = self.clean_pairs.reference_log_probs(policy, trainer=trainer)
        elif self.meta_every is not None:
            log_probs = everything.reference_log_probs(policy, augmented=True, trainer=trainer)
            self.train_pairs.augmented_reference = log_probs[self._kept]

    def fill_train_reference(self, policy: PolicyModel) -> None:
        """Set those of the training pairs whatever ``reference`` is, for a tool in one process."""
        assert self.train_pairs is not None
        self.train_pairs.reference = self._all_train_pairs.reference_log_probs(policy)[self._kept]

    def train_state_differences(self, policy: PolicyModel) -> np.ndarray:
        """Return (N, H) reference states, chosen minus rejected as trained; cached on disk."""
        return self._all_train_pairs.state_differences(policy)[self._kept]

    @property
    def _ranks(self) -> tuple[int, int]:
        """Rank and number of processes; (0, 1) without a trainer."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def train_dataloader(self) -> DataLoader[TrainingBatch]:
        """Return ``TrainingBatch`` of this rank, from the trainer's global step on."""
        batches = self._training_stream()
        return self._loader(batches, lambda: 0 if self.trainer is None else self.trainer.global_step)

    def _training_stream(self) -> TrainingStream:
        assert self.train_pairs is not None, "The training pairs are there after setup."
        rank, world_size = self._ranks
        return TrainingStream(
            self.train_pairs,
            self.global_batch_size,
            seed=self.seed,
            meta_every=self.meta_every,
            meta_batch_size=self.meta_batch_size,
            clean_meta=self.clean_pairs,
            shuffle=self.curriculum is None,
            rank=rank,
            world_size=world_size,
        )

    def val_dataloader(self) -> DataLoader[PairBatch]:
        """Return ``PairBatch`` of this rank, validation pairs in their own order."""
        assert self.validation_pairs is not None, "The validation pairs are there after setup."
        batches = EvaluationStream(self.validation_pairs, self.validation_batch_size, *self._ranks)
        return self._loader(batches, lambda: 0)

    def test_dataloader(self) -> DataLoader[PairBatch]:
        """Return the validation batches."""
        return self.val_dataloader()

    def _loader(
        self, batches: TrainingStream | EvaluationStream, first: Callable[[], int]
    ) -> DataLoader[Any]:
        return StepLoader(
            batches,
            batch_size=None,
            sampler=RankSteps(len(batches), first),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    @property
    def _predicts(self) -> bool:
        return self.trainer is not None and self.trainer.state.fn == TrainerFn.PREDICTING

    def predict_dataloader(self) -> DataLoader[PromptBatch]:
        """Return ``PromptBatch`` of the drawn prompts; the longest first if the trainer predicts."""
        world_size = self._ranks[1]
        return prompt_loader(
            self._prompts,
            self.tokenizer,
            tokenization=self.tokenization,
            max_length=self.predict_max_length,
            batch_size=max(1, self.validation_batch_size // world_size),
            world_size=world_size,
            longest_first=self._predicts,
        )

    @cached_property
    def _prompts(self) -> list[EvaluationPrompt]:
        """Drawn prompts, which several callbacks answer."""
        if self.source.prompts is not None and self.tokenizer.chat_template is not None:
            rank_zero_info(f"The prompts of {self.source.name} are texts, read without the chat template.")
        return draw_prompts(self.source, self.predict_prompts, self.predict_seed)

    @cached_property
    def _texts_digest(self) -> str:
        """Hash of the tokens of all training pairs, held out or not, before noise."""
        return self._all_train_pairs.texts_digest()[:12]

    def fit_options(self) -> dict[str, Any]:
        """Return the options and hashes that, with the trainer's global step, determine a step's pairs."""
        pairs = self.train_pairs
        assert pairs is not None, "The training pairs are there after setup."
        sizes = ("max_length", "global_batch_size", "meta_every", "meta_batch_size")
        options = {
            f"data.{name}": getattr(self, name) for name in (*sizes, "noise_rate", "noise_seed", "seed")
        }
        labels = [list(pairs.rows[name]) for name in ("id", "flipped", *OWN_NUMBERS)]
        views = tokens_digest(pairs.rows, "augmented_ids") if self._rewords else None
        others = {"pairs of clean_meta": self.clean_pairs, "validation pairs": self.validation_pairs}
        hashes = {name: other.texts_digest() for name, other in others.items() if other is not None}
        of_labels = "ids, labels, order or augmented prompts of the training pairs"
        hashes |= {
            _TEXTS: self._texts_digest,
            "flipped labels of the training pairs": content_key(pairs.swapped),
            of_labels: content_key(labels, pairs.annotators, views),
        }
        return options | {name: value[:12] for name, value in hashes.items()}


def _contents(rows: Dataset) -> list[tuple[bytes, ...]]:
    """Return each pair's prompt and responses as tokens, whichever response is chosen."""
    tokens = row_bytes(rows, "prompt_ids", "chosen_ids", "rejected_ids")
    return [(prompt, *sorted(sides)) for prompt, *sides in tokens]


def _easiest_first(audit: str, pairs: TokenizedPairs) -> list[int]:
    """Return indices of N training pairs by rising DPO loss of policies that have not seen them."""
    table = AuditTable(audit, "cross_fit_u")
    table.check(pairs)
    column = table.rows.set_index("id")["cross_fit_u"]
    if column.isna().any():
        raise UserError(
            f"The audit {audit} has no cross-fitted u, by which pairs are easy or difficult; audit the run "
            "with --scorer dpo."
        )
    # The loss falls with u. Ties keep the order of the data.
    u = column.loc[pairs.rows["id"][:]].tolist()
    return sorted(range(len(u)), key=lambda i: -u[i])


def _batches(pairs: int, size: int, name: str) -> str:
    whole, left = divmod(pairs, size)
    counted = f"{whole} {name}{('' if whole == 1 else 's' if name == 'update' else 'es')} of {size} pairs"
    return f"{counted}, {left} of {pairs} pairs left out" if left else counted
