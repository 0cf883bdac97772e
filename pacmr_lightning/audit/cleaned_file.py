"""Cleaned pairs, written to a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import local_path


@dataclass(frozen=True)
class CleanedFile:
    """A file of pairs after suspected label errors were dropped or swapped."""

    output: str
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
    return CleanedFile(output, rows, len(drop), len(swap), noise_flips is not None)
