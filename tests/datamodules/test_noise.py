import json
import random
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pacmr_lightning.datamodules.columns import PREFERENCES
from pacmr_lightning.datamodules.hashing import unit_hash
from pacmr_lightning.datamodules.noise import (
    CategoryNoise,
    LabelNoise,
    NoiseFromMask,
    SymmetricNoise,
    TwoRateNoise,
    label_noise,
)
from pacmr_lightning.datamodules.pairs import flip_flags
from pacmr_lightning.datamodules.reading import rows_to_dataset
from pacmr_lightning.errors import UserError

IDS = [f"pair-{i}" for i in range(4000)]


def rows(ids=IDS, swap=False, category=None):
    """Pairs whose responses depend on the id alone; ``swap`` exchanges them."""
    sides = [(f" yes {i}", f" no {i}") for i in ids]
    if swap:
        sides = [(second, first) for first, second in sides]
    return rows_to_dataset(
        [
            {"id": i, "prompt": "p", "chosen": c, "rejected": r, "category": category and category(i)}
            for i, (c, r) in zip(ids, sides, strict=True)
        ],
        PREFERENCES,
        "test",
    )


@pytest.fixture(scope="module")
def pairs():
    return rows()


def test_masks_are_nested_over_rates(pairs):
    masks = [SymmetricNoise(rate).flips(pairs, 42) for rate in (0.0, 0.1, 0.2, 0.3, 0.4)]
    assert not any(masks[0].values())
    for low, high in pairwise(masks):
        assert all(high[i] for i in IDS if low[i])
        assert sum(low.values()) < sum(high.values())


@pytest.mark.parametrize("rate", [0.2, 0.4])
def test_share_is_the_rate_within_four_standard_errors(pairs, rate):
    tolerance = 4 * (rate * (1 - rate) / len(IDS)) ** 0.5
    assert sum(SymmetricNoise(rate).flips(pairs, 1).values()) / len(IDS) == pytest.approx(rate, abs=tolerance)


def test_mask_does_not_depend_on_order_or_on_other_rows(pairs):
    mask = SymmetricNoise(0.3).flips(pairs, 42)
    shuffled = random.Random(0).sample(IDS, 1000)
    assert SymmetricNoise(0.3).flips(rows(shuffled), 42) == {i: mask[i] for i in shuffled}


def test_seeds_flip_other_pairs(pairs):
    first, second = (SymmetricNoise(0.5).flips(pairs, seed) for seed in (0, 1))
    agreement = sum(first[i] == second[i] for i in IDS) / len(IDS)
    assert agreement == pytest.approx(0.5, abs=0.04)


def test_hash_is_the_same_on_every_machine():
    """Written down once: another value would change every mask that was ever published."""
    assert unit_hash("pair-0", 42) == 0.0429710794931174


def test_two_rates_hold_by_an_order_that_knows_nothing_of_labels(pairs):
    """The pairs that get eps0 as they are get eps1 once chosen and rejected are exchanged."""
    noise = TwoRateNoise([0.05, 0.6])
    flips, exchanged = noise.flips(pairs, 42), noise.flips(rows(swap=True), 42)
    # The hash of the id decides under both rates: between the two, exactly one of the orders is flipped.
    between = [i for i in IDS if 0.05 <= unit_hash(i, 42) < 0.6]
    assert all(flips[i] != exchanged[i] for i in between)
    first = [i for i in between if not flips[i]]
    assert len(first) / len(between) == pytest.approx(0.5, abs=0.05)
    rest = set(IDS) - set(between)
    assert all(flips[i] == exchanged[i] == (unit_hash(i, 42) < 0.05) for i in rest)
    assert noise.rate is None
    equal = TwoRateNoise([0.3, 0.3]).flips(pairs, 42)
    assert equal == SymmetricNoise(0.3).flips(pairs, 42)


