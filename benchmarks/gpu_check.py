"""Asks in a few minutes whether everything works on a GPU, before gpu.py measures how fast it is.

    python benchmarks/gpu_check.py --output gpu/ [--device cpu] [--minutes 8] [--only NAME ...]

First it looks at the installed packages and names the command that brings what is missing. Then it asks, each
in a process of its own, on a random Llama of 4 layers and TL;DR's lengths:

- update: the gradient of DPO and of VNet, by every way of attention and token layout, in fp32 and bf16,
  against one sequence a row with SDPA in fp32. A bf16 way may be twice as far from it as bf16 with one
  sequence a row is.
- estimators: the ghost dot-product and the central difference against float64, pair by pair.
- generation: answers of a batch against those of each prompt alone.
- run: fit, the same again, the same resumed half way, an audit, DeepSpeed's three stages, and a resumed one.

What is done stands in ``check.json`` and is not asked again, so that a stage that was stopped goes on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
"""``ok``, ``says`` and numbers."""
NOT_EVERYWHERE = {"deepspeed": "DeepSpeed's stages"}
"""Requirements that only some checks have."""
PLAIN = "sdpa, separate"
WAYS = (PLAIN, "sdpa, shared", "sdpa, shared, compiled", "flex_attention, shared")
WAYS += ("flex_attention, shared, compiled", "flash_attention_2, packed")
STAGES = (1, 2, 3)


def missing_packages() -> list[str]:
    """Requirements in pyproject.toml that the machine does not have in these versions."""
    import tomllib
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = []
    for text in project["dependencies"]:
        requirement = Requirement(text)
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            installed = None
        # A build such as 2.11.0+cu130 is that release.
        public = installed and installed.partition("+")[0]
        if public is None or not requirement.specifier.contains(public, prereleases=True):
            missing.append(text)
    return missing


def checks(device: str) -> dict[str, Callable[[Path], Row]]:
    """By name; one that compares with another comes after it."""
    import gpu_runs
    import gpu_updates

    found: dict[str, Callable[[Path], Row]] = {}
    for dtype, way in product(("float32", "bfloat16"), WAYS):
        attention, _, rest = way.partition(", ")
        if (attention.startswith("flash") and dtype == "float32") or (
            device == "cpu" and (attention != "sdpa" or "compiled" in rest)
        ):
            continue
        found[f"update: {way}, {dtype}"] = partial(gpu_updates.check, way=way, dtype=dtype, device=device)
    for dtype in ("float32", "bfloat16"):
        found[f"estimators: {dtype}"] = partial(gpu_updates.estimators, dtype=dtype, device=device)
    found["generation"] = partial(gpu_updates.generation, device=device)
    found["run: fit"] = partial(gpu_runs.fit, device=device)
    found["run: again"] = partial(gpu_runs.again, device=device)
    found["run: resumed"] = partial(gpu_runs.resumed, device=device)
    found["run: audit"] = gpu_runs.audit
    if find_spec("deepspeed"):
        for stage in STAGES:
            found[f"run: ZeRO-{stage}"] = partial(gpu_runs.zero, stage=stage, device=device)
        found["run: ZeRO-2 resumed"] = partial(gpu_runs.zero_resumed, device=device)
    return found


def ask(name: str, output: Path, device: str, seconds: float) -> Row:
    """One check in a process of its own, which is killed with its children when the time is over."""
    command = [sys.executable, __file__, "--output", str(output), "--device", device, "--one", name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    log = output / "logs" / (re.sub(r"\W+", "-", name) + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with open(log, "wb") as file:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, env=environment, start_new_session=True
        )
        try:
            said, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return {"ok": False, "says": f"not done after {seconds:.0f} s", "seconds": seconds}
    row = {"seconds": round(time.monotonic() - start, 1)}
    lines = said.decode(errors="replace").strip().splitlines()
    if child.returncode == 0 and lines:
        return row | json.loads(lines[-1])
    told = log.read_text(errors="replace").strip().splitlines() or [f"status {child.returncode}"]
    return row | {"ok": False, "says": told[-1][:300]}


def write(output: Path, rows: dict[str, Row]) -> None:
    """Whole or not at all."""
    temporary = output / ".check.json.partial"
    temporary.write_text(json.dumps(rows, indent=2) + "\n")
    temporary.replace(output / "check.json")


def main() -> int:
    """Asks what has not been asked; prints a line for each; 0 if all are right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for check.json, logs and runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8, help="after which no other check begins")
    parser.add_argument("--seconds", type=float, default=150, help="of one check at most")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks whose names begin so")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    output = options.output.resolve()
    if options.one:
        print(json.dumps(checks(options.device)[options.one](output)))
        return 0
    if missing := missing_packages():
        names = {re.match(r"[\w-]+", text)[0] for text in missing}
        print(f"Missing here: pip install {' '.join(repr(text) for text in missing)}")
        if needed := names - set(NOT_EVERYWHERE):
            print(f"Nothing runs without {', '.join(sorted(needed))}.")
            return 2
        print(f"Not asked without it: {', '.join(NOT_EVERYWHERE[name] for name in sorted(names))}.")
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu shows that the checks run.")
    output.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Row] = {}
    if (output / "check.json").exists():
        rows = json.loads((output / "check.json").read_text())
    wanted = [
        name
        for name in checks(options.device)
        if not options.only or any(name.startswith(start) for start in options.only)
    ]
    end = time.monotonic() + 60 * options.minutes
    for name in wanted:
        if not rows.get(name, {}).get("ok"):
            if time.monotonic() > end:
                print(f"{name}: not asked; the same command goes on")
                continue
            rows[name] = ask(name, output, options.device, options.seconds)
            write(output, rows)
        row = rows[name]
        print(f"{'right' if row['ok'] else 'WRONG'}  {name}: {row['says']} ({row['seconds']} s)", flush=True)
    return int(not all(rows.get(name, {}).get("ok") for name in wanted))


if __name__ == "__main__":
    sys.exit(main())
