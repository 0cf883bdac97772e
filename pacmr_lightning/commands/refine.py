"""A second pass over the same labels, which learns from what an audit of the first pass found."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

from ..command_line.parser import run_tool
from ..errors import UserError
from ..files import replacing
from ..runs.checkpoints import LAST
from ..runs.finished_run import Run, find_run
from ..runs.folder import CHECKPOINTS, CONFIG, SUMMARY
from ..runs.loggers import loggers_of_another
from .audit import audit
from .compare import compare

Labels = Literal["soft", "weights", "drop", "flip", "easiest"]

RECORD = "refine.json"
"""File of what was asked for, inside the second pass's folder."""
AUDIT = "audit"
"""Folder of the audit inside it."""
SAFE_SHARE = 0.45
"""Of wrong labels, at most, where the audit cannot tell it."""
USES: dict[Labels, dict[str, bool]] = {
    "soft": {"soft_labels": True, "hard": False},
    "weights": {"soft_labels": False, "hard": False},
    "drop": {"soft_labels": False, "hard": True},
    "flip": {"soft_labels": True, "hard": True},
}
"""Options of ``AuditedWeights`` by what a pair that may be wrong is used for."""


def refine(
    run: str,
    output: str | None = None,
    labels: Labels = "soft",
    share: float | None = None,
    beta: float | None = None,
    scorer: Literal["policy", "dpo", "vnet"] = "policy",
    checkpoint: str = "last",
    micro_batch_size: int | None = None,
    easiest: float | None = None,
    decisions: str | None = None,
) -> None:
    """Trains a run's policy once more, from the reference, with what the run's own audit says of each label.

    All of the run's configuration is carried over. The second pass is a run of its own beside the first, with
    the audit in its folder ``audit`` and a comparison of the two at the end. The same command goes on where
    it was killed.

    Args:
        run: folder of a finished preference run.
        output: folder of the second pass; default: the run's name with ``-refined``.
        labels: "soft" learns from both orders of a pair, each as far as it is probably right; "weights" from
            the label as observed, as far as it is; "drop" leaves suspects out; "flip" exchanges them;
            "easiest" trains on the pairs that policies which have not seen them find easiest, from easy to
            difficult (Selective DPO), and needs ``--scorer dpo``.
        share: of wrong labels, where it is known; default: what the audit estimates, and where it cannot,
            the most that the pairs which the policy is surest of leave, up to 0.45: told too high a share the
            second pass loses little, told too low a one most of its gain.
        beta: of the second pass; default: the first run's. A policy goes further with soft labels than with
            wrong ones, so the beta that suits DPO on clean labels is a good first choice.
        scorer: who judges: "policy" is the run's own, "dpo" and "vnet" as in ``pacmr audit``, of which "dpo"
            trains two more policies.
        checkpoint: which of the run's folder ``checkpoints`` judges, by its name without .ckpt.
        micro_batch_size: pairs in one forward pass of the audit; default: that of training.
        easiest: share of the pairs that is taken with ``--labels easiest``; default: 0.5.
        decisions: file of a person's decisions on pairs, as in ``pacmr audit``: these labels are fixed, and
            those of them on a random sample tell the share where ``share`` does not.

    Raises:
        UserError: the run's files are missing, an option is out of range, or the folder holds something else.
    """
    found = find_run(run, checkpoint)
    if found.data["init_args"].get("clean_meta"):
        raise UserError(
            f"The run {run} has clean_meta pairs, which it did not train on and no audit has seen; refine a "
            "run without them."
        )
    folder = Path(output) if output else Path(run).with_name(f"{Path(run).name}-refined")
    asked = {"run": str(run), "labels": labels, "share": share, "beta": beta}
    asked |= {"scorer": scorer, "checkpoint": checkpoint, "decisions": _kept(decisions)}
    if labels == "easiest":
        easiest = 0.5 if easiest is None else easiest
        asked["easiest"] = easiest
    _check_easiest(labels, easiest, scorer)
    if labels == "easiest" and decisions is not None:
        raise UserError(
            f"decisions is {decisions}, but labels is easiest, which goes by difficulty alone; take "
            "another, or train on the file of pacmr audit --decisions --cleaned."
        )
    check_folder(folder, asked, RECORD)
    table = folder / AUDIT / "pairs.parquet"
    if not (folder / RECORD).exists():
        audit(
            run,
            scorer,
            str(folder / AUDIT),
            checkpoint,
            share=share,
            fallback_share=SAFE_SHARE,
            micro_batch_size=micro_batch_size,
            decisions=decisions,
        )
        write_record(folder / RECORD, asked)
    if not (folder / SUMMARY).exists():
        _second_pass(found, folder, _use(labels, table, easiest), beta)
    compare_passes(run, folder)


