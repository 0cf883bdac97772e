"""State of a cell, kept in its folder."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.constants import HF_HUB_CACHE

from ..errors import UserError
from ..files import content_digest, files_of, local_path, write_json
from ..runs.folder import CHECKPOINTS, CONFIG, SUMMARY
from .cells import Cell, config_contents

RECORD = "cell.json"
"""Arguments, config contents and exit status of a cell; the SLURM job that runs it, and why that ended."""
ADAPTER = "adapter_config.json"
LOG = "log.txt"
"""Output of a cell."""
STOPPED = "Stopped by"
"""Begin of the last line of a run that SIGTERM stopped, and that goes on."""

State = Literal["done", "failed", "submitted", "waiting"]


def state_of(cell: Cell) -> State:
    """Return a cell's state: failed if it ended without a summary, or without the responses it needs.

    Interrupted cells wait, and those whose responses are of other options or prompts than needed now.

    A cell that a SLURM job has, or will run, is submitted.

    Raises UserError if the folder holds a run with other arguments or configs.
    """
    if not any((cell.folder / name).exists() for name in (RECORD, CONFIG)):
        return "waiting"
    record = _read(cell.folder)
    begun = "arguments" in record or (cell.folder / CONFIG).exists()
    now = _described(cell) if begun else {}
    # What a run wrote itself is new.
    changed = [path for path, it in record.get("files", {}).items() if now and now["files"].get(path) != it]
    for key, value in now.items():
        if changed if key == "files" else (record.get(key) or None) != (value or None):
            what = "settings of the cell before it" if key == "predecessor" else key
            raise UserError(
                f"The folder {cell.folder} holds a run with other {what} than the sweep file has now"
                f"{f' ({changed[0]} has changed)' if changed else ''}; delete it to run the cell again, or "
                "give the sweep another output."
            )
    trained = (cell.folder / SUMMARY).exists()
    if trained and (not cell.predict or has_responses(cell)):
        return "done"
    if "ended" in record or record["exit"] not in ((None, 0) if trained else (None,)):
        return "failed"
    return "submitted" if "job" in record and record["exit"] is None else "waiting"


def has_responses(cell: Cell) -> bool:
    """True if the cell's responses are those of its options and prompts as they are now."""
    return cell.responses.exists() and _read(cell.folder).get("predicted") == _predicted(cell)


def job_of(cell: Cell) -> str | None:
    """Return the SLURM job that has, or will run, a cell."""
    record = _read(cell.folder)
    return record.get("job") if record.get("exit") is None and "ended" not in record else None


def submitted(cell: Cell, job: str) -> None:
    """Record the SLURM job that will run a cell."""
    kept = {key: value for key, value in _read(cell.folder).items() if key not in ("ended", "resumed")}
    _write(cell, kept | {"exit": None, "job": job})


def give_up(cell: Cell, why: str) -> None:
    """Record why SLURM or a preparation ended a cell without an exit status."""
    _write(cell, {"exit": None} | _read(cell.folder) | {"ended": why})


def prepare(cell: Cell, job: str | None = None) -> list[list[str]]:
    """Prepare the cell's folder and return the commands to run; it resumes only from a checkpoint.

    ``job`` is the SLURM job that runs it. A trained cell only predicts.
    """
    trained = (cell.folder / SUMMARY).exists()
    goes_on = (cell.folder / CHECKPOINTS / "last.ckpt").exists()
    if not trained and not goes_on and cell.folder.exists():
        for path in cell.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != RECORD:
                path.unlink()
    record = {**_described(cell), "resumed": goes_on and not trained, "exit": None}
    _write(cell, record | ({"job": job} if job else {}))
    if trained:
        return [cell.prediction]
    fit = resuming(cell.arguments) if goes_on else cell.arguments
    first = [] if goes_on else resuming(cell.first)
    return [words for words in (first, fit, cell.predict and cell.prediction) if words]


def resuming(words: list[str]) -> list[str]:
    """Let a ``pacmr fit`` go on if it was interrupted; else it begins."""
    return words + (["--ckpt_path", "last"] if words[:1] == ["fit"] and "--ckpt_path" not in words else [])


def ready(cell: Cell) -> bool:
    """True unless the cell's predecessor is unfinished."""
    return cell.after is None or (cell.after / SUMMARY).exists()


