"""A second pass: a run of its own beside the first, in one command that goes on where it was killed."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..analysis.learning_curves import validated
from ..audit import AuditOptions, audit
from ..errors import UserError
from ..files import check_writable, content_digest, replacing
from ..objectives import DPO
from ..runs.checkpoints import LAST
from ..runs.finished_run import Run
from ..runs.folder import CHECKPOINTS, CONFIG
from ..runs.loggers import loggers_of_another
from ..runs.summary import read_summary
from .audit import show
from .compare import compare

AUDIT = "audit"
"""Folder of the audit of the first run, inside the second pass's folder."""
SAFE_SHARE = 0.45
"""Of wrong labels, at most, where the audit cannot tell it."""
FURTHEST = 10.0
"""Nats from the reference to whole responses. The best of 60,000 samples of the reference is as far."""


def check_beta(beta: float | None) -> None:
    """Check the second pass's beta before the work that comes before it.

    Raises:
        UserError: it is not above 0, or infinite.
    """
    if beta is not None:
        DPO(beta)


def folder_beside(run: str, ending: str) -> Path:
    """The folder of a run's second pass where none is named: the run's name and an ending, in its folder."""
    path = Path(run)
    path = path if path.name not in ("", "..") else path.resolve()  # "." has no name of its own
    return path.with_name(f"{path.name}-{ending}")


def kept_file(name: str, path: Path) -> str:
    """Return what a record keeps of a file, which may change under its name."""
    return f"{name} ({content_digest(path)[:12] if path.is_file() else 'missing'})"


def _check_folder(folder: Path, asked: dict[str, Any], record: str) -> None:
    """Refuse a folder that holds a run, a second pass that was asked for with other options, or other files.

    What else is in the folder goes when the second pass's fit begins, so nothing else may be in it.
    """
    check_writable("output", str(folder), folder)
    path = folder / record
    if not (folder / CONFIG).exists() and not path.exists():
        # An audit that was killed before the record was written has left its folder alone.
        names = sorted(left.name for left in folder.iterdir()) if folder.exists() else []
        if strange := [name for name in names if name != AUDIT and not name.endswith(".partial")]:
            raise UserError(
                f"The folder {folder} holds {strange[0]}, which is no part of a second pass; name a new "
                "folder with --output."
            )
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        found = {}
    for name, value in asked.items():
        if found.get(name) != value:
            held = f"a second pass with {name} {found[name]}" if name in found else "another run"
            raise UserError(f"The folder {folder} holds {held} already; name another with --output.")


def audit_first(
    run: str,
    folder: Path,
    asked: dict[str, Any],
    record: str,
    options: AuditOptions,
    needs_rate: bool = False,
) -> None:
    """Audit the first run, unless that is done, and keep what was asked for.

    Args:
        run: folder of the first run.
        folder: of the second pass.
        asked: its options.
        record: file in the folder for them.
        options: of the audit.
        needs_rate: whether nothing can be learned from an audit without a noise rate.

    Raises:
        UserError: the folder holds something else, or the audit cannot be made or cannot tell the rate.
    """
    read_summary(run)  # which the comparison at the end needs
    _check_folder(folder, asked, record)
    if (folder / record).exists():
        return
    found = audit(run, options=options)
    show(found)
    if needs_rate and found.noise_rate is None:
        raise UserError(
            f"The scores of {options.scorer} fit labels that are coin flips as well, so there may be nothing "
            f"to learn from; take another --scorer, a run that has learned more than {run}, or --share "
            f"{SAFE_SHARE} to go on all the same."
        )
    with replacing(folder / record) as temporary:
        temporary.write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")


def train_again(
    first: Run, folder: Path, ending: str, beta: float | None, options: dict[str, str], own: Iterable[str]
) -> None:
    """``pacmr fit`` with the first run's configuration and other options; it goes on where it was killed.

    Args:
        first: the first run.
        folder: of the second pass, which is a run of its own.
        ending: of the method's name.
        beta: of the objective; None for the first run's.
        options: of the command line, by name.
        own: names of what belongs to the second pass in that folder and not to its fit.
    """
    model = first.model["init_args"]
    named = {"model.method": f"{model['method']}-{ending}", **objective(model, beta)}
    options = named | options | {"trainer.default_root_dir": str(folder)}
    if isinstance(asked := first.trainer.get("logger"), (dict, list)):
        options["trainer.logger"] = json.dumps(loggers_of_another(asked, folder.name))
    words = ["--config", str(Path(first.folder) / CONFIG)]
    fit(folder, words + [word for name, value in options.items() for word in (f"--{name}", value)], own)


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


def fit(folder: Path, words: list[str], own: Iterable[str] = ()) -> None:
    """``pacmr fit`` in this process; a folder with a checkpoint goes on, what else a kill has left goes.

    ``own`` names what is not the run's in that folder.
    """
    from .fit import PacmrCLI  # its import takes long, and bad input is told of before

    if (folder / CHECKPOINTS / LAST).exists():
        words = [*words, "--ckpt_path", "last"]
    elif folder.exists():
        for path in folder.iterdir():
            if path.name not in own:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    with _command_line(["fit", *words]):
        PacmrCLI()


def compare_passes(first: str, folder: Path) -> None:
    """Print the two runs side by side and what speaks against the second, and draw validated ones."""
    runs = [first, str(folder)]
    compare(runs, figure=str(folder / "comparison.png") if all(map(validated, runs)) else None)
    for doubt in doubts(*map(read_summary, runs)):
        print(doubt, file=sys.stderr)


def doubts(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Reasons not to use a second pass before somebody has read what it writes, by the summaries of two runs.

    It is worse than the first pass where it has gone too far, which its KL says (``val/sequence_kl``;
    docs/results.md has how well), or where it agrees with clearly fewer labels of the validation pairs. That
    is seldom by chance, and seldom seen: flipped validation labels hide most of it.
    """
    found = []
    kls = [summary["metrics"].get("val/sequence_kl") for summary in (first, second)]
    if kls[1] is not None and kls[1] > FURTHEST:
        other = "" if kls[0] is None else f" (the first run's: {kls[0]:.1f})"
        found.append(f"Its responses are {kls[1]:.1f} nats from the reference{other}, which is far")
    before, after = (summary["val_accuracy"] for summary in (first, second))
    pairs = second.get("val_pairs")
    if pairs and before is not None and after is not None:
        error = math.sqrt((before * (1 - before) + after * (1 - after)) / pairs)
        if before - after > 2 * error:
            found.append(
                f"It agrees with fewer labels of the validation pairs than the first run, {after:.3f} of "
                f"{pairs:,} and not {before:.3f}, beyond chance"
            )
    return [f"{reason}: read some of its responses, or try a larger --beta." for reason in found]


@contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    """Inside, the process was started with these words, with which Lightning starts DDP's other processes."""
    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        yield
    finally:
        sys.argv = before
