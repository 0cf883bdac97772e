"""Seconds and memory from a file of preference pairs to the first batch, by number of rows. Linux only.

    python benchmarks/data.py [--rows 10000 30000 90000]

Rows are generated, as long as TL;DR's. Each run is a fresh process on two cores, imports not counted; cold
means an empty cache of datasets. Private memory excludes files' pages, which the system can reclaim.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from machine import in_fresh_process

CORES = 2
PAIRS_A_PROMPT = 5
VOCAB = 32_000
TOKENIZER_ROWS = 5_000
FREQUENT = (
    "the I and to a of my was it in that me for have with but on this is her so we you he she not they be at",
    "just are like do not because of would about what know had been out or all up if when as time get from",
    "maybe can't don't I'm",
)
CONSONANTS = (
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "st",
    "tr",
    "sh",
)


def lexicon(words: int = 20_000) -> list[str]:
    """Return words similar to English ones, the most frequent first."""
    generator = random.Random(0)
    found = dict.fromkeys(" ".join(FREQUENT).split())
    while len(found) < words:
        parts = [
            generator.choice(CONSONANTS) + generator.choice("aeiou") for _ in range(generator.randint(1, 3))
        ]
        found["".join(parts) + generator.choice("nrstldm")] = None
    return list(found)


def generated_rows(count: int) -> Iterator[dict[str, str]]:
    """Yield rows, the same ones in every process; fewer are the first of more."""
    import numpy as np

    words = np.array(lexicon(), dtype=object)
    generator = np.random.default_rng(1)
    # Zipf's law.
    shares = np.cumsum(1 / (np.arange(len(words)) + 2.7))

    def text(low: int, high: int) -> str:
        drawn = generator.random(generator.integers(low, high + 1)) * shares[-1]
        return " ".join(words[np.searchsorted(shares, drawn)])

    for row in range(count):
        if row % PAIRS_A_PROMPT == 0:
            title, post = text(5, 15), text(175, 365)
            prompt = f"SUBREDDIT: r/{text(1, 1)}\n\nTITLE: {title}\n\nPOST: {post}.\n\nTL;DR:"
        yield {"prompt": prompt, "chosen": f" {text(24, 48)}.", "rejected": f" {text(24, 48)}."}


def write_rows(path: Path, count: int) -> None:
    """Write the rows as JSON Lines."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in generated_rows(count))


def write_tokenizer(folder: Path) -> None:
    """Train the tokenizer and save it."""
    from pacmr_lightning.datamodules.train_tokenizer import train_tokenizer

    texts = (text for row in generated_rows(TOKENIZER_ROWS) for text in row.values())
    train_tokenizer(texts, VOCAB).save_pretrained(folder)


def prepare(rows: Path, tokenizer: Path, cache: Path) -> dict[str, float]:
    """Prepare data up to the first batch; return seconds, peak MB, kept pairs, and tokens per pair."""
    os.environ["HF_DATASETS_CACHE"] = str(cache)  # read once, when datasets is imported
    from datasets import disable_progress_bars

    from pacmr_lightning.datamodules import Files, PreferenceDataModule

    disable_progress_bars()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with private_peak() as most:
        start = time.perf_counter()
        data = PreferenceDataModule(Files(str(rows)), str(tokenizer))
        data.prepare_data()
        data.setup("fit")
        batch = next(iter(data.train_dataloader())).train
        seconds = time.perf_counter() - start
    kept = sum(counts["kept"] for counts in data.counts.values())
    memory = {"resident": resident_peak(), "private": most[0]}
    return memory | {"seconds": seconds, "kept": kept, "tokens": batch.token_count / len(batch)}


def resident_peak() -> float:
    """Return this process's peak memory, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def private() -> float:
    """Return this process's current memory without pages of files, MB."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * resource.getpagesize() / 1e6


@contextmanager
def private_peak() -> Iterator[list[float]]:
    """Yield a list of one number: the peak of ``private`` within the block, sampled every 10 ms."""
    most, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], private())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 30_000, 90_000])
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # the processes below inherit it
    print("                   resident MB, for     private MB, for     pairs   tokens")
    print("  rows  run   sec. 10,000 rows more    10,000 rows more      kept per pair")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        in_fresh_process(write_tokenizer, folder / "tokenizer")
        before: dict[str, tuple[int, dict[str, float]]] = {}
        for count in sorted(options.rows):
            rows, cache = folder / "rows.jsonl", folder / f"cache-{count}"
            in_fresh_process(write_rows, rows, count)
            for run in ("cold", "warm"):
                found = in_fresh_process(prepare, rows, folder / "tokenizer", cache)
                cells = [f"{count:>6}  {run}{found['seconds']:>7.1f}"]
                for kind in ("resident", "private"):
                    more = ""
                    if run in before:
                        fewer, held = before[run]
                        more = f"{(found[kind] - held[kind]) / (count - fewer) * 10_000:+.1f}"
                    cells.append(f"{found[kind]:>12.0f}{more:>8}")
                before[run] = (count, found)
                print(*cells, f"{found['kept']:>9}{found['tokens']:>9.0f}", flush=True)


if __name__ == "__main__":
    main()
