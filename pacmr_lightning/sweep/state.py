"""State of a cell, kept in its folder."""

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
"""Arguments, config contents and exit status of a cell."""
LOG = "log.txt"
"""Output of a cell."""

State = Literal["done", "failed", "waiting"]


def state_of(cell: Cell) -> State:
    """Return a cell's state: failed if it ended without a summary, or without the responses it needs.

    Interrupted cells wait, and those whose responses are of other options or prompts than needed now.

    Raises UserError if the folder holds a run with other arguments or configs.
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
    trained = (cell.folder / SUMMARY).exists()
    if trained and (not cell.predict or has_responses(cell)):
        return "done"
    return "waiting" if record["exit"] is None or (trained and record["exit"] == 0) else "failed"


def has_responses(cell: Cell) -> bool:
    """True if the cell's responses are those of its options and prompts as they are now."""
    return cell.responses.exists() and _read(cell).get("predicted") == _predicted(cell)


def prepare(cell: Cell) -> list[list[str]]:
    """Prepare the cell's folder and return the commands to run; it resumes only from a checkpoint."""
    if (cell.folder / SUMMARY).exists():  # trained already
        _write(cell, {**_read(cell), "resumed": False, "exit": None})
        return [cell.prediction]
    goes_on = (cell.folder / CHECKPOINTS / "last.ckpt").exists()
    if not goes_on and cell.folder.exists():
        shutil.rmtree(cell.folder)
    _write(cell, {**_described(cell), "resumed": goes_on, "exit": None})
    fit = cell.arguments + (["--ckpt_path", "last"] if goes_on else [])
    return [words for words in (cell.first, fit, cell.predict and cell.prediction) if words]


def ready(cell: Cell) -> bool:
    """True unless the cell's predecessor is unfinished."""
    return cell.after is None or (cell.after / SUMMARY).exists()


def end(cell: Cell, status: int) -> bool:
    """Save a run's exit status, negative for a signal; return false if the cell must run again.

    A run resumed at its last update trains nothing, and writes no summary.
    """
    record = _read(cell)
    if status == 0 and record["resumed"] and not (cell.folder / SUMMARY).exists():
        shutil.rmtree(cell.folder)
        return False
    predicted = {"predicted": _predicted(cell)} if cell.predict and status == 0 else {}
    _write(cell, record | {"exit": status} | predicted)
    return True


def reason(cell: Cell) -> str:
    """Return why a cell failed: its signal and last line of output."""
    status = _read(cell)["exit"]
    if status == 0:
        return f"it wrote no {SUMMARY}; add the callback RunSummary to trainer.callbacks"
    said = last_line(cell.folder / LOG)
    return f"killed by {signal.Signals(-status).name}; {said}" if status < 0 else said


def last_line(log: Path) -> str:
    """Return a log's last nonempty line."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def _described(cell: Cell) -> dict[str, Any]:
    """Settings that determine the cell's result, as read from JSON."""
    found = {"arguments": cell.arguments, "configs": config_contents(cell), "first": cell.first}
    found["files"] = _files([cell.arguments, found["configs"]], cell.folder.parent)
    # Records omit empty values.
    return json.loads(json.dumps({key: value for key, value in found.items() if value}, default=str))


def _predicted(cell: Cell) -> dict[str, Any]:
    """Settings that determine the responses of a trained cell."""
    return {"options": cell.predict, "files": _files(cell.predict, cell.folder.parent)}


def _files(options: Any, output: Path) -> dict[str, str]:
    """Digests by path of files in options, except configs and other cells' files."""
    if isinstance(options, str):
        data = os.path.isfile(options) and not options.endswith((".yaml", ".yml"))
        made = data and Path(options).resolve().is_relative_to(output.resolve())
        return {options: content_digest(options)} if data and not made else {}
    values = options.values() if isinstance(options, dict) else options if isinstance(options, list) else []
    return {path: digest for value in values for path, digest in _files(value, output).items()}


def _read(cell: Cell) -> dict[str, Any]:
    try:
        return json.loads((cell.folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}


def _write(cell: Cell, record: dict[str, Any]) -> None:
    with replacing(cell.folder / RECORD) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
