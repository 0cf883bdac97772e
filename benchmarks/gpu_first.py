"""Measurements for the first fifteen minutes on a GPU: what works, and how fast it is beside TRL.

    python benchmarks/gpu_first.py runs 1.5B --output gpu/ [--earlier rows.jsonl]
    python benchmarks/gpu_first.py --write research/notebook/one-gpu.md --earlier gpu/rows.jsonl

runs stages (``gpu_stages.py``), each in a process of its own with a deadline. A row is appended to
``rows.jsonl`` in the output folder as soon as it is measured. A row that fails is written with its error, and
the next one follows. Rows that the output folder or earlier files have without an error are not measured
again. The second command writes the tables of all rows into a page. ``--device cpu`` runs tiny shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from end_with_parent import end_with_parent

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is on the Hub; TRL would report its use

STAGES = {
    **{"runs": 45, "1.5B": 165, "7B": 100},
    **{"TRL-1.5B": 40, "Liger-1.5B": 40, "TRL-7B": 30, "Liger-7B": 30, "votes": 200},
    **{"correct": 70, "probes": 40},
}
"""Seconds of each stage on a GPU, its start of about 15 included; a CPU has ten times as many."""
GRACE = 10
"""Seconds after a deadline until a stage that does not end is killed."""
BEGIN, END = "<!-- tables of gpu_first.py -->", "<!-- end of the tables -->"
Row = dict[str, Any]


class Deadline(BaseException):
    """The stage's time is over."""


def rows_of(files: list[Path]) -> dict[tuple[str, str], Row]:
    """Rows by stage and name; a later one replaces an earlier one, but an error replaces no measurement."""
    found: dict[tuple[str, str], Row] = {}
    for line in "\n".join(file.read_text() for file in files if file.exists()).splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the process was killed while it wrote
            row = json.loads(line)
            key = row["stage"], row["row"]
            if "error" not in row or "error" in found.get(key, row):
                found[key] = row
    return found


def add(file: Path, row: Row) -> None:
    """Append a row, on the disk at once, and print it."""
    before = file.read_bytes()[-1:] if file.exists() else b""
    with file.open("a") as out:  # after half a line of a process that was killed, on a line of its own
        out.write("\n" * (before not in (b"", b"\n")) + json.dumps(row) + "\n")
        out.flush()
        os.fsync(out.fileno())
    said = f"ERROR {row['error']}" if "error" in row else row.get("says", "")
    print(f"{row['stage']}: {row['row']} ({row['seconds']} s) {said}".rstrip(), flush=True)


def run_stage(name: str, options: argparse.Namespace) -> None:
    """Measure the rows of a stage that are not done, until its deadline; ends the process."""

    def stop(*_: object) -> None:
        raise Deadline(f"not done when the stage's {options.deadline:g} s were over")

    def write(found: Row | BaseException) -> None:
        if isinstance(found, BaseException):
            lines = str(found).strip().splitlines() or [""]
            found = {"error": f"{type(found).__name__}: {lines[0][:300]}"}
        seconds = round(time.monotonic() - start, 1)
        add(options.output / "rows.jsonl", {"stage": name, "row": row, **about, "seconds": seconds, **found})

    os.setpgrp()
    end_with_parent()
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, options.deadline)
    row, about, start = "its start", {}, time.monotonic()
    try:
        import gpu_stages

        about["machine"] = gpu_stages.machine(options)
        for row, measure in gpu_stages.STAGES[name](options):
            if row in options.done:
                continue
            start = time.monotonic()
            try:
                write(gpu_stages.measured(options, measure))
            except Exception as error:  # out of memory, not installed, refused: others go on
                write(error)
    except (Deadline, Exception) as error:
        write(error)
    os._exit(0)  # threads that wait for whole runs would not let it end


def start_stage(name: str, options: argparse.Namespace) -> None:
    """A stage in a process of its own, which is killed with its children if it outlives its deadline."""
    options.deadline = options.seconds or STAGES[name] * (1 if options.on_gpu else 10)
    known = rows_of([*options.earlier, options.output / "rows.jsonl"])
    options.done = {row for (stage, row), found in known.items() if stage == name and "error" not in found}
    start = time.monotonic()
    child = get_context("fork").Process(target=run_stage, args=(name, options))
    child.start()
    try:
        child.join(options.deadline + GRACE)
        status = f"killed {GRACE} s after its deadline" if child.is_alive() else child.exitcode
    finally:  # what it has started ends with it, also at ^C and SIGTERM
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
    if status:
        spent = round(time.monotonic() - start, 1)
        row = {"stage": name, "row": "its process", "seconds": spent, "error": f"ended with status {status}"}
        add(options.output / "rows.jsonl", row)


