"""The LightningDataModule for preference pairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Literal

import numpy as np
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.errors import UserError
from pacmr_lightning.policy import PolicyModel

from .noise import LabelNoise, label_noise
from .pair_loaders import PairLoaders
from .pairs import Pairs
from .preparation import Preparation
from .prompt_loader import PromptData
from .reference_cache import cached_log_probs, cached_state_differences
from .sources import Source
from .stream import check_shares
from .tokenizer import load_tokenizer


class PreferenceDataModule(PairLoaders, PromptData):
    """Preference pairs, tokenized, noised and paired with meta batches; evaluation prompts for generation.

    ``train_dataloader`` yields ``PairedBatch``, ``val_dataloader`` and ``test_dataloader`` yield
    ``PairBatch`` (validation pairs, labels never flipped), ``predict_dataloader`` yields ``PromptBatch``.

    The second view of a pair's prompt comes from the file ``augmentations``; without one it is the row's
    ``augmented_prompt``, or a rule-based rewording where the row has none.

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
        noise_rates: two probabilities instead, for pairs whose first and whose second response is the chosen
            one, in an order of the two that knows nothing of labels.
        category_noise_rates: probability by category; other categories have ``noise_rate``.
        noise_mask: a file that says which labels are flipped instead, such as a run's ``noise_mask.parquet``.
        noise: any other kind of noise instead.
        noise_seed: which labels are flipped.
        seed: order of the pairs.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        task: a name for the run's folder and summary.
        clean_meta: a source whose training pairs have clean labels, for meta batches of those instead of
            reworded training pairs (the weighting's outer objective has to fit).
        hold_out_clean_meta: leave pairs of ``clean_meta`` out of training, by id.
        augmentations: Parquet file of ``pacmr augment``: meta pairs are then the pairs of its prompts. It is
            read where the meta batches are reworded training pairs.
        reference: "live" computes the reference's log-probabilities with each batch, "cached" those of all
            pairs before training, on disk for every later run with the same model and pairs.
        predict_prompts: prompts to answer, drawn from those of the source; None for all. All if there are
            fewer.
        predict_seed: which prompts are drawn.
        predict_max_length: tokens of a prompt to answer; longer ones are left out and counted.
        curriculum: ``pairs.parquet`` of ``pacmr audit --scorer dpo`` of a run on these pairs and labels: the
            easiest are trained on in each epoch, from easy to difficult; None for all, shuffled.
        curriculum_share: of the training pairs that are the easiest, above 0 and at most 1.

    Attributes:
        noise_flips: after ``setup("fit")``, for each id of the training rows whether the noise flips its
            label; None where no noise is injected.
        annotators: after ``setup("fit")``, for each id of the training rows who gave the label, as the row
            says or as ``AnnotatorNoise`` assigns it, None where that is unknown; None where no row has one.
        uniform_noise: whether every pair has the same probability of a flip, ``noise_rate``. Where not,
            ``noise_rate`` is the share of flipped pairs after ``setup("fit")``.
        counts: after ``setup``, for ``train`` and ``validation``: ``rows``, ``kept``, dropped pairs by
            reason, ``no second view``, and for ``train`` ``flipped`` (labels the noise changed).
        trained_texts: hash of the training pairs' texts of a run whose policy is looked at, which ``setup``
            compares; None: not compared.
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
        noise_rates: list[float] | None = None,
        category_noise_rates: dict[str, float] | None = None,
        noise_mask: str | None = None,
        noise: LabelNoise | None = None,
        noise_seed: int = 42,
        seed: int = 42,
        num_workers: int = 0,
        task: str = "preferences",
        clean_meta: Source | None = None,
        hold_out_clean_meta: bool = True,
        augmentations: str | None = None,
        reference: Literal["live", "cached"] = "live",
        predict_prompts: int | None = 800,
        predict_seed: int = 42,
        predict_max_length: int = 4096,
        curriculum: str | None = None,
        curriculum_share: float = 0.5,
    ):
        super().__init__()
        _check_at_least("max_length (tokens of prompt and response)", max_length, 2)
        _check_at_least("global_batch_size", global_batch_size, 1)
        _check_at_least("validation_batch_size", validation_batch_size, 1)
        _check_at_least("meta_batch_size", meta_batch_size, 1)
        _check_at_least("num_workers", num_workers, 0)
        _check_at_least("predict_max_length", predict_max_length, 1)
        if predict_prompts is not None:
            _check_at_least("predict_prompts", predict_prompts, 1)
        if meta_every is not None:
            _check_at_least("meta_every (the weighting's every)", meta_every, 1)
        noise = label_noise(noise, noise_rate, noise_rates, category_noise_rates, noise_mask)
        self.source = source
        self.tokenizer_name = str(tokenizer)
        self.max_length = max_length
        self.global_batch_size = global_batch_size
        self.validation_batch_size = validation_batch_size
        self.meta_every = meta_every
        self.meta_batch_size = meta_batch_size
        self.noise = noise
        self.uniform_noise = noise is None or noise.rate is not None
        self.noise_rate = noise.rate if noise is not None and self.uniform_noise else noise_rate
        self.noise_seed = noise_seed
        self.seed = seed
        self.num_workers = num_workers
        self.task = task
        if clean_meta is not None and meta_every is None:
            raise UserError(
                f"clean_meta is {clean_meta.name}, but nothing learns from meta pairs; give a weighting that "
                "does (VNetWeighting with CleanPreference), or take clean_meta out."
            )
        if clean_meta is None and not hold_out_clean_meta:
            raise UserError("hold_out_clean_meta is false, but there is no clean_meta; take it out.")
        self.clean_meta = clean_meta
        self.hold_out_clean_meta = hold_out_clean_meta
        self.augmentations = augmentations
        if not 0 < curriculum_share <= 1:
            raise UserError(f"curriculum_share is {curriculum_share}, but it must be above 0 and at most 1.")
        if curriculum is None and curriculum_share != 0.5:
            raise UserError(
                f"curriculum_share is {curriculum_share}, but there is no curriculum; give pairs.parquet of "
                "an audit, or leave it out."
            )
        self.curriculum = curriculum
        self.curriculum_share = curriculum_share
        self.reference = reference
        self.predict_prompts = predict_prompts
        self.predict_seed = predict_seed
        self.predict_max_length = predict_max_length
        self.trained_texts: str | None = None
        self.clean_pairs: Pairs | None = None
        self.train_pairs: Pairs | None = None
        self.validation_pairs: Pairs | None = None

    # A cached property can be written, but mypy takes it for one that can only be read.
    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:  # type: ignore[override]
        """The tokenizer, loaded when first asked for."""
        return load_tokenizer(self.tokenizer_name)

    @cached_property
    def _preparation(self) -> Preparation:
        # Reworded training pairs are needed only where nothing else is learned from.
        reworded = self.meta_every is not None and self.clean_meta is None
        return Preparation(
            self.source,
            self.tokenizer,
            self.max_length,
            self.noise,
            self.noise_seed,
            self.clean_meta,
            self.hold_out_clean_meta,
            self.augmentations if reworded else None,
            self.curriculum,
            self.curriculum_share,
        )

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """By split, what became of the rows; see the class."""
        return self._preparation.counts

    @property
    def noise_flips(self) -> dict[str, bool] | None:
        """For each id of the training rows whether the noise flips its label; see the class."""
        return self._preparation.noise_flips

    @property
    def annotators(self) -> dict[str, str | None] | None:
        """For each id of the training rows who gave the label; see the class."""
        return self._preparation.annotators

    @property
    def gold_reward(self) -> Callable[[str, str], float] | None:
        """r(prompt, response) -> float of the source, or None where nobody knows it."""
        return self.source.gold_reward

    def prepare_data(self) -> None:
        """Fills datasets' caches from one process, so that the others read them."""
        if not self._predicts:
            self._preparation.fill_caches()
        elif self.source.prompts is None:
            self.source.load("validation")

    def setup(self, stage: str) -> None:
        """Loads what the stage needs: training pairs for ``fit``, validation pairs, nothing for ``predict``.

        Raises:
            UserError: a batch size cannot be shared by the trainer's processes, no pair is left, or the
                pairs are not those that a run was trained on.
        """
        check_shares("global_batch_size", self.global_batch_size, self._ranks["world_size"])
        if stage == TrainerFn.FITTING and self.train_pairs is None:
            # Lightning sets the attribute without declaring it.
            overfit = self.trainer is not None and self.trainer.overfit_batches  # type: ignore[attr-defined]
            if overfit:
                raise UserError(
                    f"overfit_batches is {overfit}, but it would undo the order of the "
                    "pairs; give a smaller training file and more epochs instead."
                )
            self.clean_pairs = self._preparation.clean()
            self.train_pairs = self._preparation.train(self.clean_pairs)
            self.texts_digest = self._preparation.texts_digest
            if not self.uniform_noise:
                self.noise_rate = sum(self.train_pairs.swapped) / len(self.train_pairs)
            if self.trained_texts is not None and self.trained_texts != self.texts_digest():
                raise UserError(
                    f"The texts of {self.source.name} are not those that the run was trained on; restore "
                    "them, or use pacmr audit with a model, which takes any pairs."
                )
            if self.trainer is not None:
                rank_zero_info(self._epoch_line())
        if self.validation_pairs is None and stage != TrainerFn.PREDICTING:
            self.validation_pairs = self._preparation.validation()

    def check_model(self, policy: PolicyModel) -> None:
        """Check that the module's policy can read the pairs that are loaded.

        Raises:
            UserError: it has too few positions, or too few embeddings for the tokenizer.
        """
        for pairs in (self.train_pairs, self.validation_pairs, self.clean_pairs):
            if pairs is not None:
                pairs.check_model(policy)

    def fill_reference(self, policy: PolicyModel) -> None:
        """What ``reference: cached`` asks for; the module calls it before training, with its policy.

        Raises:
            UserError: the policy cannot read the pairs, the cache is damaged, or a log-probability is not
                finite.
        """
        self.check_model(policy)
        if self.reference == "live":
            return
        assert self.trainer is not None and self.train_pairs is not None and self.validation_pairs is not None
        ask = partial(cached_log_probs, policy, **self._ranks, barrier=self.trainer.strategy.barrier)
        self.train_pairs.reference = self._preparation.train_reference(ask)
        self.validation_pairs.reference = ask(self.validation_pairs)
        if self.clean_pairs is not None:
            self.clean_pairs.reference = ask(self.clean_pairs)
        elif self.meta_every is not None:
            augmented = partial(ask, augmented=True)
            self.train_pairs.augmented_reference = self._preparation.train_reference(augmented)

    def fill_train_reference(self, policy: PolicyModel) -> None:
        """The same for the training pairs alone, where a tool looks at them in one process.

        A tool needs all of them once whatever the run did, and a second pass needs them again.

        Raises:
            UserError: as ``fill_reference``.
        """
        assert self.train_pairs is not None
        ask = partial(cached_log_probs, policy, rank=0, world_size=1, barrier=lambda: None)
        self.train_pairs.reference = self._preparation.train_reference(ask)

    def train_state_differences(self, policy: PolicyModel) -> np.ndarray:
        """What the reference's layers hold of each training pair's responses, for a linear probe.

        It is kept on disk for all runs, like log-probabilities.

        Returns:
            (N, 2H) chosen minus rejected, labels as trained.

        Raises:
            UserError: as ``fill_reference``.
        """
        assert self.train_pairs is not None
        found = self._preparation.train_reference(partial(cached_state_differences, policy))
        return found * np.where(self.train_pairs.swapped, -1, 1).astype(found.dtype)[:, None]


def _check_at_least(option: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{option} is {value}, but it must be at least {least}.")
