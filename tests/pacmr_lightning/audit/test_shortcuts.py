"""Shortcuts: a word or length that labels follow is found, and nothing else is."""

import numpy as np
import pytest

from pacmr_lightning.audit.shortcuts import FOLLOWED, shortcuts
from pacmr_lightning.audit.words import shortcuts_in_words

WORDS = np.array([f"word{i}" for i in range(60)])


def texts(rng, n):
    odds = 1 / np.arange(1, len(WORDS) + 1)
    drawn = rng.choice(WORDS, (n, 10), p=odds / odds.sum())
    return [" ".join(row[:length]) for row, length in zip(drawn, rng.integers(4, 11, n), strict=True)]


def test_a_word_that_labels_follow():
    rng = np.random.default_rng(5)
    chosen, rejected = texts(rng, 2000), texts(rng, 2000)
    there, follows = rng.random(2000) < 0.3, rng.random(2000) < 0.97
    for i in np.flatnonzero(there):
        (chosen if follows[i] else rejected)[i] += " golden"
        (rejected if follows[i] else chosen)[i] += f" {i:06}"  # as long, so that length says nothing
    prompts = np.arange(2000)
    found, other = shortcuts(prompts, chosen, rejected), shortcuts(prompts, rejected, chosen)
    [row] = found.to_dict("records")
    assert (row["kind"], row["trait"], row["chosen"], row["pairs"]) == ("word", "golden", "with", there.sum())
    # Wilson's interval of independent pairs.
    p, n, z = follows[there].mean(), there.sum(), 1.959964
    middle, half = p + z**2 / (2 * n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert row["share"] == pytest.approx(p)
    ends = [(middle + sign * half) / (1 + z**2 / n) for sign in (-1, 1)]
    assert [row["low"], row["high"]] == pytest.approx(ends, rel=0.02)
    said, meaning = shortcuts_in_words(found)
    place = f"of {there.sum():,} pairs with the word “golden” in only one response"
    assert f"in {p:.0%} {place}, the response with it is the chosen one (95% interval" in said
    assert "shortcut of the labellers" in meaning
    [swapped] = other.to_dict("records")
    assert swapped["chosen"] == "without" and swapped["low"] == pytest.approx(row["low"])
    assert "the response without it is the chosen" in shortcuts_in_words(other)[0]


def test_the_longer_response_and_nothing():
    rng = np.random.default_rng(2)
    pairs = list(zip(texts(rng, 800), texts(rng, 800), strict=True))
    longest = [sorted(pair, key=len) for pair in pairs]
    rejected, chosen = zip(*longest, strict=True)
    found = shortcuts(np.arange(800), chosen, rejected)
    assert found["kind"][0] == "length" and found["share"][0] == 1
    assert "the longer response is the chosen one" in shortcuts_in_words(found)[0]
    assert "the shorter response is the" in shortcuts_in_words(shortcuts(np.arange(800), rejected, chosen))[0]
    nothing = shortcuts(np.arange(800), *zip(*pairs, strict=True))
    assert nothing.empty and shortcuts_in_words(nothing) == []
    assert shortcuts(np.arange(800), ["\n"] * 800, ["!"] * 800)["kind"].tolist() == ["length"]


def test_pairs_of_a_prompt_are_not_independent():
    """Forty pairs of one prompt that agree are one observation, and of forty prompts forty."""
    one = shortcuts(np.zeros(40, int), ["golden x"] * 40, ["x"] * 40)
    many = shortcuts(np.arange(40), ["golden x"] * 40, ["x"] * 40)
    assert one.empty and set(many["kind"]) == {"length", "word"} and many["low"].min() > FOLLOWED
