"""Anthropic HH: comparisons of dialogues, and their chosen responses for SFT."""

from functools import cached_property, partial
from typing import Any

from datasets import Dataset

from pacmr_lightning.errors import UserError

from .columns import PREFERENCES
from .hub import convert, load_split
from .reading import values_of
from .sources import DEFAULT_FRACTION, DEFAULT_SEED, Completions, RowsBySplit, Source, Split, SplitPlaces
from .split_prompt import ASSISTANT, HUMAN

SUBSETS = ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled")


class AnthropicHH(RowsBySplit, Source):
    """The four subsets of Anthropic HH as preference pairs; the subset is the category.

    Upstream has no validation pairs, so 5% of the training prompts are set aside, all pairs of a prompt
    together; Qu et al. do not describe their split, which has 152,124 and 8,003 pairs. The prompt is
    everything up to the last ``\\n\\nAssistant:``. The few transcripts that differ before it or end in an
    empty response are dropped and counted.

    Args:
        path: Hub id, or a folder in its layout.
        subsets: which of harmless-base, helpful-base, helpful-online and helpful-rejection-sampled.
        validation_fraction: share of the training prompts that is set aside, in (0, 1).
        split_seed: which prompts are set aside.
        single_turn: generate for prompts with one human turn only. The prompts are those of the test split.

    Raises:
        UserError: a subset is unknown, or ``validation_fraction`` is outside (0, 1).
    """

    columns = PREFERENCES
    name = "Anthropic HH"

    def __init__(
        self,
        path: str = "Anthropic/hh-rlhf",
        subsets: list[str] | None = None,
        validation_fraction: float = DEFAULT_FRACTION,
        split_seed: int = DEFAULT_SEED,
        single_turn: bool = False,
    ):
        self.path = path
        self.files = (path,)
        self.subsets = list(SUBSETS) if subsets is None else subsets
        for name in self.subsets or [""]:
            if name not in SUBSETS:
                raise UserError(f"subsets names {name!r}; choose from {', '.join(SUBSETS)}.")
        self.splits = SplitPlaces("train", None, validation_fraction, split_seed)
        self.single_turn = single_turn

    def read(self, place: str) -> Dataset:
        """Return the pairs of an upstream split, from all subsets."""
        parts = [(load_split(self.path, place, folder=name), partial(_pair, name)) for name in self.subsets]
        return convert(parts, PREFERENCES, self.path, "hh 1")

    # mypy takes a cached property for a read-only one.
    @cached_property
    def prompts(self) -> list[str]:  # type: ignore[override]
        """Distinct prompts of the test split; with ``single_turn`` only those with one human turn."""
        rows = values_of(self.read("test"), "prompt", "reason")
        prompts = dict.fromkeys(prompt for prompt, reason in rows if reason is None)
        # Each has both marks at least once.
        turns = {prompt: prompt.count(HUMAN) + prompt.count(ASSISTANT) for prompt in prompts}
        return [prompt for prompt in prompts if not self.single_turn or turns[prompt] == 2]


class HHCompletions(Completions):
    """Chosen responses of the pairs of ``AnthropicHH`` as demonstrations.

    Args:
        path: Hub id, or a folder in its layout.
        subsets: which of harmless-base, helpful-base, helpful-online and helpful-rejection-sampled.
        validation_fraction: share of the training prompts set aside, in (0, 1), as in ``AnthropicHH``.
        split_seed: which prompts are set aside.
    """

    name = "Anthropic HH, chosen responses"

    def __init__(
        self,
        path: str = "Anthropic/hh-rlhf",
        subsets: list[str] | None = None,
        validation_fraction: float = DEFAULT_FRACTION,
        split_seed: int = DEFAULT_SEED,
    ):
        self.pairs = AnthropicHH(path, subsets, validation_fraction, split_seed)

    def load(self, split: Split) -> Dataset:
        """Return a split's rows."""
        return self.pairs.load(split).rename_column("chosen", "completion")


def _pair(part: str, row: dict[str, Any]) -> dict[str, Any]:
    return {"chosen": row.get("chosen"), "rejected": row.get("rejected"), "category": part}
