"""The reasoning that models write before an answer, where a server leaves it in the text."""

from __future__ import annotations

import re

_TAGS = "think|thinking|thought|thoughts|reason|reasoning|reflection|scratchpad"
_MARK = re.compile(
    rf"(?P<begin><(?:\w+:)?(?:{_TAGS})>|\[THINK\]|◁think▷|<\|begin_of_thought\|>|<unused94>)"
    rf"|</(?:\w+:)?(?:{_TAGS})>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>|<unused95>",
    re.I,
)


def without_thoughts(text: str) -> str:
    """Return a model's answer without its reasoning; empty where it never came to an answer.

    Reasoning is what stands between tags such as ``<think>`` and ``</think>``, before an end without a
    beginning (which then stood in the prompt), after a beginning of a line without an end (which a limit of
    tokens cut off), or in another channel of gpt-oss than ``final``.

    Args:
        text: as the server gave it. Text without such marks is returned as it is.
    """
    start = text.lstrip().removeprefix("<|start|>assistant")
    if start.startswith("<|channel|>"):
        final = start.rpartition("<|channel|>final")[2] if "<|channel|>final" in start else ""
        return re.split(r"<\|(?:return|end)\|>", final.partition("<|message|>")[2])[0].strip()
    if start.startswith("analysis") and "assistantfinal" in start:  # without its special tokens
        return start.rpartition("assistantfinal")[2].strip()
    parts: list[str] = []
    after, begin = 0, None
    for mark in _MARK.finditer(text):
        if mark["begin"]:
            begin = mark.start() if begin is None else begin
            continue
        parts = [] if begin is None else [*parts, text[after:begin]]
        after, begin = mark.end(), None
    # In the middle of a line it is only mentioned.
    cut = begin is not None and not text[after:begin].rpartition("\n")[2].strip()
    if not after and not cut:
        return text
    return "".join([*parts, text[after:begin] if cut else text[after:]]).strip()
