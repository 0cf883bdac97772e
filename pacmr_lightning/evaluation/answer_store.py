"""A persistent store for answers that cost time or money."""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import local_path


def content_key(*parts: Any) -> str:
    """Return a hash of the JSON-serialisable parts."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerStore(AbstractContextManager["AnswerStore"]):
    """An atomic key-value store of JSON values in one SQLite file, which several processes may share."""

    def __init__(self, path: str | Path):
        self.path = local_path(path)
        with self._errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self.path, timeout=60, check_same_thread=False)
            with self._database:
                self._database.execute(
                    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT)"
                )

    def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the values of those keys that have one."""
        # One parameter for all keys; SQLite limits their number.
        query = "SELECT key, value FROM answers WHERE key IN (SELECT value FROM json_each(?))"
        with self._errors():
            rows = self._database.execute(query, [json.dumps(list(keys))])
            return {key: json.loads(value) for key, value in rows}

    def put(self, answers: Mapping[str, Any]) -> None:
        """Write all of them or none."""
        rows = [(key, json.dumps(value, ensure_ascii=True)) for key, value in answers.items()]
        with self._errors(), self._database:
            self._database.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        # ValueError: a value is not JSON.
        except (sqlite3.Error, OSError, ValueError) as error:
            raise UserError(
                f"The file of answers {self.path} cannot be used ({error}); free disk space, or delete it to "
                "begin anew."
            ) from None
