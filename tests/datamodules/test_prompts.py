import pytest

from pacmr_lightning.datamodules.prompts import DIFFERENT_PROMPTS, NO_COMMON_PROMPT, split_prompt
from pacmr_lightning.datamodules.reading import read_preferences

HH = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: why?\n\nAssistant:"


def test_transcripts_end_their_prompt_at_the_last_assistant_turn():
    split = split_prompt(HH + " because", HH + " no")
    assert (split.prompt, split.chosen, split.rejected, split.reason) == (HH, " because", " no", None)


def test_transcripts_with_a_shared_beginning_of_the_response_keep_it_in_the_response():
    split = split_prompt(HH + " I am glad", HH + " I am sad")
    assert (split.prompt, split.chosen) == (HH, " I am glad")


def test_transcripts_with_different_prompts_are_unusable():
    other = "\n\nHuman: hi\n\nAssistant: hello\n\nAssistant: again\n\nAssistant:"
    assert split_prompt(HH + " a", other + " b").reason == DIFFERENT_PROMPTS


def test_transcripts_without_an_answer_are_unusable():
    assert split_prompt("\n\nHuman: hi", "\n\nHuman: hi there").reason == NO_COMMON_PROMPT


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue", "The sky is green", "The sky is"),
        # Both words begin with "bl"; TRL would cut them there.
        ("The sky is blue", "The sky is black", "The sky is"),
        ("Q: x\n\nA:  yes", "Q: x\n\nA:  no", "Q: x\n\nA:"),
        ("Colour: blue", "Colour:\tgreen", "Colour:"),
        ("I like it", "I like it very much", "I like"),
        ("same text", "same text", "same"),
    ],
)
def test_common_prefix_ends_before_whitespace(chosen, rejected, prompt):
    split = split_prompt(chosen, rejected)
    assert split.prompt == prompt
    assert split.prompt + split.chosen == chosen
    assert split.prompt + split.rejected == rejected
    assert split.chosen[0].isspace() and split.rejected[0].isspace()


@pytest.mark.parametrize(("chosen", "rejected"), [("yes", "no"), ("", "x"), (" a", " b"), ("bluer", "blues")])
def test_nothing_in_common(chosen, rejected):
    assert split_prompt(chosen, rejected).reason == NO_COMMON_PROMPT


def test_real_transcripts(shared_data):
    """Prompts end in the marker, the parts make up the text, and the known odd rows are found."""
    rows = read_preferences(shared_data / "hh" / "harmless-base" / "train.jsonl.gz")
    splits = [split_prompt(r["chosen"], r["rejected"]) for r in rows]
    reasons = [s.reason for s in splits if s.reason]
    assert 0 < reasons.count(DIFFERENT_PROMPTS) < 0.05 * len(rows)
    assert set(reasons) == {DIFFERENT_PROMPTS}
    for row, split in zip(rows, splits, strict=True):
        if split.reason is None:
            assert split.prompt.endswith("\n\nAssistant:")
            assert split.prompt + split.rejected == row["rejected"]
