"""Which texts repeat themselves, and which repeat what their source does."""

import pytest

from pacmr_lightning.datamodules.augmentation.rewriter import loops

SOURCE = "I do not know what to do."
PHRASES = ("so ", "I do ", "我不知道", "and then we go home ", "x y z 1 2 3 4 5, ")
ENDLESS = [
    (f"I know, {phrase * times}{end}", SOURCE)
    for phrase in PHRASES
    for end in ("", "but not now.")
    for times in (8, 50)
]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        *ENDLESS,
        ("hahahahahaha", SOURCE),
        ("The ship, the ship of the king, the ship of the king, the ship of the king.", SOURCE),
        ("no " * 40, "no no no"),
        ("0, 0, 0, 0, 0, 0, 0", SOURCE),
    ],
)
def test_loops(text, source):
    assert loops(text, source)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("ha ha ha", SOURCE),  # fewer than six, and short
        ("ha ha ha ha ha ha", "ha ha ha"),  # at most twice as many as in the source
        ("哈哈哈哈哈哈", "ha ha ha"),
        ("very, very, very good", SOURCE),
        ("I like it, I like it.", SOURCE),  # twice
        ("Wait............", SOURCE),  # signs alone
        ("| --- | --- | --- | --- | --- | --- |", SOURCE),
        ("1. one 2. two 3. three 4. four 5. five 6. six", SOURCE),
        ("x = [0, 0, 0, 0, 0, 0, 0]", "x = [0, 0, 0, 0, 0, 0, 0]"),
        ("    x += 1\n" * 5, "    x += 1\n" * 5),
        ("10000000 people", "ten million people"),  # digits of one number
        ("Sooooooooo good", "Soooooo good"),
        ("", SOURCE),
    ],
)
def test_honest_repetitions(text, source):
    assert not loops(text, source)
