"""JSON Lines files of responses, and their pairing by prompt."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import check_writable, local_path, read_json_lines
from .answer_store import content_key
from .conversation import checked_text
from .judging import Comparison


@dataclass(frozen=True, kw_only=True)
class ResponsePair(Comparison):
    """Two models' responses to one prompt."""

    id: str
    """The rows' id, else a hash of the prompt and the response's number."""

    @property
    def identical(self) -> bool:
        """True if both are the same but for space around them, which judges do not see."""
        return self.first.strip() == self.second.strip()


def output_path(output: str | Path, ending: str = ".jsonl") -> Path:
    """Return the path of a writable file, or raise UserError; nothing is created."""
    path = local_path(output)
    if path.suffix != ending or path.is_dir():
        raise UserError(f"output is {output}, but it must be a file ending in {ending}.")
    check_writable("output", str(output), path.absolute().parent)
    return path


def answers_path(path: Path) -> Path:
    """Return the path of the stored answers that an interrupted run resumes from."""
    return path.with_name(f"{path.name}.answers.sqlite")


def read_responses(path: str | Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file, such as ``pacmr predict`` writes, without blank lines."""
    path = local_path(path)
    if not path.is_file():
        raise UserError(f"{path} is no file; name a file of responses, such as a run's generations.jsonl.")
    return [row for _, row in read_json_lines(path)]


def pair_rows(
    first: Sequence[Mapping[str, Any]],
    second: Sequence[Mapping[str, Any]],
    names: tuple[str, str] = ("the first list", "the second list"),
) -> list[ResponsePair]:
    """Return the responses to the same prompts as pairs, in the order of the first list.

    Rows have ``prompt`` (a text or chat messages), ``response`` and optionally ``id``, by which they match.
    Without ids, the k-th responses to a prompt match.

    Raises:
        UserError: a row is invalid or has no counterpart, or ids are duplicated, incomplete or inconsistent.
    """
    one, other = (_keyed(rows, name) for rows, name in zip((first, second), names, strict=True))
    has_ids, other_has_ids = (rows[0].get("id") is not None for rows in (first, second))
    if has_ids != other_has_ids:
        with_ids, without = names if has_ids else names[::-1]
        raise UserError(
            f"The rows of {with_ids} have ids and those of {without} have none; compare two files of one "
            "kind."
        )
    for here, there, a, b in ((one, other, *names), (other, one, *names[::-1])):
        if missing := [row for key, row in here.items() if key not in there]:
            kind, column = ("ids", "id") if has_ids else ("responses", "prompt")
            raise UserError(
                f"{b} lacks {len(missing)} of the {len(here)} {kind} of {a}, such as that of the {column} "
                f"{str(missing[0][column])[:80]!r}; generate both from the same prompts."
            )
    changed = [key for key, row in one.items() if row["prompt"] != other[key]["prompt"]]
    if changed:
        raise UserError(
            f"{names[0]} and {names[1]} have different prompts under {len(changed)} of {len(one)} ids, such "
            f"as {changed[0]!r}; generate both from the same prompts."
        )
    return [
        ResponsePair(row["prompt"], row["response"], other[key]["response"], id=key)
        for key, row in one.items()
    ]


def _keyed(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Mapping[str, Any]]:
    if not rows:
        raise UserError(f"{name} is empty; it must hold at least one response.")
    keyed: dict[str, Mapping[str, Any]] = {}
    repeats: Counter[str] = Counter()
    for number, row in enumerate(rows, 1):
        place = f"{name}, row {number}"
        prompt, response, key = (row.get(column) for column in ("prompt", "response", "id"))
        chat = isinstance(prompt, list) and prompt and all(map(_is_message, prompt))
        if not (isinstance(prompt, str) or chat):
            raise UserError(f"{place}: the prompt is {prompt!r}, but it must be a text or chat messages.")
        if not isinstance(response, str):
            raise UserError(f"{place}: the response is {response!r}, but it must be a text.")
        try:
            checked_text(json.dumps([prompt, response], ensure_ascii=False))
        except ValueError as error:
            raise UserError(f"{place}: prompt or response has {error}.") from None
        if (key is None) != (rows[0].get("id") is None):
            raise UserError(f"{place} and row 1 do not both have an id; give all rows one, or none.")
        if key is None:
            digest = content_key(prompt)[:16]
            key = f"{digest}-{repeats[digest]}"
            repeats[digest] += 1
        if str(key) in keyed:
            raise UserError(f"{place} has the id {key!r} of an earlier row; give each row its own id.")
        keyed[str(key)] = row
    return keyed


def _is_message(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        return False
    # A message that calls tools may have no content.
    return isinstance(entry.get("content"), str) or entry.keys() > {"role", "content"}
