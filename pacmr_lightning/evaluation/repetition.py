"""Whether responses repeat each other, or themselves."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise


def distinct_bigrams(responses: Iterable[Sequence[Hashable]]) -> float:
    """Distinct-2 (Li et al., arXiv 1510.03055): different bigrams of all responses, as a share of all.

    It falls with the number of responses, so compare equally many. NaN where there is no bigram.

    Args:
        responses: their words or tokens.
    """
    found = [bigram for response in responses for bigram in pairwise(response)]
    return len(set(found)) / len(found) if found else float("nan")


def repeated_bigrams(responses: Iterable[Sequence[Hashable]]) -> float:
    """Share of the bigrams that stood before in the same response (Welleck et al., arXiv 1908.04319).

    NaN where there is no bigram.

    Args:
        responses: their words or tokens.
    """
    found = [list(pairwise(response)) for response in responses]
    total = sum(map(len, found))
    return 1 - sum(len(set(bigrams)) for bigrams in found) / total if total else float("nan")
