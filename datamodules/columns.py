"""Which columns rows of data have, and the checks that a row passes before it is used."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from datasets import Features, Value

from pacmr_lightning.errors import UserError

from .chat import encode_messages


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r}, but it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is no valid text; remove that character") from None
    return value


def _text_or_messages(value: object) -> str:
    return _text(encode_messages(value) if isinstance(value, list) else value)


def _label(value: object) -> str:
    # Ids and categories are often numbers; as text they mean the same.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool) and value not in (0, 1):
        raise ValueError(f"{value!r}, but it must be true or false")
    return bool(value)


def _probability(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{value!r}, but it must be a probability between 0 and 1")
    return float(value)


@dataclass(frozen=True)
class Columns:
    """Which columns a kind of row has, and how their values are checked."""

    kind: str
    responses: tuple[str, ...]
    """Columns that every row has; texts, or all of them lists of chat messages."""
    required: tuple[str, ...]
    """Further columns that rows of texts have; messages may hold the prompt themselves."""
    optional: dict[str, Callable[[object], str | float]]
    hashed: tuple[str, ...]
    """Columns that a missing id is made of."""

    @property
    def features(self) -> Features:
        """The columns of a dataset of such rows: ``chat`` says that the row holds chat messages as JSON."""
        kinds: dict[Callable[[object], str | float], Value]
        kinds = {_flag: Value("bool"), _probability: Value("float64")}
        texts = {name: Value("string") for name in ("id", *self.responses)}
        others = {name: kinds.get(check, Value("string")) for name, check in self.optional.items()}
        return Features(texts | others | {"chat": Value("bool")})

    def check(self, row: dict[str, Any], place: str) -> dict[str, Any]:
        """The row's values for ``features``, an id of None where it has none.

        Raises:
            UserError: a column is missing or holds a wrong value; it begins with ``place``.
        """
        clean = {}
        lists = {name for name in self.responses if isinstance(row.get(name), list)}
        for name in self.responses if lists else (*self.required, *self.responses):
            if row.get(name) is None:
                found = ", ".join(repr(c) for c in row) or "none"
                raise UserError(
                    f"{place} has no {name!r} (columns found: {found}); rename the column or remove the row."
                )
        checks = dict.fromkeys(self.responses, _text_or_messages) | {"id": _label} | self.optional
        for name, check in checks.items():
            value = row.get(name)
            try:
                clean[name] = None if value is None else check(value)
            except ValueError as error:
                raise UserError(f"{place}: {name!r} is {error}.") from None
        clean["chat"] = bool(lists)
        if lists and lists != set(self.responses):
            odd = sorted(set(self.responses) - lists)[0]
            raise UserError(
                f"{place}: {odd!r} is a text, but {sorted(lists)[0]!r} is a list of chat messages; "
                "write both in one way."
            )
        for name in ("prompt", "augmented_prompt"):
            if name not in self.optional:
                continue
            if not lists and isinstance(row.get(name), list):
                response = self.responses[0]
                raise UserError(
                    f"{place}: {name!r} is a list of chat messages, but {response!r} is a text; write "
                    f'{response!r} as [{{"role": "assistant", "content": ...}}], or {name!r} as a text.'
                )
            if lists and isinstance(row.get(name), str):
                clean[name] = encode_messages([{"role": "user", "content": row[name]}])
        return clean


PREFERENCES = Columns(
    kind="preferences",
    responses=("chosen", "rejected"),
    required=(),
    optional={
        "prompt": _text_or_messages,
        "category": _label,
        "augmented_prompt": _text_or_messages,
        "flipped": _flag,
        "eta": _probability,
        "annotator": _label,
    },
    hashed=("prompt", "chosen", "rejected"),
)
SFT = Columns(
    kind="sft",
    responses=("completion",),
    required=("prompt",),
    optional={"prompt": _text_or_messages},
    hashed=("prompt", "completion"),
)


def checked(
    numbered: Iterable[tuple[str, dict[str, Any]]], columns: Columns, source: str
) -> Iterator[dict[str, Any]]:
    """Rows with checked values and unique ids.

    Args:
        numbered: the place of each row, which errors begin with, and the row.
        columns: what they should hold.
        source: what errors call all of them.

    Raises:
        UserError: a row is wrong, an id comes twice, or there is no row.
    """
    places: dict[str, str] = {}
    repeats: Counter[str] = Counter()
    for place, row in numbered:
        clean = columns.check(row, place)
        if clean["id"] is None:
            digest = _content_hash(clean[name] for name in columns.hashed)
            clean["id"] = f"{digest}-{repeats[digest]}"
            repeats[digest] += 1
        elif clean["id"] in places:
            raise UserError(
                f"{place} has the id {clean['id']!r} of {places[clean['id']]}; "
                "give each row its own id, or leave the ids out and they are made."
            )
        places[clean["id"]] = place
        yield clean
    if not places:
        raise UserError(f"{source} is empty; it must hold at least one row.")


def _content_hash(texts: Iterable[str | None]) -> str:
    # JSON keeps texts apart that would be the same when simply joined, and no prompt apart from an empty one.
    return hashlib.blake2b(json.dumps(list(texts)).encode(), digest_size=8).hexdigest()
