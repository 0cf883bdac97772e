"""The cleaned pairs of an audit, uploaded to the Hugging Face Hub with a card."""

from __future__ import annotations

import inspect
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datamodules.reading import numbered_rows
from ..errors import UserError
from ..runs.hub import check_repository, push
from ..runs.model_card import public

if TYPE_CHECKING:
    from ..audit.findings import Findings


def words_of(tool: Callable[..., Any], asked: dict[str, Any]) -> str:
    """What was asked of an audit, as a card may show it: where a source's files lie is left out."""
    (first, *options) = inspect.signature(tool).parameters.items()
    words = ["pacmr", tool.__name__.replace("_", "-"), str(public(asked[first[0]]))]
    for name, option in options:
        if name == "source":
            words += ["--source", type(asked[name]).__name__, "..."]
        elif name not in ("push_cleaned", "private") and asked[name] != option.default:
            words += [f"--{name}", str(public(asked[name]))]
    return shlex.join(words)


@dataclass(frozen=True)
class Upload:
    """Where the cleaned pairs go, if anywhere; see ``audit``."""

    repository: str | None = None
    private: bool = False
    command: str = ""
    """Of the audit, as a card may show it."""

    def check(self, cleaned: str | None) -> None:
        """Looks at the options before anything is computed.

        Raises:
            UserError: there is no file to upload, or nowhere to upload it to.
        """
        if self.repository is not None:
            if cleaned is None:
                raise UserError("push_cleaned is given without cleaned; name the file with --cleaned.")
            check_repository(self.repository, "push_cleaned")
        elif self.private:
            raise UserError("private is given without push_cleaned; name the repository, or leave it out.")

    def run(
        self, findings: Findings, file: Path, origin: str, dropped: int, exchanged: int, noise: bool
    ) -> None:
        """Uploads the file with a card; where that fails, the file stays.

        Args:
            findings: of the audit.
            file: of the cleaned pairs.
            origin: name of the source that they come from.
            dropped: pairs that were left out of it.
            exchanged: pairs whose label it changes.
            noise: whether the run had injected noise into the labels.

        Raises:
            UserError: the Hub cannot be reached, or refuses.
        """
        from ..audit.dataset_card import dataset_card

        assert self.repository is not None
        rows, columns = 0, dict[str, None]()
        for _, row in numbered_rows(file):
            rows += 1
            columns |= dict.fromkeys(row)
        trained = (
            " The labels before were those that a run was trained on, the noise that it injected included."
        )
        card = dataset_card(
            findings,
            name=self.repository.rpartition("/")[2],
            file=file.name,
            origin=origin,
            columns=list(columns),
            rows=rows,
            changed=f"{dropped:,} pairs were left out, and of {exchanged:,} chosen and rejected have changed "
            f"places.{trained if noise else ''}",
            command=self.command,
        )
        with tempfile.TemporaryDirectory() as folder:
            readme = Path(folder, "README.md")
            readme.write_text(card, encoding="utf-8")
            files = {"README.md": readme, file.name: file}
            push(files, self.repository, "dataset", self.private, f"{file} is kept.")
