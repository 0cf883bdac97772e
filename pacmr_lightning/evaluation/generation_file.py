"""The file of generated responses: a JSON object a line, for ``pacmr judge``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import obstacle, replacing
from .conversation import Messages
from .prompt_batch import Response


def output_path(output: str | Path) -> Path:
    """The path of a file that can be written; nothing is made yet.

    Raises:
        UserError: it does not end in .jsonl, or nothing can be written there.
    """
    path = Path(output).expanduser()
    if path.suffix != ".jsonl" or path.is_dir():
        raise UserError(f"output is {output}, but it must be a file ending in .jsonl.")
    if found := obstacle(path.absolute().parent):
        there, error = found
        raise UserError(
            f"output is {path}, but nothing can be written to {there} ({error.strerror}); name another file."
        )
    return path


def answers_path(path: Path) -> Path:
    """The file of the answers so far, with which a run that was ended goes on."""
    return path.with_name(f"{path.name}.answers.sqlite")


def generation(name: str, prompt: str | Messages, response: Response) -> dict[str, Any]:
    """A row of the file.

    Args:
        name: the prompt's id.
        prompt: a text, or chat messages.
        response: the answer to it.
    """
    return {
        "id": name,
        "prompt": prompt,
        "response": response.text,
        "finish_reason": response.finish_reason,
        "prompt_tokens": response.prompt_tokens,
        "response_tokens": response.response_tokens,
    }


def write_generations(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes the file, whole or not at all."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
