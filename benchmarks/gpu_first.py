"""Measurements for the first fifteen minutes on a GPU: what works, and how fast it is beside TRL.

    python benchmarks/gpu_first.py probes correct 1.5B --output gpu/ [--earlier rows.jsonl]
    python benchmarks/gpu_first.py --write docs/performance.md --earlier gpu/rows.jsonl

runs stages (``gpu_stages.py``), each in a process of its own with a deadline in seconds. A row is appended to
``rows.jsonl`` in the output folder as soon as it is measured. A row that fails is written with its error, and
the next one follows. Rows that earlier files, or the output folder, have without an error are not measured
again. The second command writes the tables of all rows into a page. ``--device cpu`` runs tiny shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is on the Hub; TRL would report its use

STAGES = {"probes": 40, "correct": 90, "1.5B": 120, "7B": 110, "compiled": 70, "text": 170}
"""Seconds of each stage, its start of about 15 included."""
GRACE = 10
"""Seconds after a deadline until a stage that does not end is killed."""
BEGIN, END = "<!-- tables of gpu_first.py -->", "<!-- end of the tables -->"
Row = dict[str, Any]


class Deadline(BaseException):
    """The stage's time is over."""


def has_gpu() -> bool:
    """True if CUDA's driver finds a device; torch, which takes seconds to import, is not needed."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


def rows_of(files: list[Path]) -> dict[tuple[str, str], Row]:
    """Rows by stage and name; a later one replaces an earlier one, but an error replaces no measurement."""
    found: dict[tuple[str, str], Row] = {}
    for file in files:
        for line in file.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # the process was killed while it wrote
                continue
            key = row["stage"], row["row"]
            if "error" not in row or "error" in found.get(key, row):
                found[key] = row
    return found


def add(file: Path, row: Row) -> None:
    """Append a row, on the disk at once, and print it."""
    before = file.read_bytes()[-1:] if file.exists() else b""
    with file.open("a") as out:  # after half a line of a process that was killed, on a line of its own
        out.write(("\n" if before not in (b"", b"\n") else "") + json.dumps(row) + "\n")
        out.flush()
        os.fsync(out.fileno())
    told = f"ERROR {row['error']}" if "error" in row else row.get("says", "")
    print(f"{row['stage']}: {row['row']} ({row['seconds']} s) {told}".rstrip(), flush=True)


def failure(error: BaseException) -> Row:
    """Why there is no measurement, in one line."""
    lines = str(error).strip().splitlines() or [""]
    return {"error": f"{type(error).__name__}: {lines[0][:300]}"}


def run_stage(name: str, options: argparse.Namespace, done: set[str]) -> None:
    """Measure the rows of a stage that are not done, in this process, until its deadline."""

    def stop(*_: object) -> None:
        raise Deadline(f"not done when the stage's {options.deadline:g} s were over")

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the process that started it
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, options.deadline)
    about: Row = {"stage": name, "row": "its start"}
    start = time.monotonic()

    def write(found: Row) -> None:
        add(options.output / "rows.jsonl", {**about, "seconds": round(time.monotonic() - start, 1), **found})

    try:
        import gpu_stages

        about |= gpu_stages.machine(options.device)
        place = gpu_stages.Place(options.scratch, options.device, done, options.text)
        for row, measure in gpu_stages.STAGES[name](place):
            if row in done:
                continue
            about["row"], start = row, time.monotonic()
            try:
                found = measure()
            except Exception as error:  # out of memory, not installed, refused: others go on
                found = failure(error)
            write(found)
    except (Deadline, Exception) as error:
        write(failure(error))
    os._exit(0)  # threads that wait for whole runs would not let it end


def start_stage(name: str, options: argparse.Namespace) -> None:
    """A stage in a process of its own, which is killed with its children if it outlives its deadline."""
    seconds = options.seconds or STAGES[name]
    command = [sys.executable, __file__, name, "--output", options.output, "--device", options.device]
    command += ["--deadline", seconds, "--scratch", options.scratch, "--earlier", *options.earlier]
    command += ["--text", options.text] if options.text else []
    start = time.monotonic()
    child = subprocess.Popen([*map(str, command)], preexec_fn=os.setpgrp)
    try:
        status = child.wait(seconds + GRACE)
    except subprocess.TimeoutExpired:
        status = f"killed {GRACE} s after its deadline"
    finally:  # what it has started ends with it, also at ^C and SIGTERM
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if status:
        spent = round(time.monotonic() - start, 1)
        row = {"stage": name, "row": "its process", "seconds": spent, "error": f"ended with status {status}"}
        add(options.output / "rows.jsonl", row)


def table(headings: list[str], lines: list[list[str]]) -> str:
    """Markdown."""
    rows = [headings, ["---", *["---:"] * (len(headings) - 1)], *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)


def speed_tables(rows: dict[str, Row], product: float | None) -> list[str]:
    """DPO's updates of ours and of TRL by setting, and PACMR-DPO over DPO.

    Args:
        rows: of a stage, by name.
        product: operations a second of one large bf16 matrix product, if it was measured.
    """
    updates: dict[str, list[float]] = {}
    peaks: dict[str, str] = {}
    pacmr = []
    for name, row in rows.items():
        peak = f"{row['peak']:.1f}" if row.get("peak") else ""
        if "updates" in row:
            setting = name.rpartition(", turn")[0]
            updates.setdefault(setting, []).extend(row["updates"])
            peaks[setting] = max(peak, peaks.get(setting, ""))
        if "vnet" in row:
            vnet, plain = statistics.median(row["vnet"]), statistics.median(row["plain"])
            pacmr.append(
                [name, f"{plain:.3g}", f"{vnet:.3g}", f"{(9 * plain + vnet) / plain / 10:.2f}", peak]
            )
    median = {name: statistics.median(seconds) for name, seconds in updates.items()}
    work = next((row for row in rows.values() if "needed" in row), {"tokens": 0, "needed": 0})
    dpo = []
    for name, own in median.items():
        trl = median.get(name.replace("ours", "TRL", 1).partition("; ")[0])
        dpo.append([name, f"{own:.3g} ({min(updates[name]):.3g}-{max(updates[name]):.3g})"])
        dpo[-1] += [f"{trl / own:.2f}" if trl else "", f"{work['tokens'] / own:,.0f}"]
        dpo[-1] += [f"{work['needed'] / own / product:.0%}" if product else "", peaks[name]]
    found = [
        (["DPO", "s an update", "TRL's time over it", "tokens/s", "share of one product", "peak GiB"], dpo),
        (["PACMR-DPO", "s an update", "s with VNet's", "ten updates over DPO's", "peak GiB"], pacmr),
    ]
    return [table(headings, lines) for headings, lines in found if lines]


def page(found: dict[tuple[str, str], Row]) -> str:
    """Markdown of all rows."""
    parts = list(dict.fromkeys(row["machine"] for row in found.values() if "machine" in row))
    product = found.get(("probes", "matrix product"), {}).get("flops")
    for stage in STAGES:
        rows = {name: row for (of, name), row in found.items() if of == stage}
        parts += [f"### {stage}", *speed_tables(rows, product)] if rows else []
        others = []
        for name, row in rows.items():
            if "error" in row or not ("updates" in row or "vnet" in row):
                result = "not measured" if "error" in row else "right" if row.get("right", True) else "WRONG"
                others.append([name, result, row.get("error") or row.get("says", ""), str(row["seconds"])])
        parts += [table([stage, "", "", "s"], others)] if others else []
    return "\n\n".join(parts)


def write_page(file: Path, earlier: list[Path]) -> None:
    """Put the tables between the page's two marks; written whole or not at all."""
    text = file.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        sys.exit(f"{file} has no lines {BEGIN} and {END}; add them where the tables belong.")
    temporary = file.with_name(f".{file.name}.partial")
    temporary.write_text(f"{head}{begin}\n\n{page(rows_of(earlier))}\n\n{end}{tail}")
    temporary.replace(file)


