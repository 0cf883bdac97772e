"""DPO and PACMR-DPO steps on one GPU by attention and token layout, against TRL: time, arithmetic, memory.

    python benchmarks/gpu.py --output gpu/ [--sizes 0.5B 1.5B 7B] [--micro-batch 8 32] [--minutes 8]

(with the extra ``bench`` for TRL; gpu_check.py first, which asks whether all is right) makes random Llamas of
Qwen2.5's shapes, bf16, with LoRA on all linear layers, and trains each contestant with PreferenceModule in a
process of its own: DPO, of which the first steps are not counted, then, for each coverage, PACMR-DPO over two
VNet periods with this share of the meta pairs confident, of which the second is counted. The reference is
cached for all. ``--device cpu --sizes tiny`` shows that it runs.

Tokens count a prompt once for both responses, for every contestant, and so does the arithmetic that the step
needs (``flops.needed``); its share of what the device reaches on one large bf16 matrix product is the model
FLOP utilisation. Peak memory is what torch had allocated at most during the steps, model included.

Writes ``gpu.md`` and ``gpu.json`` after every contestant. The same command goes on where it was stopped, or
where --minutes were over; what failed is tried again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is on the Hub; TRL would report its use

import torch
from gpu_contestants import (
    EVERY,
    META_PAIRS,
    ON_CPU,
    OURS,
    SIZES,
    TRL,
    failure,
    fastest_product,
    measure,
    measure_trl,
    write_model,
)
from machine import describe, in_fresh_process, spread
from timed_runs import Shape, quiet, random_rows, write_rows
from tqdm import tqdm

NOT_MEASURED = ("output", "sizes", "contestants", "micro_batch", "minutes")
"""Options that change which rows there are, and no row."""


def table_of(size: str, found: dict[str, dict[str, Any]], coverages: list[str], reached: float) -> str:
    """Markdown."""
    known = next((result for result in found.values() if "needed" in result), {})
    tokens, work = known.get("tokens", 0), known.get("needed", 0.0)
    times = [statistics.median(r["dpo_seconds"]) for n, r in found.items() if _is_trl(n) and "error" not in r]
    trl = min(times, default=float("nan"))
    headings = ["", "DPO, s a step", "tokens/s", "MFU", "GiB", "fastest TRL's time over it"]
    for coverage in coverages:
        headings += [f"PACMR-DPO, {coverage}: s with VNet's", f"mean of {EVERY} over DPO's", "GiB"]
    lines = [
        f"## {size}: {known.get('parameters', 0):,} parameters; {tokens:,} tokens a step",
        "",
        f"| {' | '.join(headings)} |",
        "|---" * len(headings) + "|",
    ]
    for name, result in found.items():
        cells = [name]
        if "error" in result:
            cells.append(result["error"].replace("|", " "))
        else:
            step = statistics.median(result["dpo_seconds"])
            if not result.get("as_asked", True):
                cells = [f"{name}: fell back to {result['way']}"]
            cells += [
                spread(result["dpo_seconds"]),
                f"{tokens / step:,.0f}",
                f"{work / step / reached:.1%}",
                _gib(result["dpo_peak"]),
                f"{trl / step:.2f}",
            ]
            for pacmr in result.get("pacmr", {}).values():
                over = statistics.mean(pacmr["seconds"]) / step
                cells += [f"{pacmr['seconds'][0]:.3g}", f"{over:.2f}", _gib(pacmr["peak"])]
        lines.append("| " + " | ".join(cells) + " |" + " |" * (len(headings) - len(cells)))
    return "\n".join(lines)


def _is_trl(name: str) -> bool:
    return name.partition("; ")[0] in TRL


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def write(output: Path, report: dict[str, Any]) -> None:
    """Both files, whole or not at all."""
    options = report["options"]
    coverages = [f"{coverage:.0%}" for coverage in options["coverage"]]
    reached = report["matrix_product"]
    head = (
        f"{report['machine']}\n\n{options['dtype']} base; one large matrix product: {reached / 1e12:.3g} "
        f"TFLOP/s; {options['pairs']} pairs a step; prompts of {options['prompt'][0]} to "
        f"{options['prompt'][1]} tokens, responses of {options['response'][0]} to {options['response'][1]}"
    )
    tables = [table_of(size, found, coverages, reached) for size, found in report["sizes"].items()]
    for name, text in (
        ("gpu.md", "\n\n".join([head, *tables]) + "\n"),
        ("gpu.json", json.dumps(report, indent=2) + "\n"),
    ):
        (output / f".{name}.partial").write_text(text)
        (output / f".{name}.partial").replace(output / name)


def main() -> None:
    """Measures all sizes and contestants and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for gpu.md and gpu.json")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--contestants", nargs="+", choices=[*OURS, *TRL])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=10, help="DPO steps that are counted")
    parser.add_argument("--pairs", type=int, default=32, help="of a step")
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[8, 32], help="pairs of a forward pass")
    parser.add_argument("--coverage", type=float, nargs="*", default=[0.7], help="confident meta pairs")
    parser.add_argument("--prompt", type=int, nargs=2, default=(200, 400), metavar=("MIN", "MAX"))
    parser.add_argument("--response", type=int, nargs=2, default=(25, 50), metavar=("MIN", "MAX"))
    parser.add_argument("--minutes", type=float, default=8, help="after which no other contestant begins")
    options = parser.parse_args()
    device, dtype = options.device, "bfloat16" if options.device == "cuda" else "float32"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --sizes tiny shows that the benchmark runs.")
    names = options.contestants or ([*OURS, *TRL] if device == "cuda" else ON_CPU)
    quiet()
    options.output.mkdir(parents=True, exist_ok=True)
    asked = {name: value for name, value in vars(options).items() if name not in NOT_MEASURED}
    # As it is read again: no tuples.
    asked = json.loads(json.dumps(asked | {"dtype": dtype}))
    report: dict[str, Any] = {"machine": describe(), "options": asked, "sizes": {}}
    if (options.output / "gpu.json").exists():
        report = json.loads((options.output / "gpu.json").read_text())
        if report["options"] != asked:
            parser.error(f"{options.output} was measured with {report['options']}; name another --output.")
    else:
        report["matrix_product"] = in_fresh_process(fastest_product, device, dtype)
    end = time.monotonic() + 60 * options.minutes
    for size in options.sizes:
        shape = Shape(
            pairs=options.pairs,
            prompt=tuple(options.prompt),
            response=tuple(options.response),
            vocabulary=SIZES[size][5],
            dtype=dtype,
        )
        found: dict[str, dict[str, Any]] = report["sizes"].setdefault(size, {})
        rows = {
            f"{name}; {at_once} pairs at once": (name, at_once)
            for name in names
            for at_once in options.micro_batch
        }
        left = [row for row in rows if "error" in found.get(row, {"error": ""})]
        if not left or time.monotonic() > end:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            in_fresh_process(write_model, folder, size, dtype, device)
            write_rows(folder / "rows.jsonl", random_rows(2 * max(options.pairs, META_PAIRS), shape))
            for row in tqdm(left, desc=size):
                if time.monotonic() > end:
                    break
                name, at_once = rows[row]
                ask, more = (measure_trl, ()) if name in TRL else (measure, (options.coverage,))
                arguments = (folder, replace(shape, micro_batch=at_once), (OURS | TRL)[name], device)
                try:
                    found[row] = in_fresh_process(ask, *arguments, options.steps, *more)
                except Exception as error:  # the process was killed
                    found[row] = failure(error)
                write(options.output, report)
    write(options.output, report)
    print((options.output / "gpu.md").read_text())


if __name__ == "__main__":
    main()
