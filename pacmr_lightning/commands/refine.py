"""Command ``pacmr refine``: second-pass training with soft labels from an audit of the first run."""

import json
import math
import shutil
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

from ..audit import AuditOptions, audit
from ..errors import UserError, check_choice, check_within
from ..evaluation import reward_model  # noqa: F401 - for its judge's short name
from ..files import check_writable, content_digest, local_path, only_one, write_json
from ..objectives import DPO
from ..runs.checkpoints import LAST
from ..runs.finished_run import FinishedRun, find_run
from ..runs.folder import AUDIT, AUDITED_PAIRS, CHECKPOINTS, CONFIG, SUMMARY, read_summary, unmoved
from ..runs.loggers import loggers_of_another
from .audit import show
from .compare import compare

Labels = Literal["soft", "weights", "drop", "swap", "easiest"]

RECORD = "refine.json"
USES: dict[Labels, dict[str, bool]] = {
    "soft": {"soft_labels": True, "hard": False},
    "weights": {"soft_labels": False, "hard": False},
    "drop": {"soft_labels": False, "hard": True},
    "swap": {"soft_labels": True, "hard": True},
}
"""Options of ``AuditedWeights``."""
FURTHEST = 10.0
"""KL to the reference, in nats per response, above which a second pass gets a warning."""


