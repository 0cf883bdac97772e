"""Segmentation of prompts into frame and contents.

The frame stays byte for byte as in training: turn markers of HH transcripts, headers of TL;DR posts, line
breaks, list marks, and the whitespace around every content.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from ..chat import decode_messages, encode_messages

# Some HH turns read "Assistant: Human: ...": both names belong to the frame.
_TURN = re.compile(r"((?:\A|\n\n)(?:Human|Assistant):(?:[ \t]*(?:Human|Assistant):)*)")
# Titles may span lines, and rewording.reword puts the title before the subreddit.
_TLDR = re.compile(
    r"(\s*(?:SUBREDDIT:[^\n]*\n+)?TITLE:)(.*?)(\n+(?:SUBREDDIT:[^\n]*\n+)?POST:)(.*)(TL;DR:\s*)", re.DOTALL
)
_MARK = re.compile(r"\s*(?:Human|Assistant|SUBREDDIT|TITLE|POST|TL;DR):")
_BREAKS = re.compile(r"([\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+)")
_LINE_START = re.compile(r"\s*(?:(?:[-*•–—>#]+|\d{1,3}[.)])\s+)*")
_ADDRESS = re.compile(r"\W*(?:https?://|www\.)\S+")

_SENTENCE_END = re.compile(r"""(?P<mark>[.!?…]+)["'”’)\]*_]*(?P<space>\s+)""")
_NEVER_LAST = re.compile(r"(?:mrs?|ms|dr|prof|st|vs|e\.g|i\.e|cf|approx|gen|sgt|capt|rev)\.", re.IGNORECASE)
_SELDOM_LAST = re.compile(r"(?:[ap]\.?m|u\.s|u\.k|etc|inc|ltd|co|jr|sr|ph\.d)\.", re.IGNORECASE)
_INITIAL = re.compile(r"[A-HJ-Z]\.")


class Part(NamedTuple):
    """A segment of a text; joined segments give the text."""

    text: str
    content: bool


def texts_of(prompt: str, chat: bool) -> list[str]:
    """Return a text prompt, or the user messages of a JSON conversation."""
    if not chat:
        return [prompt]
    return [message["content"] for message in decode_messages(prompt) if message["role"] == "user"]


def with_texts(prompt: str, chat: bool, texts: list[str]) -> str:
    """Return the prompt with its ``texts_of`` replaced."""
    if not chat:
        [text] = texts
        return text
    others = iter(texts)
    messages = [
        message | {"content": next(others)} if message["role"] == "user" else message
        for message in decode_messages(prompt)
    ]
    return encode_messages(messages)


def cut(text: str) -> list[Part]:
    """Split a text into frame and contents: lines of turns, titles, posts and other texts.

    HH transcripts (``\n\nHuman:``, ``\n\nAssistant:``) and TL;DR posts (``SUBREDDIT:``, ``TITLE:``,
    ``POST:``, ``TL;DR:``) are recognised. Lines without a letter and lines that are only a URL are frame.
    """
    post = _TLDR.fullmatch(text)
    # Either way, frame and contents alternate.
    stretches = post.groups() if post else _TURN.split(text)
    parts = []
    for number, stretch in enumerate(stretches):
        if number % 2 == bool(post):
            for line_number, line in enumerate(_BREAKS.split(stretch)):
                parts += [Part(line, False)] if line_number % 2 else _line(line)
        else:
            parts.append(Part(stretch, False))
    return _merged(parts)


def prompt_sentences(content: str, fits: Callable[[str], bool]) -> list[Part]:
    """Split a content into sentences; those that do not fit are cut at commas or between words."""
    parts = []
    start = 0
    for end in _SENTENCE_END.finditer(content):
        if _goes_on(content[start : end.start("space")], end["mark"], content[end.end() :]):
            continue
        parts += [*_fitting(content[start : end.start("space")], fits), Part(end["space"], False)]
        start = end.end()
    return _merged([*parts, *_fitting(content[start:], fits)])


def looks_like_frame(text: str) -> bool:
    """Return whether a text begins like a turn or a header, which a content must not."""
    return _MARK.match(text) is not None


def _line(line: str) -> list[Part]:
    start = _LINE_START.match(line)
    assert start is not None  # everything in it is optional
    begin = start.end()
    core = line[begin:].rstrip()
    end = begin + len(core)
    return [Part(line[:begin], False), _part(core), Part(line[end:], False)]


def _part(text: str) -> Part:
    return Part(text, any(map(str.isalpha, text)) and not _ADDRESS.fullmatch(text))


def _merged(parts: list[Part]) -> list[Part]:
    merged: list[Part] = []
    for part in parts:
        if merged and not part.content and not merged[-1].content:
            merged[-1] = Part(merged[-1].text + part.text, False)
        elif part.text:
            merged.append(part)
    return merged


def _goes_on(sentence: str, mark: str, rest: str) -> bool:
    last = sentence.rsplit(maxsplit=1)[-1].lstrip("\"'“‘([*_")
    if mark == ".":
        if _NEVER_LAST.fullmatch(last) or _INITIAL.fullmatch(last):
            return True
        return _SELDOM_LAST.fullmatch(last) is not None and rest[:1].islower()
    return mark[0] in ".…" and rest[:1].islower()


def _fitting(text: str, fits: Callable[[str], bool]) -> list[Part]:
    part = _part(text)
    if not part.content or fits(text):
        return [part]
    middle, quarter = len(text) / 2, len(text) / 4
    for gaps in (r"(?<=[,;:])\s+", r"\s+"):
        spans = [gap.span() for gap in re.finditer(gaps, text) if gap.start() > 0 and gap.end() < len(text)]
        nearest = min(spans, key=lambda span: abs(span[0] - middle), default=None)
        # A comma near the end hardly shortens the sentence; a gap between words always helps.
        if nearest is not None and (gaps == r"\s+" or abs(nearest[0] - middle) <= quarter):
            begin, end = nearest
            return [*_fitting(text[:begin], fits), Part(text[begin:end], False), *_fitting(text[end:], fits)]
    return [part]
