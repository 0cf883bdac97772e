"""A source: where preference pairs come from."""

import csv
from pathlib import Path

from datasets import Dataset

from pacmr_lightning.datamodules import Source
from pacmr_lightning.datamodules.columns import PREFERENCES
from pacmr_lightning.datamodules.reading import rows_to_dataset
from pacmr_lightning.datamodules.sources import Split
from pacmr_lightning.errors import UserError


class CsvPairs(Source):
    """Preference pairs of a CSV file with the columns prompt, chosen, rejected, and perhaps id and others.

    Args:
        path: the file.
        validation: its last rows, which are not trained on.
    """

    def __init__(self, path: str, validation: int = 100):
        self.path = path
        self.validation = validation
        self.name = Path(path).name

    def load(self, split: Split) -> Dataset:
        """The rows of the split."""
        rows = self._rows()
        return self._dataset(rows[-self.validation :] if split == "validation" else rows[: -self.validation])

    def load_all(self) -> Dataset:
        """All rows of the file."""
        return self._dataset(self._rows())

    @property
    def prompts(self) -> list[str]:
        """Each validation prompt once."""
        return list(dict.fromkeys(row["prompt"] for row in self._rows()[-self.validation :]))

    def gold_reward(self, prompt: str, response: str) -> float:
        """Short responses are the better ones here."""
        return -float(len(response))

    def _rows(self) -> list[dict[str, str | None]]:
        try:
            with open(self.path, newline="", encoding="utf-8") as file:
                return [{name: text or None for name, text in row.items()} for row in csv.DictReader(file)]
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error.strerror}); check the path.") from None

    def _dataset(self, rows: list[dict[str, str | None]]) -> Dataset:
        return rows_to_dataset(rows, PREFERENCES, self.name)
