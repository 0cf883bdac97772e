"""Distinct and repeated bigrams."""

import math

import pytest

from pacmr_lightning.evaluation.generation import distinct_bigrams, repeated_bigrams


def test_bigrams():
    """ab bc cd | ab ba ab bc: 4 of 7 are different; of the second response's 4, one stood before."""
    responses = ["abcd", "ababc"]
    assert distinct_bigrams(responses) == 4 / 7
    assert repeated_bigrams(responses) == pytest.approx(1 / 7)


def test_no_bigram():
    assert math.isnan(distinct_bigrams(["a", ""])) and math.isnan(repeated_bigrams(["a", ""]))
