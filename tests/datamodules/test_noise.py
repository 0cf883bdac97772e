import random
from itertools import pairwise

import pytest

from pacmr_lightning.datamodules.noise import check_rate, flip_flags, flip_mask, unit_hash
from pacmr_lightning.errors import UserError

IDS = [f"pair-{i}" for i in range(4000)]


def test_masks_are_nested_over_rates():
    masks = [flip_mask(IDS, rate, seed=42) for rate in (0.0, 0.1, 0.2, 0.3, 0.4)]
    assert not any(masks[0])
    for low, high in pairwise(masks):
        assert all(h for low_flag, h in zip(low, high, strict=True) if low_flag)
        assert sum(low) < sum(high)


@pytest.mark.parametrize("rate", [0.2, 0.4])
def test_share_is_the_rate_within_four_standard_errors(rate):
    tolerance = 4 * (rate * (1 - rate) / len(IDS)) ** 0.5
    assert sum(flip_mask(IDS, rate, seed=1)) / len(IDS) == pytest.approx(rate, abs=tolerance)


def test_mask_does_not_depend_on_order_or_on_other_rows():
    mask = dict(zip(IDS, flip_mask(IDS, 0.3, seed=42), strict=True))
    shuffled = random.Random(0).sample(IDS, 1000)
    assert flip_mask(shuffled, 0.3, seed=42) == [mask[i] for i in shuffled]


def test_seeds_flip_other_pairs():
    first, second = (flip_mask(IDS, 0.5, seed) for seed in (0, 1))
    agreement = sum(a == b for a, b in zip(first, second, strict=True)) / len(IDS)
    assert agreement == pytest.approx(0.5, abs=0.04)


def test_hash_is_the_same_on_every_machine():
    """Written down once: another value would change every mask that was ever published."""
    assert unit_hash("pair-0", 42) == 0.0429710794931174


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_rates_outside_the_unit_interval_are_refused(rate):
    with pytest.raises(UserError, match=f"noise_rate is {rate}"):
        check_rate(rate)
    with pytest.raises(UserError):
        flip_mask(IDS[:1], rate, seed=0)


def test_flags_are_relative_to_what_the_data_says():
    """Swapping a label that is known to be wrong makes it right; without noise, nothing is claimed."""
    given, mask = [1, 1, 0, 0, -1, -1], [True, False, True, False, True, False]
    assert flip_flags(given, mask, rate=0.5) == [0, 1, 1, 0, 1, 0]
    assert flip_flags(given, [False] * 6, rate=0.0) == [1, 1, 0, 0, -1, -1]
