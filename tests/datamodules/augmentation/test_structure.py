"""Prompts cut into frame and contents: nothing is lost, and the frame is what a reader would call it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacmr_lightning.datamodules.augmentation.structure import cut, looks_like_frame, prompt_sentences
from pacmr_lightning.datamodules.split_prompt import split_prompt

from ...conftest import read_lines

HH = (
    "\n\nHuman: I lost my keys.  What now?\n\nAssistant: Human:  Look:\n\n- in the car\n2) at home \n\n"
    "Human: 22\n\nAssistant:"
)
TLDR = "SUBREDDIT: r/a_b\n\nTITLE: I'm\n(22) lost\n\nPOST: One. \n\n* Two!\r\nhttps://a.b/c\n\nTL;DR:"
SINGLE = "SUBREDDIT: r/a\nTITLE: Lost\nPOST: Where am I?\nTL;DR: "
SWAPPED = "TITLE: Lost\n\nSUBREDDIT: r/a\n\nPOST: Where am I?\n\nTL;DR:"


def joined(parts):
    return "".join(part.text for part in parts)


def contents(text):
    return [part.text for part in cut(text) if part.content]


def frame(text):
    return [part.text for part in cut(text) if not part.content]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HH, ["I lost my keys.  What now?", "Look:", "in the car", "at home"]),
        (TLDR, ["I'm", "(22) lost", "One.", "Two!"]),
        (SINGLE, ["Lost", "Where am I?"]),
        (SWAPPED, ["Lost", "Where am I?"]),
        ("Describe the sea in a calm mood:", ["Describe the sea in a calm mood:"]),
        (" Write: \n\n> quoted\n— 漢字 \n", ["Write:", "quoted", "漢字"]),
        ("\n\nHuman: POST: is no header here\n\nAssistant:", ["POST: is no header here"]),
        *(
            (text, [])
            for text in ("", " \n ", "22 + 3 = ?", "👌🏾", "(www.a.b/c?d)", "\n\nHuman: 1\n\nAssistant:")
        ),
    ],
)
def test_contents(text, expected):
    assert contents(text) == expected
    assert joined(cut(text)) == text


def test_the_frame_of_a_post_and_of_a_transcript():
    assert frame(SINGLE) == ["SUBREDDIT: r/a\nTITLE: ", "\nPOST: ", "\nTL;DR: "]
    turns = ["\n\nHuman: ", "\n\nAssistant: Human:  ", "\n\n- ", "\n2) ", " \n\nHuman: 22\n\nAssistant:"]
    assert frame(HH) == turns


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("One. Two?  Three!", ["One.", "Two?", "Three!"]),
        ("He said “No.” Then (maybe.) they left", ["He said “No.”", "Then (maybe.)", "they left"]),
        ("i went home. then i slept", ["i went home.", "then i slept"]),
        ("Well... maybe. Well... Maybe", ["Well... maybe.", "Well...", "Maybe"]),
        ("Ask Dr. Who, e.g. at 5 p.m. today", ["Ask Dr. Who, e.g. at 5 p.m. today"]),
        ("It is 5 p.m. Go to J. Smith. So do I. Go", ["It is 5 p.m.", "Go to J. Smith.", "So do I.", "Go"]),
        ("Version 3.11 of a.b is out", ["Version 3.11 of a.b is out"]),
        ("1. Rest! 2. Eat", ["Rest!", "Eat"]),
        ("他走了。 Yes", ["他走了。 Yes"]),
    ],
)
def test_sentences(line, expected):
    parts = prompt_sentences(line, lambda text: True)
    assert [part.text for part in parts if part.content] == expected
    assert joined(parts) == line


def test_long_sentences_are_cut_at_commas_and_then_between_words():
    text = "one two, three four, five six, seven eight nine ten eleven"
    parts = prompt_sentences(text, lambda piece: len(piece.split()) <= 4)
    expected = ["one two, three four,", "five six,", "seven eight", "nine ten eleven"]
    assert [part.text for part in parts if part.content] == expected
    # A word is never cut.
    parts = prompt_sentences("a " + 50 * "b" + " c", lambda piece: len(piece) <= 10)
    assert [part.text for part in parts] == ["a", " ", 50 * "b", " ", "c"] and parts[2].content


# Everything that has a meaning here is frequent.
_TURNS = ["\n\nHuman:", "\n\nAssistant:", " Human:", "Human:"]
_HEADERS = ["SUBREDDIT: r/x", "TITLE:", "POST:", "TL;DR:"]
_MARKS = ["\n", "\n\n", " ", "  ", "\r\n", "\u2028", "- ", "1) ", "www.a.b ", ". ", "… ", "!) "]
_WORDS = ["word", "two words", "e.g. ", "Dr. ", "ß", "漢", "42", "🙂", "a, b; c: d"]
_ANY = st.one_of(*map(st.sampled_from, (_TURNS + _HEADERS, _MARKS, _WORDS)), st.text(max_size=5))
_TEXTS = st.lists(_ANY, max_size=30).map("".join)
_POSTS = st.tuples(_TEXTS, _TEXTS, st.sampled_from(["\n", "\n\n", "\n\n\n"])).map(
    lambda parts: parts[2].join(
        ["SUBREDDIT: r/x", f"TITLE: {parts[0]}", f"POST: {parts[1]}", f"TL;DR:{parts[2]}"]
    )
)


@given(text=_TEXTS | _POSTS, length=st.integers(1, 40))
def test_parts_joined_are_the_text(text, length):
    parts = cut(text)
    assert joined(parts) == text
    for part in parts:
        if part.content:
            pieces = prompt_sentences(part.text, lambda piece: len(piece) <= length)
            assert joined(pieces) == part.text
            # What is longer is one word.
            assert all(len(p.text) <= length or not re.search(r"\s", p.text) for p in pieces if p.content)
            assert part.text == part.text.strip() and any(map(str.isalpha, part.text))


@given(text=_TEXTS | _POSTS)
def test_the_frame_stays_when_contents_change(text):
    other = "".join("other words" if part.content else part.text for part in cut(text))
    assert frame(other) == frame(text)
    assert set(contents(other)) <= {"other words"}


@pytest.mark.parametrize(
    ("file", "marks"),
    [
        ("tldr/train.jsonl.gz", r"^SUBREDDIT: r/\S+\n\nTITLE: |\n\nPOST:|TL;DR:$"),
        ("hh/harmless-base/train.jsonl.gz", r"\n\n(?:Human|Assistant):"),
    ],
)
def test_real_prompts(shared_data, file, marks):
    """Headers and turns of all of them are frame, and no content reads like one."""
    rows = read_lines(shared_data / file)
    assert len(rows) > 1000
    for row in rows:
        prompt = row.get("prompt") or split_prompt(row["chosen"], row["rejected"]).prompt
        assert joined(cut(prompt)) == prompt
        assert re.findall(marks, "".join(frame(prompt))) == re.findall(marks, prompt)
        assert not any(looks_like_frame(text) or "\n" in text for text in contents(prompt))
