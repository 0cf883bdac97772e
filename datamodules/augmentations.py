"""Reads the second wordings of prompts that ``pacmr augment`` wrote."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pacmr_lightning.errors import UserError

PROMPT, AUGMENTED = "prompt", "augmented_prompt"


def read_augmentations(path: str | Path) -> dict[str, str]:
    """The second wording of each prompt of a file.

    Args:
        path: Parquet with the columns ``prompt`` and ``augmented_prompt``, one row a prompt; others are not
            read. Conversations are JSON lists of messages.

    Returns:
        The augmented prompt by prompt, also where the two are equal; prompts without one are left out.

    Raises:
        UserError: there is no such file, it is no Parquet, or it lacks a column or any row.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"There is no file {path} with augmented prompts; write one with pacmr augment.")
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for name in (PROMPT, AUGMENTED):
                if name not in names:
                    raise UserError(
                        f"{path} has no column {name!r} (columns found: {', '.join(names) or 'none'}); name a "
                        "file that pacmr augment wrote."
                    )
            columns = file.read([PROMPT, AUGMENTED]).cast(pa.schema([(PROMPT, "string"), (AUGMENTED, "string")]))
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read as Parquet with texts ({str(error).splitlines()[0].rstrip('.')}); name a file "
            "that pacmr augment wrote."
        ) from None
    pairs = zip(*(columns[name].to_pylist() for name in (PROMPT, AUGMENTED)), strict=True)
    found = {prompt: augmented for prompt, augmented in pairs if prompt is not None and augmented is not None}
    if not found:
        raise UserError(f"{path} holds no augmented prompts; write it again with pacmr augment.")
    return found