def main() -> int:
    """Return 0 if every row of the stages is measured and right, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--output", type=Path, help="folder for rows.jsonl")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="rows.jsonl of earlier commands")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, help="of each stage, in place of its own deadline")
    parser.add_argument("--text", type=Path, help="folder with model/ and pairs.jsonl, for the stage text")
    parser.add_argument("--write", type=Path, help="page whose tables are written; no stage is run")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if missing := [file for file in options.earlier if not file.exists()]:
        parser.error(f"--earlier {missing[0]} does not exist.")
    if options.write:
        write_page(options.write, options.earlier)
        return 0
    if not options.output or not options.stages or set(options.stages) - set(STAGES):
        parser.error(f"name an --output and one stage or more of {', '.join(STAGES)}.")
    if "text" in options.stages and not options.text:
        parser.error("the stage text needs --text, a folder of gpu_pack.py --join.")
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    rows = [*options.earlier, options.output / "rows.jsonl"]
    if options.deadline:
        known = rows_of([file for file in rows if file.exists()])
        stage = options.stages[0]
        run_stage(stage, options, {n for (of, n), row in known.items() if of == stage and "error" not in row})
    if options.device == "cuda" and not has_gpu():
        parser.error("there is no GPU; --device cpu runs tiny shapes.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for name in options.stages:
        with tempfile.TemporaryDirectory() as scratch:
            options.scratch = Path(scratch)
            start_stage(name, options)
    found = rows_of([file for file in rows if file.exists()])
    asked = [row for (of, _), row in found.items() if of in options.stages]
    return int(any("error" in row or not row.get("right", True) for row in asked))


if __name__ == "__main__":
    sys.exit(main())