def end(cell: Cell, status: int) -> bool:
    """Save a run's exit status, negative for a signal; return false if the cell must run again.

    A run that was stopped by SIGTERM goes on.
    """
    record, stopped = _read(cell.folder), last_line(cell.folder / LOG).startswith(STOPPED)
    if status == 0 and stopped and not (cell.folder / SUMMARY).exists():
        return False
    predicted = {"predicted": _predicted(cell)} if cell.predict and status == 0 else {}
    _write(cell, record | {"exit": status} | predicted)
    return True


def reason(cell: Cell) -> str:
    """Return why a cell failed: its signal, its SLURM job's end, and its last line of output."""
    record, said = _read(cell.folder), last_line(cell.folder / LOG)
    if "ended" in record:
        return f"{record['ended']}; {said}" if "resumed" in record else record["ended"]
    if (status := record["exit"]) == 0:
        return f"it wrote no {SUMMARY}; add the callback RunSummary to trainer.callbacks"
    return f"killed by {signal.Signals(-status).name}; {said}" if status < 0 else said


def last_line(log: Path) -> str:
    """Return a log's last nonempty line."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def _described(cell: Cell) -> dict[str, Any]:
    """Settings that determine the cell's result, as read from JSON."""
    configs = config_contents(cell)
    settings: dict[str, Any] = {"arguments": cell.arguments, "configs": configs, "first": cell.first}
    if cell.after:
        before = _read(cell.after)
        settings["predecessor"] = {key: before.get(key) for key in (*settings, "predecessor", "files")}
    files = _inputs([given_options(cell.arguments), *configs.values()], cell)
    return json.loads(json.dumps(settings, default=str)) | {"files": files}


def _predicted(cell: Cell) -> dict[str, Any]:
    """Settings that determine the responses of a trained cell."""
    return {"options": cell.predict, "files": _inputs([given_options(cell.predict)], cell)}


def given_options(words: list[str]) -> dict[str, Any]:
    """Return the values of the options of a ``pacmr`` command, those in JSON as objects."""
    options: dict[str, Any] = {}
    words = words[len(words) % 2 :]  # without the command
    for name, text in zip(words[::2], words[1::2], strict=True):
        options[name[2:]] = text
        with suppress(ValueError):
            options[name[2:]] = json.loads(text)
    return options


def texts_in(options: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in options, those inside of dicts and lists included, each after its option's name."""
    if isinstance(options, dict | list):
        for key, value in options.items() if isinstance(options, dict) else enumerate(options):
            yield from texts_in(value, f"{name}.{key}")
    elif isinstance(options, str) and options:
        yield name, options


def _inputs(options: Any, cell: Cell) -> dict[str, str]:
    """Return digests (on the Hub commits) by path of what options read, but configs and cells' own files."""
    digests: dict[str, str] = {}
    for name, text in texts_in(options):
        path = local_path(text).resolve()
        own = any(path.is_relative_to(folder.resolve()) for folder in (cell.folder, cell.after) if folder)
        if own or path.suffix in (".yaml", ".yml"):
            continue
        is_model = any(os.path.isfile(path / file) for file in ("config.json", "tokenizer.json", ADAPTER))
        # Other folders are written to, by loggers for one.
        is_data = os.path.isdir(path) and re.search(r"\.(source|clean_meta)\b", name)
        if os.path.isfile(path) or is_model or is_data:
            digests[text] = _digest(path, tuple((file, file.stat().st_mtime_ns) for file in files_of(path)))
        else:
            for kind in ("models", "datasets"):
                commit = Path(HF_HUB_CACHE, f"{kind}--{text.replace('/', '--')}", "refs", "main")
                if os.path.isfile(commit):
                    digests[text] = commit.read_text()
        if os.path.isfile(path / ADAPTER):
            digests |= _inputs(json.loads((path / ADAPTER).read_text()).get("base_model_name_or_path"), cell)
    return digests


@lru_cache
def _digest(path: Path, changed: tuple[tuple[Path, int], ...]) -> str:
    """Return the digest of a file or folder, which is the same for all cells until a file changes."""
    return content_digest(path)


def _read(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}


def _write(cell: Cell, record: dict[str, Any]) -> None:
    write_json(cell.folder / RECORD, record)
