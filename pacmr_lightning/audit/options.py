"""Options of an audit, checked before any computation."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from ..errors import UserError, check_at_least, check_choice, check_within
from ..evaluation.judging import PairJudge, check_distinct, check_prices
from ..files import check_writable, local_path
from ..policy.numerics import AskedDtype
from .manual_review import Decisions, read_decisions
from .scorers import Choice

Action = Literal["drop", "swap"]
MAX_LENGTH = 1024
JUDGED_PAIRS = 400
OF_JUDGES = ("judged_pairs", "prompt_price", "completion_price")
OF_A_RUN = ("checkpoint",)
OF_A_MODEL = ("reference", "max_length", "dtype")


@dataclass(frozen=True)
class AuditOptions:
    """Options of ``audit``.

    Args:
        scorer: score of each label. "probe": a linear reward on the base model's hidden states, fitted to the
            labels of other prompts. "policy": implicit reward margin u of the policy against its reference.
            "dpo": u of two DPO policies, each trained on half of the prompts and scoring the other half.
            "judge": the default scorer with verdicts of ``judges``, which also join any other scorer.
            Default: probe for a base model, policy for an adapter; for a run whichever of the two agrees with
            more labels that it has not seen.
        output: folder of the results; default: ``audit`` inside the run's folder, or here for a model.
        checkpoint: name, without .ckpt, of a file in the run's folder ``checkpoints``.
        reference: of a model or adapter, not a run: where its training started; default: the adapter's base.
            The tokenizer and chat template are the policy's, else the reference's.
        max_length: of a model, not a run: tokens of prompt and longer response; longer pairs are dropped
            (default: 1024).
        dtype: of a model, not a run, and its reference (default: float32); in bfloat16 small LoRA updates are
            lost.
        top: number of undecided pairs in the report.
        threshold: labels with p, the probability that another annotator agrees, below it are suspected.
        noise_rate: known rate of random flips, if the errors are such; p is then the probability that the
            label is right.
        cleaned: file of the cleaned pairs, in the format of their source; an existing one is replaced.
            Default: ``cleaned.jsonl`` (or .parquet) in ``output``, if any pair changes.
        action: "drop" suspected label errors from the cleaned file, or "swap" their responses. Default:
            drop, or with ``decisions`` only what was decided.
        sample: number of random pairs at the top of the report, without the audit's results; decisions on
            them estimate the fraction of wrong labels.
        decisions: file of decisions on pairs, saved by the report's page. They
            set p to 1 or 0 and change ``cleaned``; from 30 on they also improve the score.
        judges: judges whose verdicts on some pairs are combined with the score, such as EndpointJudge. Their
            reliabilities are estimated.
        judged_pairs: pairs to judge: those whose labels are most uncertain by the score, a quarter at random.
        prompt_price: price of a million prompt tokens of the judges, in any currency.
        completion_price: price of a million completion tokens.

    Raises:
        UserError: an option is out of range, does not fit another, or a place cannot be written to.
    """

    scorer: Choice | None = None
    output: str | None = None
    checkpoint: str = "last"
    reference: str | None = None
    max_length: int | None = None
    dtype: AskedDtype | None = None
    top: int = 50
    threshold: float = 0.5
    noise_rate: float | None = None
    cleaned: str | None = None
    action: Action | None = None
    sample: int = 0
    decisions: str | None = None
    judges: list[PairJudge] | None = None
    judged_pairs: int = JUDGED_PAIRS
    prompt_price: float | None = None
    completion_price: float | None = None

    def __post_init__(self) -> None:
        check_choice(Literal[Choice, None], scorer=self.scorer)
        check_choice(Literal[Action, None], action=self.action)
        check_at_least(0, top=self.top, sample=self.sample)
        check_within("(0, 1)", threshold=self.threshold)
        check_within("(0, 0.5)", noise_rate=self.noise_rate)
        check_at_least(1, judged_pairs=self.judged_pairs)
        if not self.judges:
            self.refuse(OF_JUDGES, "there are no judges")
            if self.scorer == "judge":
                raise UserError("scorer is judge, but judges is missing; add --judges+=EndpointJudge.")
        check_distinct(self.judges or ())
        check_prices(self.prompt_price, self.completion_price)
        if self.output is not None:
            check_writable("output", self.output, local_path(self.output))
        if self.cleaned is not None:
            path = local_path(self.cleaned)
            check_writable("cleaned", self.cleaned, path.parent)
            if self.decisions is not None and path.resolve() == local_path(self.decisions).resolve():
                raise UserError(
                    f"cleaned is {self.cleaned}, which is the file of decisions; name another file."
                )
        _ = self.decided  # reads the file now, so that its errors come first

    @property
    def score(self) -> Choice | None:
        """Scorer that judges are combined with; None is the default one."""
        return None if self.scorer == "judge" else self.scorer

    @cached_property
    def decided(self) -> Decisions | None:
        """Decisions from the file ``decisions``."""
        return None if self.decisions is None else read_decisions(self.decisions)

    @property
    def changed(self) -> dict[str, Any]:
        """Options that differ from their defaults, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def refuse(self, names: tuple[str, ...], why: str) -> None:
        """Raise a UserError if one of these options, which would have no effect, is given."""
        for name in names:
            if name in self.changed:
                raise UserError(f"{name} is {getattr(self, name)}, but {why}; leave it out.")
