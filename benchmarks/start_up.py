"""Seconds until the command answers, beside the import times of its libraries, in fresh processes by turns.

python benchmarks/start_up.py [--repetitions 7]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from machine import describe, spread
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

COMMANDS = {
    "python": ["-c", "pass"],
    "import torch, transformers, peft, lightning": [
        "-c",
        "import torch, transformers, peft, lightning.pytorch",
    ],
    "import pacmr_lightning": ["-c", "import pacmr_lightning"],
    "pacmr --help": ["-m", "pacmr_lightning", "--help"],
    "pacmr compare --help": ["-m", "pacmr_lightning", "compare", "--help"],
    "pacmr memory --help": ["-m", "pacmr_lightning", "memory", "--help"],
    "pacmr fit --help": ["-m", "pacmr_lightning", "fit", "--help"],
}


def seconds(arguments: list[str]) -> float:
    """Return seconds of one process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    print(describe())
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in tqdm(range(options.repetitions + 1), desc="turns"):
        for name, arguments in COMMANDS.items():
            taken = seconds(arguments)
            if turn > 0:
                found[name].append(taken)
    table = Table("", "seconds")
    for name, values in found.items():
        table.add_row(name, spread(values))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
