"""What may be asked of an audit, whoever judges the pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import UserError
from ..files import check_writable
from .audit_upload import Upload

if TYPE_CHECKING:
    from ..audit.decisions import Decisions

Action = Literal["drop", "flip"]


@dataclass(frozen=True)
class Wanted:
    """What is asked of an audit, whoever judges; see ``audit``.

    Raises:
        UserError: an option is out of range, or a place cannot be written to.
    """

    top: int
    threshold: float
    share: float | None
    fallback_share: float | None
    cleaned: str | None
    action: Action | None
    sample: int = 0
    decisions: str | None = None
    label_studio: str | None = None
    upload: Upload = field(default_factory=Upload)
    output: str | None = None

    def __post_init__(self) -> None:
        if self.top < 0:
            raise UserError(f"top is {self.top}, but it is a number of pairs, at least 0.")
        if not 0 < self.threshold < 1:
            raise UserError(f"threshold is {self.threshold}, but it is a probability, above 0 and below 1.")
        for name in ("share", "fallback_share"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 0.5:
                raise UserError(f"{name} is {value}, but the share of wrong labels is above 0 and below 0.5.")
        if self.sample < 0:
            raise UserError(f"sample is {self.sample}, but it is a number of pairs, at least 0.")
        if self.label_studio is not None and not self.label_studio.endswith(".json"):
            raise UserError(
                f"label_studio is {self.label_studio}, but tasks are written to a file ending in .json."
            )
        by_hand = self.decisions is not None and self.action is None
        if (self.cleaned is None) != (self.action is None) and not (by_hand and self.cleaned):
            given, other = ("cleaned", "action") if self.action is None else ("action", "cleaned")
            fix = "drop or flip" if self.action is None else "the file to write"
            raise UserError(f"{given} is given without {other}; say with --{other} {fix}.")
        if self.output is not None:
            check_writable("output", self.output, Path(self.output))
        taken = {} if self.decisions is None else {Path(self.decisions).expanduser().resolve(): "decisions"}
        for name in ("cleaned", "label_studio"):
            if (file := getattr(self, name)) is not None:
                path = Path(file).expanduser()
                check_writable(name, file, path.parent)
                if clash := taken.get(path.resolve()):
                    raise UserError(f"{name} is {file}, which is the file of {clash}; name another file.")
                taken[path.resolve()] = name
        self.upload.check(self.cleaned)
        _ = self.decided  # a file that cannot be read is told of before anything is done

    @cached_property
    def decided(self) -> Decisions | None:
        """What a person has decided."""
        if self.decisions is None:
            return None
        from ..audit.decisions import read_decisions

        return read_decisions(self.decisions)

    def check_pairs(self, ids: Sequence[str], swapped: Sequence[bool]) -> None:
        """Looks at the N training pairs before they are judged.

        Args:
            ids: their ids.
            swapped: whether the run's noise has exchanged the responses of each.

        Raises:
            UserError: they are fewer than the sample, or not those that somebody has decided on.
        """
        if self.sample > len(ids):
            raise UserError(f"sample is {self.sample}, but there are {len(ids)} training pairs; lower it.")
        if self.decided is not None:
            self.decided.check(ids, swapped)
