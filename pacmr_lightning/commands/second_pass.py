"""Second-pass training: a run of its own beside the first, in one resumable command."""

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
from ..errors import UserError
from ..files import check_writable, content_digest, local_path
from ..runs.checkpoints import LAST
from ..runs.finished_run import FinishedRun
from ..runs.folder import AUDIT, CHECKPOINTS, CONFIG, read_summary
from ..runs.loggers import loggers_of_another
from .compare import compare

FURTHEST = 10.0
"""KL to the reference, in nats per response, above which a second pass gets a warning."""


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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        found = {}
    for name, value in asked.items():
        if found.get(name) != value:
            held = f"a second pass with {name} {found[name]}" if name in found else "another run"
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
        for path in folder.iterdir():
            if path.name not in own:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    with _command_line(["fit", *words]):
        PacmrCLI()


def compare_passes(first: str, folder: Path) -> None:
    """Print the two runs side by side with warnings on the second, and draw validated ones."""
    runs = [first, str(folder)]
    compare(runs, figure=str(folder / "comparison.png") if all(map(validated, runs)) else None)
    for doubt in doubts(*map(read_summary, runs)):
        print(doubt, file=sys.stderr)


def doubts(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return warnings on a second pass: a high KL, or significantly lower validation accuracy."""
    found = []
    kls = [summary["metrics"].get("val/sequence_kl") for summary in (first, second)]
    if kls[1] is not None and kls[1] > FURTHEST:
        other = "" if kls[0] is None else f" (the first run's: {kls[0]:.1f})"
        found.append(f"The second pass has a high KL to the reference, {kls[1]:.1f} nats{other}")
    before, after = (summary["val_accuracy"] for summary in (first, second))
    pairs = second.get("val_pairs")
    if pairs and before is not None and after is not None:
        error = math.sqrt((before * (1 - before) + after * (1 - after)) / pairs)
        if before - after > 2 * error:
            found.append(
                f"The second pass has a significantly lower validation accuracy than the first, {after:.3f} "
                f"against {before:.3f} on {pairs:,} pairs"
            )
    return [f"{reason}: read some of its responses, or raise --beta." for reason in found]


@contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    """Set sys.argv, from which Lightning starts DDP's other processes."""
    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        yield
    finally:
        sys.argv = before
