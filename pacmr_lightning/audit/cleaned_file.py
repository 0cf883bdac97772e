"""Cleaned pairs: written to a file, and uploaded with a dataset card."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from huggingface_hub import DatasetCardData

from ..runs.hub_upload import push
from .findings import Findings
from .scorers import NAMES
from .words import rate_in_words

_COLUMNS = {
    "id": "the pair's name, by which the audit and the runs know it",
    "prompt": "text, or chat messages",
    "chosen": "the response that the label prefers, after the audit",
    "rejected": "the other one",
    "augmented_prompt": "the prompt in other words",
    "category": "of the pair",
    "annotator": "who gave the label",
    "flipped": "whether the label is known to be wrong",
    "eta": "the probability that chosen is the better one, where it is known",
}


@dataclass(frozen=True)
class CleanedFile:
    """A file of pairs whose suspected labels were dropped or swapped."""

    output: str
    origin: str
    rows: int
    dropped: int
    exchanged: int
    noise: bool

    @property
    def path(self) -> Path:
        """The expanded path."""
        return Path(self.output).expanduser()

    @property
    def sentence(self) -> str:
        """Summary for the user."""
        changes = ((self.dropped, "dropped"), (self.exchanged, "exchanged"))
        done = " and ".join(f"{count:,} suspect labels {word}" for count, word in changes if count)
        said = f"{self.output}: {self.rows:,} rows, {done or '0 suspect labels changed'}."
        if self.noise:
            said += (
                " Its labels are those that the run was trained on, its noise included, before these were "
                "changed; train on it without noise options."
            )
        return said


def write_cleaned_file(
    noise_flips: dict[str, bool] | None, source: Any, output: str, drop: set[str], exchange: set[str]
) -> CleanedFile:
    """Write the pairs of a ``datamodules.Source`` as trained, some dropped and some with the label swapped.

    ``noise_flips`` says whether injected noise has flipped a label, by id; None without noise.
    """
    swapped = {name for name, flip in (noise_flips or {}).items() if flip}
    rows = source.write_cleaned(output, drop, (swapped - drop) ^ exchange)
    return CleanedFile(output, source.name, rows, len(drop), len(exchange), noise_flips is not None)


def upload(
    pairs: CleanedFile, findings: Findings, command: str, repository: str, private: bool = False
) -> None:
    """Upload a cleaned file with a card to a dataset repository of the Hugging Face Hub."""
    file = pairs.path
    trained = " The labels before were those that a run was trained on, the noise that it injected included."
    split = [{"config_name": "default", "data_files": [{"split": "train", "path": file.name}]}]
    front = DatasetCardData(configs=split, tags=["preference", "label-noise"]).to_yaml()
    listed = "\n".join(f"- `{name}`: {_COLUMNS.get(name, 'as in the source')}" for name in _columns(file))
    sections = [
        f"---\n{front}\n---",
        f"# {repository.rpartition('/')[2]}",
        f"Preference pairs of {pairs.origin}, whose labels were audited by pacmr-lightning. The licence is "
        "that of the data that they come from: name it as `license` above.",
        f"## Columns\n\n{listed}",
        "## What the audit did",
        f"{pairs.dropped:,} pairs were left out, and of {pairs.exchanged:,} chosen and rejected have changed "
        f"places.{trained if pairs.noise else ''} The file has {pairs.rows:,} rows. Of "
        f"{len(findings.pairs):,} audited pairs {findings.suspects:,} are suspect: their label is wrong with "
        f"a probability above {findings.threshold:g} by {NAMES[findings.scorer]}.",
        f"Expected share of wrong labels before: {rate_in_words(findings.rate)}.",
        f"```bash\n{command}\n```",
        f"Made with pacmr-lightning {importlib.metadata.version('pacmr-lightning')}.",
    ]
    with tempfile.TemporaryDirectory() as folder:
        readme = Path(folder, "README.md")
        readme.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
        files = {"README.md": readme, file.name: file}
        push(files, repository, "dataset", private, f"{file} is kept.")


def _columns(file: Path) -> list[str]:
    if file.suffix == ".parquet":
        return pq.read_schema(file).names
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        return list(dict.fromkeys(name for line in lines for name in json.loads(line)))
