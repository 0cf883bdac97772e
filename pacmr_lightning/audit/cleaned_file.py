"""Cleaned pairs: written to a file, and uploaded with a dataset card."""

import gzip
import importlib.metadata
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from huggingface_hub import DatasetCardData

from ..files import local_path
from ..runs.hub_upload import push
from .findings import Findings
from .scorers import NAMES
from .words import verdict

_COLUMNS = {
    "id": "identifier of the pair, the same in the audit and in runs",
    "prompt": "text, or chat messages",
    "chosen": "the preferred response, after the audit",
    "rejected": "the other response",
    "augmented_prompt": "a paraphrase of the prompt",
    "category": "category of the pair",
    "annotator": "who gave the label",
    "flipped": "true if the label is known to be wrong",
    "eta": "probability that chosen is the better response, if known",
    "votes_for": "annotators who prefer the chosen response",
    "votes_against": "annotators who prefer the rejected response",
    "label": "tie if the annotator preferred neither response",
    "weight": "weight of the pair",
    "p_right": "probability that the label is right",
}


@dataclass(frozen=True)
class CleanedFile:
    """A file of pairs after suspected label errors were dropped or swapped."""

    output: str
    origin: str
    rows: int
    dropped: int
    swapped: int
    noise: bool

    @property
    def path(self) -> Path:
        """The expanded path."""
        return local_path(self.output)

    @property
    def sentence(self) -> str:
        """Summary for the user."""
        changes = ((self.dropped, "dropped"), (self.swapped, "swapped"))
        done = " and ".join(f"{count:,} labels {word}" for count, word in changes if count)
        said = f"{self.output}: {self.rows:,} rows, {done or '0 labels changed'}."
        if self.noise:
            said += " It contains the label noise that the run injected; train on it without noise options."
        return said


def write_cleaned_file(
    noise_flips: dict[str, bool] | None, source: Any, output: str, drop: set[str], swap: set[str]
) -> CleanedFile:
    """Write the pairs of a ``datamodules.Source`` as trained, some dropped and some with the label swapped.

    ``noise_flips`` says whether injected noise has flipped a label, by id; None without noise.
    """
    flipped = {name for name, flip in (noise_flips or {}).items() if flip}
    rows = source.write_cleaned(output, drop, (flipped - drop) ^ swap)
    return CleanedFile(output, source.name, rows, len(drop), len(swap), noise_flips is not None)


def upload(
    pairs: CleanedFile, findings: Findings, command: str, repository: str, private: bool = False
) -> None:
    """Upload a cleaned file and a dataset card to a repository of the Hugging Face Hub."""
    file = pairs.path
    trained = " The labels before include the noise that a training run injected."
    split = [{"config_name": "default", "data_files": [{"split": "train", "path": file.name}]}]
    front = DatasetCardData(configs=split, tags=["preference", "label-noise"]).to_yaml()
    listed = "\n".join(f"- `{name}`: {_COLUMNS.get(name, 'as in the source')}" for name in _columns(file))
    sections = [
        f"---\n{front}\n---",
        f"# {repository.rpartition('/')[2]}",
        f"Preference pairs of {pairs.origin} after a label audit by pacmr-lightning. The licence is that of "
        "the original data: name it as `license` above.",
        f"## Columns\n\n{listed}",
        "## What the audit did",
        f"{pairs.dropped:,} pairs were dropped, and {pairs.swapped:,} labels swapped."
        f"{trained if pairs.noise else ''} The file has {pairs.rows:,} rows. Of {len(findings.pairs):,} "
        f"audited pairs {findings.suspected:,} are suspected label errors: p, the probability "
        f"that another annotator agrees, is below {findings.threshold:g} by {NAMES[findings.scorer]}.",
        verdict(findings),
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
