"""Sentences on the tokens of a split: rows kept, those dropped and why, and oddities."""

import re
from collections.abc import Iterator

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from pacmr_lightning.policy.chat_template import template_warnings

from .split_prompt import DIFFERENT_PROMPTS, NO_ANSWER, NO_COMMON_PROMPT, NO_COMPLETION

EMPTY = {1: "empty completion", 2: "empty response"}
"""Reason by number of responses."""
REASONS = (
    "too long",
    EMPTY[2],
    "equal responses",
    DIFFERENT_PROMPTS,
    NO_COMMON_PROMPT,
    NO_ANSWER,
    EMPTY[1],
    "empty prompt",
    NO_COMPLETION,
)
"""Reasons to drop a row."""
NO_AUGMENTED_PROMPT = "no augmented prompt"
"""Count of kept pairs whose augmented prompt is missing, too long or the same tokens."""
CHANGED = "changed messages"
"""Count of kept rows of which the chat template changes or leaves out a text."""
TWO_BOS = "two BOS"
"""Count of kept rows whose prompt begins with BOS twice."""
SPECIAL = "special tokens"
"""Count of kept rows with a special token of the tokenizer inside of a text."""
REPEATED = "repeated prompts"
"""Count of kept rows in which each response begins with the prompt once more."""
CUT = "cut responses"
"""Count of kept rows with a response that ``max_length`` cuts, by OpenRLHF's rules."""


def token_warnings(
    tokenizer: PreTrainedTokenizerBase, rows: Dataset, tokens: Dataset, place: str
) -> Iterator[str]:
    """Yield a sentence for each oddity of the tokens of a split's rows, which it calls ``place``."""
    if any(rows["chat"][:]):
        yield from template_warnings(tokenizer)
        values = rows.data.column("template_fields").unique().to_pylist()
        fields = {field for names in values if names for field in names.split()}
        template = str(tokenizer.chat_template)
        if unread := sorted(name for name in fields if not re.search(rf"\b{re.escape(name)}\b", template)):
            name = repr(tokenizer.name_or_path)
            yield f"The chat template of {name} does not read {', '.join(unread)} of the rows."
    sentences = {
        CHANGED: (
            "the chat template changes or leaves out a text of the messages in {0} rows ({1} for one), so "
            "the model learns what the template writes; change the rows, or take another template."
        ),
        SPECIAL: (
            "{0} rows have a special token, such as {2.eos_token}, inside of a text ({1} for one), which is "
            "read as that token; take it out of the texts."
        ),
        TWO_BOS: "{0} prompts begin with BOS ({2.bos_token}) twice ({1} for one); take it out of the texts.",
        REPEATED: "{0} rows repeat the prompt in each response ({1} for one); take it out of the responses.",
    }
    odd = list(zip(tokens["id"][:], tokens["odd"][:], strict=True))
    for name, sentence in sentences.items():
        if ids := [pair for pair, oddities in odd if name in oddities]:
            count = f"{len(ids)} of {len(odd)}"
            yield f"{place}: {sentence.format(count, ids[0], tokenizer)}"


def summary_line(name: str, split: str, counts: dict[str, int], noun: str = "pairs") -> str:
    """Return a line on the kept and dropped rows of a split."""
    dropped = [f"{counts[reason]} {reason}" for reason in REASONS if reason in counts]
    parts = [f"{counts['kept']} of {counts['rows']} {noun} kept"]
    if dropped:
        parts.append(f"dropped: {', '.join(dropped)}")
    if CUT in counts:
        parts.append(f"{counts[CUT]} cut at max_length")
    if held_out := counts.get("in clean_meta", 0):
        parts.append(f"{held_out} held out for clean_meta")
    if counts.get("flipped"):
        parts.append(f"{counts['flipped'] / (counts['kept'] - held_out):.1%} of labels flipped")
    if "easiest" in counts:
        parts.append(f"the {counts['easiest']} easiest of them, from easy to difficult")
    if counts.get(NO_AUGMENTED_PROMPT) and split == "train":
        parts.append(f"{counts[NO_AUGMENTED_PROMPT]} without an augmented prompt")
    return f"{name}, {split}: " + "; ".join(parts)