def table(headings: list[str], lines: list[list[str]]) -> list[str]:
    """Markdown, if there are lines."""
    rows = [headings, ["---", *["---:"] * (len(headings) - 1)], *lines]
    text = "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)
    return [text] if lines else []


def updates_of(rows: dict[str, Row], product: float | None) -> list[list[str]]:
    """Updates of DPO by setting, with the time of TRL at its fastest over each.

    Args:
        rows: of a stage, by name.
        product: operations per second of one large bf16 matrix product, if it was measured.
    """
    from machine import spread

    turns: dict[str, list[Row]] = {}
    for name, row in rows.items():
        turns.setdefault(name.rpartition(", turn")[0], []).append(row)
    seconds = {name: [s for row in found for s in row["updates"]] for name, found in turns.items()}
    trl = [median(found) for name, found in seconds.items() if name.startswith("TRL")]
    work = next((row for row in rows.values() if "needed" in row), {"tokens": 0, "needed": 0})
    lines = []
    for name, found in seconds.items():
        own = median(found)
        ratio = f"{min(trl) / own:.2f}" if trl else ""
        share = f"{work['needed'] / own / product:.0%}" if product else ""
        peak = peak_of(turns[name][-1])
        lines.append([name, spread(found), ratio, f"{work['tokens'] / own:,.0f}", share, peak])
    return lines


def peak_of(row: Row) -> str:
    """GiB, of a GPU."""
    return f"{row['peak']:.1f}" if "peak" in row else ""


def page(found: dict[tuple[str, str], Row]) -> str:
    """Markdown of all rows."""
    parts = []
    product = found.get(("probes", "matrix product"), {}).get("flops")
    of_updates = ["DPO", "s an update", "TRL's fastest over it", "tokens/s", "share of one product"]
    for stage in STAGES:
        rows = {name: row for (of, name), row in found.items() if of == stage}
        said = (re.sub(r" load [\d.]+;", "", row.get("machine", "")) for row in rows.values())
        machines = filter(None, dict.fromkeys(said))
        turns = {name: rows.pop(name) for name in [*rows] if "updates" in rows[name]}
        others = []
        for name, row in rows.items():
            result = "not measured" if "error" in row else "right" if row.get("right", True) else "WRONG"
            said = row["error"][:80] if "error" in row else row.get("says", "")
            others.append([name, result, said, str(row["seconds"]), peak_of(row)])
        tables = table([*of_updates, "peak GiB"], updates_of(turns, product))
        tables += table([stage, "", "", "s", "peak GiB"], others)
        parts += [f"#### {stage}", *machines, *tables] if tables else []
    return "\n\n".join(parts)


def write_page(file: Path, earlier: list[Path]) -> None:
    """Put the tables between the page's two marks; written whole or not at all."""
    from pacmr_lightning.files import replacing

    head, begin, rest = file.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        sys.exit(f"{file} has no lines {BEGIN} and {END}; add them where the tables belong.")
    with replacing(file) as part:
        part.write_text(f"{head}{begin}\n\n{page(rows_of(earlier))}\n\n{end}{tail}")


def main() -> int:
    """Return 0 if every row of the stages is measured and right, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--output", type=Path, help="folder for rows.jsonl")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="rows.jsonl of earlier commands")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, help="of each stage, in place of its own deadline")
    parser.add_argument("--text", type=Path, help="folder with model/ and folds/, for the stage votes")
    parser.add_argument("--write", type=Path, help="page whose tables are written; no stage is run")
    options = parser.parse_args()
    if missing := [file for file in options.earlier if not file.exists()]:
        parser.error(f"--earlier {missing[0]} does not exist.")
    if options.write:
        write_page(options.write, options.earlier)
        return 0
    if not options.output or not options.stages or set(options.stages) - set(STAGES):
        parser.error(f"name an --output and one stage or more of {', '.join(STAGES)}.")
    if "votes" in options.stages and not options.text:
        parser.error("the stage votes needs --text, a folder with model/ and folds/; benchmarks/README.md.")
    options.output.mkdir(parents=True, exist_ok=True)
    options.on_gpu = options.device == "cuda"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for name in options.stages:
        with tempfile.TemporaryDirectory() as scratch:
            options.folder = Path(scratch)
            start_stage(name, options)
    found = rows_of([*options.earlier, options.output / "rows.jsonl"])
    asked = [row for (of, _), row in found.items() if of in options.stages]
    return int(any("error" in row or not row.get("right", True) for row in asked))


if __name__ == "__main__":
    sys.exit(main())
