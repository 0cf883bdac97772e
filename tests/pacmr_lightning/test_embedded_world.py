"""The synthetic benchmark: documented properties for every seed, and the same rows everywhere."""

import itertools
import math

import numpy as np
import pytest

from pacmr_lightning.embedded_world import ATTRIBUTES, MOODS, TOPICS, World
from pacmr_lightning.errors import UserError


@pytest.fixture(params=[0, 1, 7])
def world(request):
    return World(request.param)


def test_rewording_keeps_the_meaning_and_no_word_of_topic_or_mood(world):
    content = {word for group in (*TOPICS, *MOODS) for word in group}
    assert len(set(world.prompts())) == 144 and "Describe the ocean in a calm mood:" in world.prompts()
    for prompt in world.prompts():
        other = world.reword(prompt)
        assert other in world.prompts()
        assert world.reword(other) == prompt
        before, after = (set(text.rstrip(":").split()) & content for text in (prompt, other))
        assert len(before) == len(after) == 2 and not before & after
        # Exactly, whatever the order of the sum.
        assert world.gold_reward(other, " wild cold vast") == world.gold_reward(prompt, " vast wild cold")


def test_gold_reward_of_free_text(world):
    """It depends on topic, mood and attributes, each of which counts once, and the first four alone."""
    assert len(np.unique(world.rewards)) == world.rewards.size == 6 * 6 * 16
    np.testing.assert_allclose(world.rewards.mean(-1), 0, atol=1e-12)
    prompt = world.prompts()[17]
    table = dict(zip(ATTRIBUTES, world.rewards[0, 2], strict=True))
    assert prompt.split()[2:7] == ["sea", "in", "a", "sorrowful", "mood:"]
    for response, counted in {
        " cold deep": "cold deep",
        " cold cold deep deep": "cold deep",
        " cold and deep, wild": "cold wild",
        " cold deep wild vast bright": "cold deep wild vast",
        "": "",
        "no such words": "",
    }.items():
        expected = sum(table[word] for word in counted.split())
        assert world.gold_reward(f" {prompt}\n", response) == pytest.approx(expected, abs=1e-12)


def test_bad_input():
    said = "a green mood:' is not of the synthetic benchmark; write it like"
    for ask in (World().reword, lambda prompt: World().gold_reward(prompt, " cold")):
        with pytest.raises(UserError, match=said):
            ask("Describe the ocean in a green mood:")
    with pytest.raises(UserError, match="is -1"):
        World(-1)
    with pytest.raises(UserError, match="is -2"):
        next(World().preference_rows(1, -2))


def test_preference_rows(world):
    rows = list(world.preference_rows(300, 5))
    assert [row["id"] for row in rows] == [f"world-5-{i}" for i in range(300)]
    for row in rows:
        assert row["augmented_prompt"] == world.reword(row["prompt"])
        topic = row["prompt"].split()[2]
        assert topic in next(group for group in TOPICS if group[0] == row["category"])
        for side in ("chosen", "rejected"):
            assert row[side] == " " + " ".join(row[side].split())
            assert len(set(row[side].split()) & set(ATTRIBUTES)) == 4 == len(row[side].split())
        assert set(row["chosen"].split()) != set(row["rejected"].split())
        chosen, rejected = (world.gold_reward(row["prompt"], row[side]) for side in ("chosen", "rejected"))
        assert row["eta"] == pytest.approx(1 / (1 + math.exp(rejected - chosen)), abs=1e-12)


def test_eta_is_calibrated(world):
    """Among pairs whose better response wins with probability p, it is chosen in a share p of the rows."""
    eta = np.array([row["eta"] for row in world.preference_rows(8000, 4)])
    better = np.maximum(eta, 1 - eta)
    assert 0.85 < better.mean() < 0.9, "labels are informative, but not certain"
    for low, high in itertools.pairwise(np.linspace(0.5, 1, 6)):
        here = (better >= low) & (better < high)
        error = (eta[here] > 0.5).mean() - better[here].mean()
        assert abs(error) < 4 * (0.25 / here.sum()) ** 0.5


def test_rows_are_streams_that_differ_by_seed_and_kind():
    world = World()
    assert list(world.preference_rows(5, 1)) == list(world.preference_rows(9, 1))[:5]
    assert list(world.sft_rows(5, 1)) == list(world.sft_rows(9, 1))[:5]
    first, second = ([row["prompt"] for row in world.preference_rows(50, seed)] for seed in (1, 2))
    assert first != second != [row["prompt"] for row in world.sft_rows(50, 2)]
    assert (World(0).rewards != World(1).rewards).all()


def test_the_same_rows_on_every_machine():
    """Written down once: if this fails, every number that was measured on the world is of another world."""
    row = next(World().preference_rows(1, 0))
    assert (row["prompt"], row["chosen"], row["rejected"]) == (
        "Describe the peak in a mysterious mood:",
        " cold wild gentle restless",
        " quiet bright wild soft",
    )
    assert row["eta"] == pytest.approx(0.9996881128688828, abs=1e-9)
    assert next(World().sft_rows(1, 0)) == {
        "prompt": "Describe the storm in a happy mood:",
        "completion": " hollow restless quiet bright",
    }


def test_demonstrations_are_better_than_random_responses(world):
    def mean_reward(best_of):
        rows = world.sft_rows(1000, 0, best_of)
        return np.mean([world.gold_reward(row["prompt"], row["completion"]) for row in rows])

    random, best = mean_reward(1), mean_reward(4)
    assert abs(random) < 0.5
    assert best > random + 2
    assert mean_reward(16) > best