def refine(
    run: str,
    output: str | None = None,
    labels: Labels = "soft",
    beta: float | None = None,
    easiest: float | None = None,
    anyway: bool = False,
    **options: Any,
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
        beta: DPO's temperature in the second pass; default: the first run's. Soft labels raise the KL to the
            reference, so a beta for clean labels is a good choice.
        easiest: fraction of the pairs for ``--labels easiest``; default: 0.5.
        anyway: also refine a run whose policy did not move, or whose labels cannot be predicted.
        options: of ``pacmr audit``, without ``output``. With a ``noise_rate`` the second pass also runs on
            scores that do not predict the labels.

    Returns:
        The folder of the second pass.

    Raises:
        UserError: the run's files are missing, an option is out of range, or the folder holds something else.
    """
    check_choice(Labels, labels=labels)
    if beta is not None:
        DPO(beta)  # refuses one that is out of range
    audited = AuditOptions(**options)
    first = find_run(run, audited.checkpoint)
    run = first.folder
    if first.data["init_args"].get("clean_meta"):
        raise UserError(
            f"The run {run} has clean_meta pairs, which are neither trained on nor audited; refine a run "
            "without them."
        )
    folder = local_path(output) if output else folder_beside(run, "refined")
    audited = replace(audited, output=str(folder / AUDIT))
    others = ("output", "prompt_price", "completion_price")
    given = {f.name: getattr(audited, f.name) for f in fields(audited) if f.name not in others}
    asked = {"run": str(run), "labels": labels, "beta": beta, **given}
    asked["checkpoint"] = kept_file(audited.checkpoint, first.checkpoint)
    if (file := audited.decisions) is not None:
        asked["decisions"] = kept_file(file, local_path(file))
    if not anyway and (still := unmoved(read_summary(run).get("metrics") or {})):
        rate = first.model["init_args"].get("learning_rate")
        raise UserError(
            f"{still}, so a second pass would not move either; train {run} again with a higher "
            f"--model.learning_rate than {rate:g}, or add --anyway."
        )
    if labels == "easiest":
        easiest = 0.5 if easiest is None else easiest
        asked["easiest"] = easiest
    asked["judges"] = [judge.settings for judge in audited.judges or ()]
    _check_easiest(labels, easiest, audited)
    _audit_first(run, folder, asked, audited, needs_p=labels != "easiest" and not anyway)
    if not (folder / SUMMARY).exists():
        use = _use(labels, folder / AUDIT / AUDITED_PAIRS, easiest)
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
    audited = audit(run, options=options)
    show(audited)
    if needs_p and not audited.findings.agreement.usable:
        raise UserError(
            f"The labels of {run} cannot be predicted from the scores better than by a coin, so there are no "
            "soft labels; use another --scorer, a run that has learned more, or --anyway."
        )
    write_json(folder / RECORD, asked)


def _check_easiest(labels: Labels, easiest: float | None, audited: AuditOptions) -> None:
    if labels != "easiest":
        if easiest is not None:
            raise UserError(f"easiest is {easiest}, but labels {labels} does not use it; leave it out.")
        return
    check_within("(0, 1]", easiest=easiest)
    if (scorer := audited.scorer) != "dpo":
        raise UserError(
            f"scorer is {scorer or 'not given'}, but labels easiest needs cross-fitted u; use --scorer dpo."
        )
    for name in audited.changed.keys() & {"judges", "decisions", "noise_rate"}:
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


def compare_passes(first: str, folder: Path) -> None:
    """Print the two runs side by side, with warnings on the second."""
    runs = [first, str(folder)]
    compare(runs)
    for doubt in doubts(*map(read_summary, runs)):
        print(doubt, file=sys.stderr)


def doubts(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return warnings on a second pass: a high KL, or significantly lower validation accuracy."""
    reasons = []
    kls = [summary["metrics"].get("val/sequence_kl") for summary in (first, second)]
    if kls[1] is not None and kls[1] > FURTHEST:
        other = "" if kls[0] is None else f" (the first run's: {kls[0]:.1f})"
        reasons.append(f"The second pass has a high KL to the reference, {kls[1]:.1f} nats{other}")
    before, after = (summary["val_accuracy"] for summary in (first, second))
    pairs = second.get("val_pairs")
    if pairs and before is not None and after is not None:
        error = math.sqrt((before * (1 - before) + after * (1 - after)) / pairs)
        if before - after > 2 * error:
            reasons.append(
                f"The second pass has a significantly lower validation accuracy than the first, {after:.3f} "
                f"against {before:.3f} on {pairs:,} pairs"
            )
    return [f"{reason}: read some of its responses, or raise --beta." for reason in reasons]


def folder_beside(run: str, ending: str) -> Path:
    """Return the default folder of a second pass: the run's name and an ending, beside the run."""
    path = local_path(run)
    path = path if path.name not in ("", "..") else path.resolve()  # "." has no name
    return path.with_name(f"{path.name}-{ending}")


def kept_file(name: str, path: Path) -> str:
    """Return a file's name with a hash of its content."""
    return f"{name} ({content_digest(path)[:12] if path.is_file() else 'missing'})"


def check_folder(folder: Path, asked: dict[str, Any], record: str) -> None:
    """Raise a UserError for a folder with anything else, since the second pass's fit clears it."""
    check_writable("output", str(folder), folder)
    path = folder / record
    if not (folder / CONFIG).exists() and not path.exists():
        # A killed audit leaves its folder without a record.
        names = sorted(left.name for left in folder.iterdir()) if folder.exists() else []
        if strange := [name for name in names if name != AUDIT and not name.endswith(".partial")]:
            raise UserError(
                f"The folder {folder} holds {strange[0]}, which is no part of a second pass; name a new "
                "folder with --output."
            )
        return
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        recorded = {}
    for name, value in asked.items():
        if recorded.get(name) != value:
            held = f"a second pass with {name} {recorded[name]}" if name in recorded else "another run"
            raise UserError(f"The folder {folder} already holds {held}; name another with --output.")


def train_again(
    first: FinishedRun,
    folder: Path,
    ending: str,
    beta: float | None,
    options: dict[str, str],
    own: Iterable[str],
) -> None:
    """Run or resume ``pacmr fit`` with the first run's configuration and other options.

    ``ending`` is added to the method's name; files ``own`` stay in the folder.
    """
    model = first.model["init_args"]
    named = {"model.method": f"{model['method']}-{ending}", **objective_options(model, beta)}
    options = named | options | {"trainer.default_root_dir": str(folder)}
    if isinstance(asked := first.trainer.get("logger"), (dict, list)):
        options["trainer.logger"] = json.dumps(loggers_of_another(asked, folder.name))
    words = ["--config", str(Path(first.folder) / CONFIG)]
    fit(folder, words + [word for name, value in options.items() for word in (f"--{name}", value)], own)


def objective_options(options: dict[str, Any], beta: float | None) -> dict[str, str]:
    """Return options that replace an objective with its own label correction by DPO."""
    first = options.get("objective") or {"class_path": "pacmr_lightning.objectives.DPO"}
    beta = (first.get("init_args") or {}).get("beta") if beta is None else beta
    kind = resolve_name(first["class_path"])
    changed = {}
    if kind.grouped or kind.corrects_labels:
        print(f"The second pass uses DPO, since {kind.__name__} has its own correction of wrong labels.")
        changed["model.objective"] = "DPO"
    return changed | ({} if beta is None else {"model.objective.beta": json.dumps(beta)})


def fit(folder: Path, words: list[str], own: Iterable[str] = ()) -> None:
    """Run ``pacmr fit`` in this process: resume from a checkpoint, else clear the folder except ``own``."""
    from .fit import PacmrCLI  # slow import, after the checks of options

    if (folder / CHECKPOINTS / LAST).exists():
        words = [*words, "--ckpt_path", "last"]
    elif folder.exists():
        with only_one(folder):
            for path in {*folder.iterdir()} - {folder / name for name in own}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = sys.argv
    sys.argv = [before[0], "fit", *words]  # from which Lightning starts DDP's other processes
    try:
        PacmrCLI()
    finally:
        sys.argv = before