def check_folder(folder: Path, asked: dict[str, Any], record: str) -> None:
    """Refuses a folder that holds a run, or a second pass that was asked for with other options.

    Args:
        folder: of the second pass.
        asked: its options.
        record: file in the folder where ``write_record`` has put them.

    Raises:
        UserError: the folder holds something else.
    """
    path = folder / record
    if not (folder / CONFIG).exists() and not path.exists():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        found = {}
    for name, value in asked.items():
        if found.get(name) != value:
            held = f"a second pass with {name} {found[name]}" if name in found else "another run"
            raise UserError(f"The folder {folder} holds {held} already; name another with --output.")


def write_record(path: Path, asked: dict[str, Any]) -> None:
    """Keeps what was asked for."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")


def train_again(first: Run, folder: Path, options: dict[str, str], own: Iterable[str]) -> None:
    """``pacmr fit`` with the first run's configuration and other options; it goes on where it was killed.

    Args:
        first: the first run.
        folder: of the second pass, which is a run of its own.
        options: of the command line, by name.
        own: names of what belongs to the second pass in that folder and not to its fit.
    """
    words = ["--config", str(Path(first.folder) / CONFIG)]
    options = options | {"trainer.default_root_dir": str(folder)}
    if isinstance(asked := first.trainer.get("logger"), (dict, list)):
        options["trainer.logger"] = json.dumps(loggers_of_another(asked, folder.name))
    words += [word for name, value in options.items() for word in (f"--{name}", value)]
    fit(folder, words, own)


def compare_passes(first: str, folder: Path) -> None:
    """Prints the two runs side by side, and draws them where both were validated."""
    from ..analysis.learning_curves import validated

    runs = [first, str(folder)]
    compare(runs, figure=str(folder / "comparison.png") if all(map(validated, runs)) else None)


def fit(folder: Path, words: list[str], own: Iterable[str] = ()) -> None:
    """``pacmr fit`` in this process; a folder with a checkpoint goes on, what else a kill has left goes.

    Args:
        folder: of the run.
        words: of the command line, after ``fit``.
        own: names in the folder that are not the run's.
    """
    from .fit import PacmrCLI

    if (folder / CHECKPOINTS / LAST).exists():
        words = [*words, "--ckpt_path", "last"]
    elif folder.exists():
        _clear(folder, own)
    with _command_line(["fit", *words]):
        PacmrCLI()


def _kept(decisions: str | None) -> str | None:
    """What a record keeps of a file of decisions, which may change under its name."""
    if decisions is None:
        return None
    path = Path(decisions).expanduser()
    digest = sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else "missing"
    return f"{decisions} ({digest})"


def _check_easiest(labels: Labels, easiest: float | None, scorer: str) -> None:
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
            f"scorer is {scorer}, but what is easy is asked of policies that have not seen the pairs; use "
            "--scorer dpo."
        )


def _use(labels: Labels, table: Path, easiest: float | None) -> dict[str, str]:
    """Options of ``pacmr fit`` with which the second pass learns from the audit."""
    if labels == "easiest":
        order = {"data.curriculum": str(table), "data.curriculum_share": str(easiest)}
        return {"model.weighting": "Unweighted", **order}
    return {
        "model.weighting": "AuditedWeights",
        "model.weighting.audit": str(table),
        **{f"model.weighting.{name}": json.dumps(value) for name, value in USES[labels].items()},
    }


def _second_pass(first: Run, folder: Path, use: dict[str, str], beta: float | None) -> None:
    """The first run once more, with what the audit has found."""
    options = {
        "model.method": f"{first.model['init_args']['method']}-refined",
        **objective(first.model["init_args"], beta),
        **use,
    }
    train_again(first, folder, options, (AUDIT, RECORD))


def objective(options: dict[str, Any], beta: float | None) -> dict[str, str]:
    """DPO in place of an objective that weighs or corrects labels itself, since the audit does it now."""
    first = options.get("objective") or {"class_path": "pacmr_lightning.objectives.DPO"}
    beta = (first.get("init_args") or {}).get("beta") if beta is None else beta
    kind = resolve_name(first["class_path"])
    changed = {}
    if kind.grouped or kind.corrects_labels:
        print(f"The second pass learns with DPO, since {kind.__name__} makes its own of wrong labels.")
        changed["model.objective"] = "DPO"
    return changed | ({} if beta is None else {"model.objective.beta": json.dumps(beta)})


def _clear(folder: Path, own: Iterable[str]) -> None:
    """Removes what a fit that was killed before its first checkpoint has left."""
    for path in folder.iterdir():
        if path.name not in own:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    """Inside, the process was started with these words, with which Lightning starts DDP's other processes."""
    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        yield
    finally:
        sys.argv = before


def main(arguments: list[str]) -> None:
    """``pacmr refine RUN`` and the options of ``refine``."""
    run_tool("refine", refine, arguments, positional=True)
