"""CPU seconds until the command answers, beside the import times of its libraries.

    python benchmarks/start_up.py [--repetitions 7]

Each is a fresh process; they run in turns, the first of which fills the file cache and is not counted.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

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
    "pacmr audit --help": ["-m", "pacmr_lightning", "audit", "--help"],
    "pacmr audit --help_all": ["-m", "pacmr_lightning", "audit", "--help_all"],
    "pacmr fit --help": ["-m", "pacmr_lightning", "fit", "--help"],
    "pacmr predict --help": ["-m", "pacmr_lightning", "predict", "--help"],
    "pacmr fit --help_all": ["-m", "pacmr_lightning", "fit", "--help_all"],
}


def seconds(arguments: list[str]) -> float:
    """Return CPU seconds of one process, which other work on the machine hardly changes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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
    table = Table("", "CPU seconds")
    for name, values in found.items():
        table.add_row(name, spread(values))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
