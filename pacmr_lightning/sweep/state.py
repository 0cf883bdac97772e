"""What a cell's folder says of it: done, failed, or still to run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError
from ..files import content_digest, replacing
from ..runs.folder import CHECKPOINTS, CONFIG, SUMMARY
from .cells import Cell, config_contents

RECORD = "cell.json"
"""File of a cell's arguments, of its configs' contents, and of its exit status."""
LOG = "log.txt"
"""File of a cell's output."""

State = Literal["done", "failed", "waiting"]


def state(cell: Cell) -> State:
    """Failed is a cell that ended without its summary; one that was interrupted waits.

    Raises:
        UserError: the folder holds a run with other arguments or other configs.
    """
    if not any((cell.folder / name).exists() for name in (RECORD, CONFIG)):
        return "waiting"
    record = _read(cell)
    for key, value in _described(cell).items():
        if record.get(key) != value:
            raise UserError(
                f"The folder {cell.folder} holds a run with other {key} than the sweep file has now; delete "
                "it to run the cell again, or give the sweep another output."
            )
    if (cell.folder / SUMMARY).exists():
        return "done"
    return "waiting" if record["exit"] is None else "failed"


def prepare(cell: Cell) -> list[list[str]]:
    """Makes the cell's folder ready for a run that starts, or goes on; returns the commands to run.

    A run that was interrupted before its first checkpoint starts anew.
    """
    goes_on = (cell.folder / CHECKPOINTS / "last.ckpt").exists()
    if not goes_on and cell.folder.exists():
        shutil.rmtree(cell.folder)
    _write(cell, {**_described(cell), "resumed": goes_on, "exit": None})
    fit = cell.arguments + (["--ckpt_path", "last"] if goes_on else [])
    return [cell.first, fit] if cell.first else [fit]


def ready(cell: Cell) -> bool:
    """Whether the cell that has to be done first, if any, is done."""
    return cell.after is None or (cell.after / SUMMARY).exists()


def end(cell: Cell, status: int) -> bool:
    """Keeps the exit status of a run, negative for a signal; false if the cell has to run once more.

    A run that goes on from its last update has nothing left to train, and writes no summary.
    """
    record = _read(cell)
    if status == 0 and record["resumed"] and not (cell.folder / SUMMARY).exists():
        shutil.rmtree(cell.folder)
        return False
    _write(cell, record | {"exit": status})
    return True


def reason(cell: Cell) -> str:
    """Why a cell failed: the signal that killed it, and the last line that it said."""
    status = _read(cell)["exit"]
    if status == 0:
        return f"it wrote no {SUMMARY}; add the callback RunSummary to trainer.callbacks"
    said = last_line(cell.folder / LOG)
    return f"killed by {signal.Signals(-status).name}; {said}" if status < 0 else said


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def _described(cell: Cell) -> dict[str, Any]:
    """What decides the cell's result, as it comes back from JSON."""
    found = {"arguments": cell.arguments, "configs": config_contents(cell), "first": cell.first}
    found["files"] = _files([cell.arguments, found["configs"]], cell.folder.parent)
    # Records have neither of the last two where they are empty.
    return json.loads(json.dumps({key: value for key, value in found.items() if value}, default=str))


def _files(options: Any, output: Path) -> dict[str, str]:
    """Return digests of the files that options name, by path: not of configs, nor of other cells' files."""
    if isinstance(options, str):
        data = os.path.isfile(options) and not options.endswith((".yaml", ".yml"))
        made = data and Path(options).resolve().is_relative_to(output.resolve())
        return {options: content_digest(options)} if data and not made else {}
    values = options.values() if isinstance(options, dict) else options if isinstance(options, list) else []
    return {path: digest for value in values for path, digest in _files(value, output).items()}


def _read(cell: Cell) -> dict[str, Any]:
    """The record; empty where there is none that can be read."""
    try:
        return json.loads((cell.folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}


def _write(cell: Cell, record: dict[str, Any]) -> None:
    with replacing(cell.folder / RECORD) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
