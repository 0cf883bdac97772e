"""The share of wrong labels by a random sample that a person has read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pandas as pd
from scipy.stats import binomtest

from .wrong_label_share import Share


@dataclass(frozen=True)
class SampleShare:
    """How many labels of a random sample are wrong, right, or nothing that can be said of them."""

    wrong: int
    right: int
    dropped: int
    unsure: int

    @property
    def read(self) -> int:
        """Labels that are found wrong or right."""
        return self.wrong + self.right

    @property
    def rate(self) -> float:
        """Share of the wrong ones among them; NaN without any."""
        return self.wrong / self.read if self.read else float("nan")

    @property
    def low(self) -> float:
        """Of the 95% interval by Clopper and Pearson, which holds the truth at least that often; else NaN."""
        return self._interval[0]

    @property
    def high(self) -> float:
        """See ``low``."""
        return self._interval[1]

    @cached_property
    def _interval(self) -> tuple[float, float]:
        if not self.read:
            return float("nan"), float("nan")
        found = binomtest(self.wrong, self.read).proportion_ci(0.95, method="exact")
        return float(found.low), float(found.high)

    @property
    def told(self) -> float | None:
        """The share that an audit is told: the rate, or the interval's upper end where no label was wrong.

        None where the sample leaves half of the labels or more.
        """
        share = self.rate if self.wrong else self.high
        return share if 0 < share < 0.5 else None

    def contradicts(self, own: Share) -> bool:
        """Whether the interval has nothing in common with that of an audit's own estimate."""
        return own.identified and not own.known and (self.low > own.high or self.high < own.low)

    def sentences(self, own: Share, used: float | None) -> list[str]:
        """What the sample says, beside the audit's own estimate.

        Args:
            own: the audit's own estimate.
            used: the share that the audit goes on with where it was told one.
        """
        if not self.read:
            return []
        out = f"; {self.dropped} dropped and {self.unsure} unsure are left out" if self.left_out else ""
        told = [
            f"Of {self.read:,} labels that were drawn at random and decided by hand, {self.wrong:,} are "
            f"wrong: {self.rate:.1%} (95% interval {self.low:.1%} to {self.high:.1%}){out}."
        ]
        if self.contradicts(own):
            told.append(
                f"That disagrees with the audit's own estimate, {own.rate:.1%} (95% interval {own.low:.1%} "
                f"to {own.high:.1%}): its flips may not be independent of the pair, its policy may know the "
                "labels by heart, or the reader judges otherwise than those who gave them."
            )
        if used is None:
            told.append("These are too few to tell the audit a share.")
        elif used == self.told:
            why = "" if self.wrong else ", the most that the sample leaves, since it has no wrong label"
            told.append(f"The audit takes {used:.1%}{why}.")
        return told

    def table(self, own: Share) -> pd.DataFrame:
        """One row: what was decided, the share with its interval, and the audit's own estimate."""
        counts = {name: getattr(self, name) for name in ("wrong", "right", "dropped", "unsure")}
        interval = {"share": self.rate, "low": self.low, "high": self.high}
        found = (own.rate, own.low, own.high) if own.identified else (float("nan"),) * 3
        beside = dict(zip(("own", "own_low", "own_high"), found, strict=True))
        return pd.DataFrame([counts | interval | beside | {"contradicts": self.contradicts(own)}])

    @property
    def left_out(self) -> int:
        """Labels of the sample on which nothing can be said."""
        return self.dropped + self.unsure
