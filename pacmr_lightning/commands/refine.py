"""Command ``pacmr refine``: second-pass training with soft labels from an audit of the first run."""

import json
from pathlib import Path
from typing import Any, Literal

from ..audit import AuditOptions, audit
from ..audit.options import JUDGED_PAIRS
from ..audit.scorers import Choice
from ..errors import UserError, check_within
from ..evaluation import reward_model  # noqa: F401 - for its judge's short name
from ..evaluation.judging import PairJudge
from ..files import local_path, write_json
from ..objectives import DPO
from ..runs.finished_run import find_run
from ..runs.folder import AUDIT, SUMMARY, read_summary, unmoved
from .audit import show
from .second_pass import check_folder, compare_passes, folder_beside, kept_file, train_again

Labels = Literal["soft", "weights", "drop", "swap", "easiest"]

RECORD = "refine.json"
USES: dict[Labels, dict[str, bool]] = {
    "soft": {"soft_labels": True, "hard": False},
    "weights": {"soft_labels": False, "hard": False},
    "drop": {"soft_labels": False, "hard": True},
    "swap": {"soft_labels": True, "hard": True},
}
"""Options of ``AuditedWeights``."""


def refine(
    run: str,
    output: str | None = None,
    labels: Labels = "soft",
    noise_rate: float | None = None,
    beta: float | None = None,
    scorer: Choice | None = None,
    checkpoint: str = "last",
    easiest: float | None = None,
    decisions: str | None = None,
    judges: list[PairJudge] | None = None,
    judged_pairs: int = JUDGED_PAIRS,
    prompt_price: float | None = None,
    completion_price: float | None = None,
    anyway: bool = False,
) -> Path:
    """Trains a second pass from the reference, with soft labels from an audit of the first run.

    The second pass has the first run's configuration and is a run of its own beside it, with the audit in its
    folder ``audit``; it ends with a comparison of the two runs. The same command resumes after an
    interruption.

    Args:
        run: folder of a finished preference run.
        output: folder of the second pass; default: the run's name with ``-refined``.
        labels: use of the audit. "soft": soft labels, the label weighted by the probability that most
            annotators would agree (``p_majority``), the other order by the rest. "weights": observed labels,
            weighted by it. "drop": without suspected label errors.
            "swap": with their labels swapped. "easiest": Selective DPO, on the pairs with the highest
            cross-fitted u, from easy to difficult; it needs ``--scorer dpo``.
        noise_rate: known rate of random flips, as in ``pacmr audit``. With it, the second pass also runs on
            scores that do not predict the labels.
        beta: DPO's temperature in the second pass; default: the first run's. Soft labels raise the KL to the
            reference, so a beta for clean labels is a good choice.
        scorer: as in ``pacmr audit``, with the same default; "dpo" trains two more policies.
        checkpoint: name, without .ckpt, of the file in the run's folder ``checkpoints`` to audit with.
        easiest: fraction of the pairs for ``--labels easiest``; default: 0.5.
        decisions: file of manual decisions, as in ``pacmr audit``: they fix labels.
        judges: judges whose votes join the score, as in ``pacmr audit``.
        judged_pairs: pairs to judge.
        prompt_price: price of a million prompt tokens of the judges, in any currency.
        completion_price: price of a million completion tokens.
        anyway: also refine a run whose policy did not move, or whose labels cannot be predicted.

    Returns:
        The folder of the second pass.

    Raises:
        UserError: the run's files are missing, an option is out of range, or the folder holds something else.
    """
    if beta is not None:
        DPO(beta)  # refuses one that is out of range
    first = find_run(run, checkpoint)
    run = first.folder
    if first.data["init_args"].get("clean_meta"):
        raise UserError(
            f"The run {run} has clean_meta pairs, which are neither trained on nor audited; refine a run "
            "without them."
        )
    folder = local_path(output) if output else folder_beside(run, "refined")
    asked: dict[str, Any] = {"run": str(run), "labels": labels, "noise_rate": noise_rate, "beta": beta}
    asked |= {"scorer": scorer, "checkpoint": kept_file(checkpoint, first.checkpoint)}
    asked["decisions"] = None if decisions is None else kept_file(decisions, local_path(decisions))
    if not anyway and (still := unmoved(read_summary(run).get("metrics") or {})):
        rate = first.model["init_args"].get("learning_rate")
        raise UserError(
            f"{still}, so a second pass would not move either; train {run} again with a higher "
            f"--model.learning_rate than {rate:g}, or add --anyway."
        )
    if labels == "easiest":
        easiest = 0.5 if easiest is None else easiest
        asked["easiest"] = easiest
    _check_easiest(labels, easiest, scorer, judges=judges, decisions=decisions)
    asked |= {"judges": [judge.settings for judge in judges or ()], "judged_pairs": judged_pairs}
    audited = folder / AUDIT
    options = AuditOptions(
        scorer,
        str(audited),
        checkpoint,
        noise_rate=noise_rate,
        decisions=decisions,
        judges=judges,
        judged_pairs=judged_pairs,
        prompt_price=prompt_price,
        completion_price=completion_price,
    )
    _audit_first(run, folder, asked, options, needs_p=labels != "easiest" and not anyway)
    if not (folder / SUMMARY).exists():
        use = _use(labels, audited / "pairs.parquet", easiest)
        if "reference" in first.data["init_args"]:
            use["data.reference"] = "cached"  # written by the audit
        train_again(first, folder, "refined", beta, use, (AUDIT, RECORD))
    compare_passes(run, folder)
    return folder


def _audit_first(run: str, folder: Path, asked: dict[str, Any], options: AuditOptions, needs_p: bool) -> None:
    """Audit the first run unless that is done, and write the options ``asked`` to ``RECORD``."""
    read_summary(run)  # needed by the comparison at the end
    check_folder(folder, asked, RECORD)
    if (folder / RECORD).exists():
        return
    found = audit(run, options=options)
    show(found)
    if needs_p and not found.findings.agreement.usable:
        raise UserError(
            f"The labels of {run} cannot be predicted from the scores better than by a coin, so there are no "
            "soft labels; use another --scorer, a run that has learned more, or --anyway."
        )
    write_json(folder / RECORD, asked)


def _check_easiest(
    labels: Labels, easiest: float | None, scorer: str | None, **unused: list[PairJudge] | str | None
) -> None:
    if labels != "easiest":
        if easiest is not None:
            raise UserError(f"easiest is {easiest}, but labels {labels} does not use it; leave it out.")
        return
    check_within("(0, 1]", easiest=easiest)
    if scorer != "dpo":
        raise UserError(
            f"scorer is {scorer or 'not given'}, but labels easiest needs cross-fitted u; use --scorer dpo."
        )
    for name, value in unused.items():
        if value:
            raise UserError(f"{name} is given, but labels is easiest, which does not use it; leave it out.")


def _use(labels: Labels, table: Path, easiest: float | None) -> dict[str, str]:
    """Return options of ``pacmr fit`` for the second pass."""
    if labels == "easiest":
        order = {"data.curriculum": str(table), "data.curriculum_share": str(easiest)}
        return {"model.weighting": "Unweighted", **order}
    return {
        "model.weighting": "AuditedWeights",
        "model.weighting.audit": str(table),
        **{f"model.weighting.{name}": json.dumps(value) for name, value in USES[labels].items()},
    }