def test_rates_by_category():
    found = rows(category=lambda i: f"c{int(i[5:]) % 3}")
    flips = CategoryNoise({"c0": 0.0, "c1": 0.4}, 0.1).flips(found, 42)
    category = dict(zip(found["id"], found["category"], strict=True))
    for name, rate in (("c0", 0.0), ("c1", 0.4), ("c2", 0.1)):
        plain = SymmetricNoise(rate).flips(found, 42)
        assert all(flips[i] == plain[i] for i in IDS if category[i] == name)
    with pytest.raises(UserError, match=r"rates names 'x', but .* \(there are c0, c1, c2\)"):
        CategoryNoise({"x": 0.1}).flips(found, 42)


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_mask_files(pairs, tmp_path, ending):
    mask = SymmetricNoise(0.3).flips(pairs, 42)
    path = tmp_path / f"mask.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({"id": list(mask), "flipped": list(mask.values())}), path)
    else:
        path.write_text("".join(json.dumps({"id": i, "flipped": f}) + "\n" for i, f in mask.items()))
    noise = NoiseFromMask(str(path))
    assert noise.flips(pairs, 1) == mask and noise.rate is None
    assert noise.flips(rows(IDS[5:10]), 1) == {i: mask[i] for i in IDS[5:10]}
    with pytest.raises(UserError, match=r"says nothing of 1 of the 3 training pairs, 'other' for one"):
        noise.flips(rows([*IDS[:2], "other"]), 1)


def test_bad_masks(pairs, tmp_path):
    (tmp_path / "mask.jsonl").write_text('{"id": "a", "flipped": "yes"}\n')
    with pytest.raises(UserError, match=r"mask\.jsonl, line 1 has id 'a' and flipped 'yes'"):
        NoiseFromMask(str(tmp_path / "mask.jsonl")).flips(pairs, 42)
    with pytest.raises(UserError, match=r"There is no file .*none\.parquet"):
        NoiseFromMask(str(tmp_path / "none.parquet")).flips(pairs, 42)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_rates_outside_the_unit_interval_are_refused(rate):
    with pytest.raises(UserError, match=f"noise_rate is {rate}"):
        SymmetricNoise(rate)
    with pytest.raises(UserError, match=f"noise_rates is {rate}"):
        TwoRateNoise([0.1, rate])
    with pytest.raises(UserError, match=f"rates of 'c' is {rate}"):
        CategoryNoise({"c": rate})


def test_kinds_of_noise_exclude_each_other():
    with pytest.raises(UserError, match=r"noise_rates is \[0\.1\], but two"):
        TwoRateNoise([0.1])

    class Alternating(LabelNoise):
        def probabilities(self, rows):
            return [i % 2 for i in range(len(rows))]

    for given in ((None, 0.1, [0.1, 0.2]), (Alternating(), 0.1, None), (Alternating(), 0.0, [0, 0])):
        with pytest.raises(UserError, match="are given together; take out all but one"):
            label_noise(*given)
    assert label_noise(None, 0.0, None) is None and label_noise(None, 0.1, None).rate == 0.1
    assert isinstance(label_noise(None, 0.0, [0, 0]), TwoRateNoise)
    assert isinstance(label_noise(Alternating(), 0.0, None), Alternating)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.5, 1.5], r"Odd gives the pair 'b' the probability 1\.5"),
        ([float("nan"), 0], r"Odd gives the pair 'a' the probability nan"),
        ([0.5], r"Odd gives 1 probabilities of 2 training pairs"),
    ],
)
def test_probabilities_are_checked(values, message):
    class Odd(LabelNoise):
        def probabilities(self, rows):
            return values

    with pytest.raises(UserError, match=message):
        Odd().flips(rows(["a", "b"]), 42)


def test_flags_are_relative_to_what_the_data_says():
    """Swapping a label that is known to be wrong makes it right; without noise, nothing is claimed."""
    given, mask = [1, 1, 0, 0, -1, -1], [True, False, True, False, True, False]
    assert flip_flags(given, mask) == [0, 1, 1, 0, 1, 0]
    assert flip_flags(given, None) == given
