"""What counts of an answer whose model thinks aloud."""

import time

import pytest

from pacmr_lightning.evaluation.endpoint import without_thoughts

ANSWER = "Comparison: clear.\nPreferred: B"


@pytest.mark.parametrize(
    "text",
    [
        f"<think>Either\nPreferred: A\nor not</think>\n\n{ANSWER}",
        f"\n<Thinking>\nPreferred: A\n</thinking>{ANSWER}\n",
        f"<reasoning>x</reasoning>\n<thought>y</thought>{ANSWER}",
        f"[THINK]x[/THINK]{ANSWER}",
        f"<mm:think>x</mm:think>{ANSWER}",
        f"the tag </think> is named in it\n</think>\n\n{ANSWER}",
        f"<think></think>{ANSWER}",
        f"the beginning stood in the prompt\nPreferred: A</think>{ANSWER}",
        f"<think>the tag <think> twice</think>{ANSWER}",
        f"<think>one <think>in</think> the other</think>{ANSWER}",
        f"<think>x</think>{ANSWER}\n<think>cut off",
        f"<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}<|return|>",
        f"analysisThe user wants Preferred: Aassistantfinal{ANSWER}",
    ],
)
def test_reasoning_does_not_count(text):
    assert without_thoughts(text) == ANSWER


@pytest.mark.parametrize(
    "text",
    [
        "<think>never ends\nPreferred: A",
        "<think>nothing after it</think>",
        "<|channel|>analysis<|message|>cut",
        "  [THINK]",
    ],
)
def test_reasoning_alone_is_no_answer(text):
    assert without_thoughts(text) == ""


@pytest.mark.parametrize(
    "text", [f" {ANSWER}\n", "A leaks its <think> tag.\nPreferred: B", "analysis of both", "a < b, <b>B</b>"]
)
def test_other_text_stays_as_it_is(text):
    assert without_thoughts(text) == text


def test_long_text_takes_no_time():
    began = time.monotonic()
    for text in ("<think>" + "a <think> " * 10_000, "x </think>" * 10_000, "<|channel|>" * 10_000):
        without_thoughts(text)
    assert time.monotonic() - began < 5
