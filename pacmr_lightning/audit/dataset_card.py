"""The card of a dataset that an audit has cleaned: what it holds, and how its labels were changed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from huggingface_hub import DatasetCardData

from .findings import Findings
from .findings_in_words import share_in_words
from .scorers import NAMES

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


def dataset_card(
    findings: Findings,
    *,
    name: str,
    file: str,
    origin: str,
    columns: Sequence[str],
    rows: int,
    changed: str,
    command: str,
) -> str:
    """The text of ``README.md``, with the front matter that the Hub reads; the licence is left to the user.

    Args:
        findings: of the audit.
        name: of the dataset.
        file: name of the file of its rows.
        origin: name of what they come from.
        columns: of the file.
        rows: how many the file has.
        changed: a sentence on which labels were changed.
        command: of the audit.
    """
    split = [{"config_name": "default", "data_files": [{"split": "train", "path": file}]}]
    front = DatasetCardData(configs=split, tags=["preference", "label-noise"]).to_yaml()
    listed = "\n".join(f"- `{column}`: {_COLUMNS.get(column, 'as in the source')}" for column in columns)
    sections = [
        f"---\n{front}\n---",
        f"# {name}",
        f"Preference pairs of {origin}, whose labels were audited by pacmr-lightning. The licence is that of "
        "the data that they come from: name it as `license` above.",
        f"## Columns\n\n{listed}",
        "## What the audit did",
        f"{changed} The file has {rows:,} rows. Of {len(findings.pairs):,} audited pairs "
        f"{findings.suspects:,} are suspect: their label is wrong with a probability above "
        f"{findings.threshold:g} by {NAMES[findings.scorer]}.",
        f"Expected share of wrong labels before: {share_in_words(findings.share)}.",
        f"```bash\n{command}\n```",
        f"Made with pacmr-lightning {importlib.metadata.version('pacmr-lightning')}.",
    ]
    return "\n\n".join(sections) + "\n"
