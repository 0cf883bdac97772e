import pytest

from pacmr_lightning.datamodules.split_prompt import DIFFERENT_PROMPTS, NO_COMMON_PROMPT, split_prompt

from .checked_rows import pairs

HH = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: why?\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        # The last turn of a transcript is the response, also where both begin alike.
        (HH + " because", HH + " no", HH),
        (HH + " I am glad", HH + " I am sad", HH),
        ("The sky is blue", "The sky is green", "The sky is"),
        # Both words begin with "bl"; TRL would cut them there.
        ("The sky is blue", "The sky is black", "The sky is"),
        ("Q: x\n\nA:  yes", "Q: x\n\nA:  no", "Q: x\n\nA:"),
        ("Colour: blue", "Colour:\tgreen", "Colour:"),
        ("I like it", "I like it very much", "I like"),
        ("same text", "same text", "same"),
    ],
)
def test_the_common_prompt_ends_before_whitespace(chosen, rejected, prompt):
    split = split_prompt(chosen, rejected)
    assert split.prompt == prompt
    assert [prompt + response for response in split.responses] == [chosen, rejected]
    assert all(response[0].isspace() for response in split.responses)


def test_nothing_in_common():
    for chosen, rejected in (("yes", "no"), ("", "x"), (" a", " b"), ("bluer", "blues")):
        assert split_prompt(chosen, rejected).reason == NO_COMMON_PROMPT


def test_unusable_rows_stay_as_they_are():
    row = {"chosen": HH + " a", "rejected": HH + HH + " b"}
    [found] = pairs(row)
    assert {name: found[name] for name in row} == row and found["reason"] == DIFFERENT_PROMPTS
