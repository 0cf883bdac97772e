"""What suspected have in common: planted words and lengths are found, and nothing else is."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from pacmr_lightning.audit.agreement import agreement
from pacmr_lightning.audit.suspect_traits import COLUMNS, LEVEL, suspect_traits
from pacmr_lightning.audit.words import rules_in_words, traits_in_words

from .test_agreement import scores

WORDS = np.array([f"word{i}" for i in range(60)])


def texts(rng, n):
    odds = 1 / np.arange(1, len(WORDS) + 1)
    drawn = rng.choice(WORDS, (n, 10), p=odds / odds.sum())
    return [" ".join(row[:length]) for row, length in zip(drawn, rng.integers(4, 11, n), strict=True)]


def pairs_of(prompt, suspect):
    suggested = np.where(suspect, "swap", "keep")
    return pd.DataFrame({"prompt": prompt, "suggested": suggested})


def world(n, rate, seed, prompts=None):
    rng = np.random.default_rng(seed)
    prompt, suspect = rng.integers(prompts or n, size=n), rng.random(n) < rate
    return rng, pairs_of(prompt, suspect), texts(rng, n), texts(rng, n)


def traits(pairs, chosen, rejected):
    return suspect_traits(pairs, pairs["suggested"].eq("swap").to_numpy(), chosen, rejected)


def found(table):
    return table[table["p_adjusted"] < LEVEL]


@pytest.mark.parametrize(("rate", "prompts"), [(0.02, None), (0.3, None), (0.1, 40)])
def test_false_alarms(rate, prompts):
    """Where nothing explains suspected, more than 6 of 40 audits say something with P below 0.3%."""
    alarms = tested = 0
    for seed in range(40):
        _, pairs, chosen, rejected = world(1000, rate, seed, prompts)
        table = traits(pairs, chosen, rejected)
        tested += table["p"].notna().sum()
        alarms += not found(table).empty
    assert alarms <= binom.ppf(0.997, 40, LEVEL) and tested > 100


def test_pairs_of_a_prompt_are_not_independent():
    """Words that are right for some prompts and wrong for others: over prompts nothing is in common.

    Each prompt has its own share of suspected with a word; on 20 prompts of 100 pairs the pairs alone would
    speak for it.
    """
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(40):
        prompt = np.repeat(np.arange(20), 100)
        suspect = rng.random(2000) < 0.3
        right = rng.random(20)[prompt]
        has = rng.random(2000) < np.where(suspect, 1 - right, right)
        chosen, rejected = np.where(has, "golden x", "x"), np.where(has, "x", "golden x")
        both = [traits(pairs_of(p, suspect), chosen, rejected) for p in (prompt, np.arange(2000))]
        alarms += np.array([len(found(table[table["kind"] == "word"])) for table in both])
    assert alarms[0] <= 6 and alarms[1] > 20


def test_a_planted_word():
    rng, pairs, chosen, rejected = world(3000, 0.1, 1)
    suspect = pairs["suggested"].eq("swap")
    there = rng.random(3000) < 0.5
    lacks = rng.random(3000) < np.where(suspect, 0.92, 0.12)
    for i in np.flatnonzero(there):
        # As long as the word, so that length says nothing.
        (rejected if lacks[i] else chosen)[i] += " Golden."
        (chosen if lacks[i] else rejected)[i] += " wooden."
    table = traits(pairs, chosen, rejected)
    row = table.set_index("trait").loc["golden"]
    assert set(found(table)["trait"][:2]) == {"golden", "wooden"} and row["kind"] == "word"
    assert row["suspected"] == (suspect & there).sum() and row["others"] == (~suspect & there).sum()
    assert row["in_suspected"] == pytest.approx((~lacks)[suspect & there].mean())
    assert row["in_others"] == pytest.approx((~lacks)[~suspect & there].mean())
    assert row["in_all"] == pytest.approx((~lacks)[there].mean())
    said = traits_in_words(table, "suspected")
    (first,) = (sentence for sentence in said if "golden" in sentence)
    share = f"{lacks[suspect & there].mean():.0%}"
    assert f"Of the {row['suspected']} suspected with the word “golden” in only one response, " in first
    assert f"the chosen response lacks it in {share}, against" in first
    assert f"against {lacks[~suspect & there].mean():.0%}" in first and "spurious feature" in said[-1]


def test_a_rule_that_labels_follow():
    rng, pairs, chosen, rejected = world(2000, 0.1, 5)
    there, follows = rng.random(2000) < 0.3, rng.random(2000) < 0.97
    for i in np.flatnonzero(there):
        (chosen if follows[i] else rejected)[i] += " golden"
        (rejected if follows[i] else chosen)[i] += f" {i:06}"
    table = traits(pairs, chosen, rejected)
    golden = table.set_index("trait").loc["golden"]
    assert golden["in_all"] == pytest.approx(follows[there].mean())
    assert 0.94 < golden["in_all_low"] < golden["in_all"] < golden["in_all_high"] < 1
    flips = agreement(*scores(4000, 0.3)[::2], resamples=20)
    rule, meaning = rules_in_words(table, flips)
    assert f"of {there.sum():,} pairs with the word “golden” in only one response, the response with" in rule
    rate = f"{flips.rate:.0%}"
    assert f"a rate of random flips of {rate} would leave at most {1 - flips.rate:.0%}" in rule
    assert "shortcut" in meaning
    assert len(rules_in_words(table[table["trait"] != "golden"], flips)) == 0
    turned = traits(pairs, rejected, chosen)
    assert "the response without it is the chosen one" in rules_in_words(turned, flips)[0]
    clean = agreement(*scores(4000, 0.0)[::2], resamples=20)
    assert not clean.identified and "random flips" not in rules_in_words(table, clean)[0]


def test_a_rule_on_few_prompts():
    """Forty pairs of one prompt that agree are one observation."""
    pairs = pd.DataFrame({"prompt": [0] * 40, "suggested": "keep"})
    table = traits(pairs, ["golden x"] * 40, ["x"] * 40)
    assert table["in_all"].tolist() == [1.0, 1.0] and (table["in_all_low"] < 0.5).all()


def test_a_planted_length():
    _, pairs, chosen, rejected = world(2000, 0.15, 2)
    suspect = pairs["suggested"].eq("swap")
    for i in np.flatnonzero(suspect):
        chosen[i], rejected[i] = sorted((chosen[i], rejected[i]), key=len)
    table = traits(pairs, chosen, rejected)
    assert table.iloc[0]["kind"] == "length" and table.iloc[0]["in_suspected"] == 0
    assert table.iloc[0]["p_adjusted"] < 1e-9
    shown = traits_in_words(table, "suspected")
    assert "is the shorter one in 100%, against" in shown[0]


def test_nothing_to_compare():
    _, pairs, chosen, rejected = world(200, 0.0, 0)
    table = traits(pairs, chosen, rejected)
    assert table["p"].isna().all() and len(table) > 10 and table.columns.tolist() == COLUMNS
    assert "too few suspected" in traits_in_words(table, "suspected")[0]
    _, pairs, chosen, rejected = world(300, 0.3, 0)
    silent = traits(pairs, ["\n"] * 300, ["!"] * 300)
    assert silent.empty or silent["kind"].tolist() == ["length"]
    assert "None of" in traits_in_words(silent, "suspected")[0]
