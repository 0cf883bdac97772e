"""``pacmr refine``: train again on the same labels, with an audit of the first run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import pandas as pd

from ..audit import AuditOptions
from ..audit.scorers import Scorer
from ..command_line.parser import run_tool
from ..errors import UserError
from ..runs.finished_run import find_run
from ..runs.folder import SUMMARY, read_summary
from ..runs.unmoved import unmoved
from .second_pass import (
    AUDIT,
    SAFE_SHARE,
    audit_first,
    check_beta,
    compare_passes,
    folder_beside,
    kept_file,
    train_again,
)

Labels = Literal["soft", "weights", "drop", "flip", "easiest"]

RECORD = "refine.json"
USES: dict[Labels, dict[str, bool]] = {
    "soft": {"soft_labels": True, "hard": False},
    "weights": {"soft_labels": False, "hard": False},
    "drop": {"soft_labels": False, "hard": True},
    "flip": {"soft_labels": True, "hard": True},
}
"""Options of ``AuditedWeights``."""


def refine(
    run: str,
    output: str | None = None,
    labels: Labels = "soft",
    share: float | None = None,
    beta: float | None = None,
    scorer: Scorer | None = None,
    checkpoint: str = "last",
    micro_batch_size: int | None = None,
    easiest: float | None = None,
    decisions: str | None = None,
    anyway: bool = False,
) -> Path:
    """Trains a run's policy once more, from the reference, with the run's own audit of each label.

    An audit in the run's folder is reused. The run's configuration is carried over, with the reference's
    log-probabilities cached by the audit. The second pass is a run of its own beside the first, with the
    audit in its folder ``audit`` and a comparison of the two at the end. The same command resumes where it
    was killed.

    Args:
        run: folder of a finished preference run.
        output: folder of the second pass; default: the run's name with ``-refined``.
        labels: "soft" learns from both orders of a pair, each as far as it is probably right; "weights" from
            the label as observed, as far as it is; "drop" leaves suspects out; "flip" exchanges them;
            "easiest" trains on the pairs that policies which have not seen them find easiest, from easy to
            difficult (Selective DPO), and needs ``--scorer dpo``.
        share: of wrong labels, where it is known; default: what the audit estimates, and where it cannot, the
            most that the pairs which the policy is surest of leave, up to 0.45: too high a share loses little
            of the second pass's gain, too low a one most of it. With a share, it also goes on where the
            scores may say nothing of the labels.
        beta: of the second pass; default: the first run's. Soft labels raise the KL to the reference, so the
            beta that suits DPO on clean labels is a good first choice.
        scorer: as in ``pacmr audit``, whose choice is the default; "dpo" trains two more policies.
        checkpoint: which of the run's folder ``checkpoints`` judges, by its name without .ckpt.
        micro_batch_size: pairs in one pass with gradients of the audit; default: that of training.
        easiest: share of the pairs that is taken with ``--labels easiest``; default: 0.5.
        decisions: file of a person's decisions on pairs, as in ``pacmr audit``: these labels are fixed, and
            those of them on a random sample give the share where ``share`` does not.
        anyway: go on with a run whose policy did not move.

    Returns:
        The folder of the second pass.

    Raises:
        UserError: the run's files are missing, an option is out of range, or the folder holds something else.
    """
    check_beta(beta)
    first = find_run(run, checkpoint)
    if first.data["init_args"].get("clean_meta"):
        raise UserError(
            f"The run {run} has clean_meta pairs, which it did not train on and no audit has seen; refine a "
            "run without them."
        )
    folder = Path(output) if output else folder_beside(run, "refined")
    asked = {"run": str(run), "labels": labels, "share": share, "beta": beta}
    asked |= {"scorer": scorer, "checkpoint": kept_file(checkpoint, first.checkpoint)}
    asked["decisions"] = None if decisions is None else kept_file(decisions, Path(decisions).expanduser())
    if not anyway and (still := unmoved(read_summary(run).get("metrics") or {})):
        rate = first.model["init_args"].get("learning_rate")
        raise UserError(
            f"{still}, so a second pass would not move either; train {run} again with more than "
            f"--model.learning_rate {rate:g}, or go on all the same with --anyway."
        )
    if labels == "easiest":
        easiest = 0.5 if easiest is None else easiest
        asked["easiest"] = easiest
    _check_easiest(labels, easiest, scorer, decisions)
    audited = folder / AUDIT
    options = AuditOptions(
        scorer,
        str(audited),
        checkpoint,
        share=share,
        fallback_share=SAFE_SHARE,
        micro_batch_size=micro_batch_size,
        decisions=decisions,
    )
    audit_first(run, folder, asked, RECORD, options, needs_rate=labels != "easiest")
    if not (folder / SUMMARY).exists():
        use = _use(labels, audited / "pairs.parquet", easiest)
        if "reference" in first.data["init_args"]:
            use["data.reference"] = "cached"  # written by the audit
        train_again(first, folder, "refined", beta, use, (AUDIT, RECORD))
    compare_passes(run, folder)
    _warn_of_rules(audited)
    return folder


def _warn_of_rules(audited: Path) -> None:
    """Print the audit's shortcuts again, beside the comparison after a long training."""
    traits = pd.read_csv(audited / "suspect_traits.csv", keep_default_na=False)  # "null" is a word
    rules = traits[traits["rule"]]
    names = [
        "length" if kind == "length" else f"the word “{trait}”"
        for kind, trait in zip(rules["kind"], rules["trait"], strict=True)
    ]
    if names:
        print(
            f"Most labels follow a rule ({', '.join(names)}), which the policy learns, and a second pass "
            "follows further: where it is not what makes responses better, prefer the first run; read "
            f"{audited / 'report.html'}.",
            file=sys.stderr,
        )


def _check_easiest(labels: Labels, easiest: float | None, scorer: str | None, decisions: str | None) -> None:
    if easiest is None:
        return
    if labels != "easiest":
        raise UserError(
            f"easiest is {easiest}, but labels is {labels}, which has no use for it; leave it out."
        )
    if not 0 < easiest <= 1:
        raise UserError(f"easiest is {easiest}, but it is a share of the pairs, above 0 and at most 1.")
    if scorer != "dpo":
        raise UserError(
            f"scorer is {scorer or 'not given'}, but what is easy is asked of policies that have not seen "
            "the pairs; use --scorer dpo."
        )
    if decisions is not None:
        raise UserError(
            f"decisions is {decisions}, but labels is easiest, which goes by difficulty alone; take "
            "another, or train on the file of pacmr audit --decisions --cleaned."
        )


def _use(labels: Labels, table: Path, easiest: float | None) -> dict[str, str]:
    """Options of ``pacmr fit`` for the second pass."""
    if labels == "easiest":
        order = {"data.curriculum": str(table), "data.curriculum_share": str(easiest)}
        return {"model.weighting": "Unweighted", **order}
    return {
        "model.weighting": "AuditedWeights",
        "model.weighting.audit": str(table),
        **{f"model.weighting.{name}": json.dumps(value) for name, value in USES[labels].items()},
    }


def main(arguments: list[str]) -> None:
    """Run ``pacmr refine``."""
    run_tool("refine", refine, arguments, positional=True)
