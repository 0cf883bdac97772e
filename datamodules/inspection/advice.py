"""What a user should do about a dataset, one sentence for each finding."""

from __future__ import annotations

from collections.abc import Iterator

from ..splits import Split
from ..tokenization import NO_SECOND_VIEW
from .pair_statistics import DataStatistics, SplitStatistics

DROPPED = 0.05
"""Share of rows dropped for one reason above which something is said."""
CONTRADICTING = 0.02
"""Share of pairs."""
COPIES = 0.02
"""Share of pairs."""
LONGER = 0.7
"""Share of pairs of which the same side is the longer one."""
NO_VIEW = 0.2
"""Share of training pairs without a second view."""

_FIXES = {
    "empty response": "give them a response, or look whether the columns are the right ones",
    "equal responses": "a tie teaches nothing; leave such rows out of the file",
    "different prompts": "give one prompt with two responses to it in each row",
    "no common prompt": "give the prompt in a column 'prompt'",
    "empty prompt": "give them a prompt",
}


def advice(report: DataStatistics, max_length: int, overlap: bool = True) -> list[str]:
    """A sentence for each thing to act on, with what to do.

    Args:
        report: the numbers of both splits.
        max_length: the limit that they were found with.
        overlap: whether prompts in both splits are worth a word; not where a world has so few that all are.
    """
    # Those about the template are the same for both splits.
    found = list(dict.fromkeys(said for split in report.splits.values() for said in split.token_warnings))
    too_long = {
        split: numbers.counts.get("too long", 0) / numbers.counts["rows"]
        for split, numbers in report.splits.items()
    }
    if max(too_long.values()) > DROPPED:
        shares = " and ".join(f"{share:.1%} of the {split} rows" for split, share in too_long.items())
        enough = max(numbers.lengths.suggested for numbers in report.splits.values())
        found.append(f"{shares} are too long for max_length {max_length}; raise it to {enough}.")
    for split, numbers in report.splits.items():
        found += _of_split(split, numbers)
    shared = report.overlap_normalised
    if overlap and shared.prompts:
        found.append(
            f"{shared.prompts:,} prompts are in both splits ({report.overlap.prompts:,} to the letter), so "
            f"{shared.validation_pairs:,} validation pairs do not show how a policy judges new prompts; take "
            "these prompts out of the training rows."
        )
    return found


def _of_split(split: Split, report: SplitStatistics) -> Iterator[str]:
    rows, kept = report.counts["rows"], report.counts["kept"]
    for reason, fix in _FIXES.items():
        if report.counts.get(reason, 0) > DROPPED * rows:
            yield f"{split}: {report.counts[reason] / rows:.1%} of the rows are dropped, {reason}; {fix}."
    repeats, bias = report.repeats, report.bias
    if repeats.contradicting_labels > CONTRADICTING * kept:
        yield (
            f"{split}: {repeats.contradicting_labels / kept:.1%} of the pairs contradict another one, so "
            f"{repeats.least_wrong:,} labels or more are wrong; keep what the majority says of each "
            "comparison, or train with a method for noisy labels (configs/methods/)."
        )
    if repeats.copies > COPIES * kept:
        yield (
            f"{split}: {repeats.copies / kept:.1%} of the pairs are copies of others and count several "
            "times; keep one of each."
        )
    for side, share in (("chosen", bias.chosen_longer), ("rejected", bias.rejected_longer)):
        if share >= LONGER:
            yield (
                f"{split}: in {share:.0%} of the pairs the {side} response is the longer one, so a policy "
                "may learn length alone; balance the pairs by length, and hold accuracies against that share."
            )
    if split == "train" and report.counts[NO_SECOND_VIEW] > NO_VIEW * kept:
        yield (
            f"{split}: {report.counts[NO_SECOND_VIEW] / kept:.1%} of the pairs have no second view, so VNet "
            "(PACMR-DPO) does not learn from them; give them an augmented_prompt."
        )
