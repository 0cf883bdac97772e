"""Options of an audit, checked before anything is computed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Literal

from ..errors import UserError, check_at_least
from ..files import check_writable
from ..numerics import AskedDtype
from ..runs.model_card import public
from .decisions import Decisions, read_decisions
from .scorers import Scorer

Action = Literal["drop", "flip"]
BETA = 0.1
MAX_LENGTH = 1024
OF_A_RUN = ("checkpoint", "micro_batch_size")
OF_A_MODEL = ("reference", "beta", "max_length", "dtype")


@dataclass(frozen=True)
class AuditOptions:
    """Options of ``audit``.

    Args:
        scorer: who judges: "vnet" is the run's own weights, "dpo" two DPO policies, trained for it on half of
            the prompts each, about the half that they have not seen, "policy" the policy against its
            reference, "first_visit" the run's policy before it learned from the pair for the first time, by
            the records of WeightRecorder, "probe" a linear reward on the base model's hidden states, learned
            from the labels of other prompts. Default for a run: the probe where it agrees with more labels,
            which it has not seen, than the run's policy before it learned from each pair, by more than a
            standard error; else the weights where they differ, and the policy where they do not. Default for
            an adapter, or a model with a ``reference``: policy. Default for a base model, with which training
            is to begin: probe.
        output: folder to write to; default: ``audit`` inside the run's folder, or in the working
            folder for a model.
        checkpoint: which of the run's folder ``checkpoints``, by its name without .ckpt.
        reference: the model that a model's training began with; default: what an adapter names as its base. A
            probe has none. The tokenizer and its chat template are the policy's, or the base's of an adapter
            that has none.
        beta: DPO's temperature in a model's training (default: 0.1), which scales u; the ranking does not
            depend on it, nor does a probe.
        max_length: tokens of prompt + longer response for a model; longer pairs are left out. Default: 1024.
        dtype: of a model and its reference (default: float32); an adapter is added to its base, where
            bfloat16 rounds small changes away.
        micro_batch_size: pairs in one pass with gradients (self-influence; ``dpo``); default: as in training.
        top: pairs in the report.
        threshold: a label is suspect where it is wrong with a probability above this.
        share: of wrong labels, where it is known, say from a sample read by hand; default: estimated, which
            fails where the policy has learned too little.
        fallback_share: of wrong labels, where the estimate fails or would be too low, since the policy has
            memorised its labels; less where too few labels are against the policy on the pairs that it is
            surest of, and none where scores fit labels that are coin flips as well: ``share`` applies there,
            too.
        cleaned: file to write the training pairs to, in the format of their source; it is replaced where it
            exists. Default: ``cleaned.jsonl`` (or .parquet) in ``output``, if any pair is changed.
        action: what is done there with suspects: "drop" them, the default, or "flip" their label; with
            ``decisions`` the default is that only what is decided changes.
        sample: number of pairs drawn at random that the report lists first, without the audit's results, so
            that decisions on them give the share of wrong labels.
        decisions: file of decisions on pairs, as the report's page saves it or Label Studio exports it.
            Decided labels are wrong with probability 0 or 1, ``cleaned`` follows them, and those on the
            random sample give the share of wrong labels where ``share`` does not.
        label_studio: file to write the listed pairs to, as tasks of Label Studio (.json).

    Raises:
        UserError: an option is out of range, does not fit another, or a place cannot be written to.
    """

    scorer: Scorer | None = None
    output: str | None = None
    checkpoint: str = "last"
    reference: str | None = None
    beta: float | None = None
    max_length: int | None = None
    dtype: AskedDtype | None = None
    micro_batch_size: int | None = None
    top: int = 50
    threshold: float = 0.5
    share: float | None = None
    fallback_share: float | None = None
    cleaned: str | None = None
    action: Action | None = None
    sample: int = 0
    decisions: str | None = None
    label_studio: str | None = None

    def __post_init__(self) -> None:
        for name in ("top", "sample"):
            if (number := getattr(self, name)) < 0:
                raise UserError(f"{name} is {number}, but it is a number of pairs, at least 0.")
        if not 0 < self.threshold < 1:
            raise UserError(f"threshold is {self.threshold}, but it is a probability, above 0 and below 1.")
        for name in ("share", "fallback_share"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 0.5:
                raise UserError(f"{name} is {value}, but the share of wrong labels is above 0 and below 0.5.")
        if self.beta is not None and not self.beta > 0:
            raise UserError(f"beta is {self.beta}, but it must be above 0 (DPO's is usually 0.1).")
        check_at_least(1, micro_batch_size=self.micro_batch_size)
        if self.label_studio is not None and not self.label_studio.endswith(".json"):
            raise UserError(
                f"label_studio is {self.label_studio}, but tasks are written to a file ending in .json."
            )
        self._check_places()
        _ = self.decided  # reads the file, so that errors come first

    def _check_places(self) -> None:
        if self.output is not None:
            check_writable("output", self.output, Path(self.output))
        taken = {} if self.decisions is None else {Path(self.decisions).expanduser().resolve(): "decisions"}
        for name in ("cleaned", "label_studio"):
            if (file := getattr(self, name)) is not None:
                path = Path(file).expanduser()
                check_writable(name, file, path.parent)
                if clash := taken.get(path.resolve()):
                    raise UserError(f"{name} is {file}, which is the file of {clash}; name another file.")
                taken[path.resolve()] = name

    @cached_property
    def decided(self) -> Decisions | None:
        """Decisions read from the file ``decisions``."""
        return None if self.decisions is None else read_decisions(self.decisions)

    @property
    def changed(self) -> dict[str, object]:
        """Options that differ from their defaults, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def refuse(self, names: tuple[str, ...], why: str) -> None:
        """Raise a UserError if one of these options, which would have no effect, is given."""
        for name in names:
            if name in self.changed:
                raise UserError(f"{name} is {getattr(self, name)}, but {why}; leave it out.")

    def command(self, run: str, source: object) -> str:
        """Return the command line of this audit for a card, without local paths."""
        words = ["pacmr", "audit", str(public(run))]
        if source is not None:
            words += ["--source", type(source).__name__, "..."]
        for name, value in self.changed.items():
            words += [f"--{name}", str(public(value))]
        return shlex.join(words)
