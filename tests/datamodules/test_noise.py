"""Label noise: masks by ids, probabilities by closed forms, and masks by frequencies."""

import itertools
import random
from functools import partial

import numpy as np
import pytest
from scipy.special import expit, logit

from pacmr_lightning.datamodules import (
    AnnotatorNoise,
    CategoryNoise,
    EmbeddedWorld,
    LabelNoise,
    NearTieNoise,
    NoiseFromMask,
    SpuriousPreferenceNoise,
    SymmetricNoise,
    TemperatureLabels,
    TwoRateNoise,
)
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import unit_hash

from ..conftest import write_lines
from .checked_rows import pairs

ROWS = 4000
KINDS = {
    "near ties": NearTieNoise,
    "longer": SpuriousPreferenceNoise,
    "temperature": lambda share: TemperatureLabels(share=share),
    "annotators": AnnotatorNoise,
    "categories": lambda share: CategoryNoise(share=share),
}


def rows_of(columns):
    texts = {"prompt": "p", "chosen": " a", "rejected": " b"}
    return pairs(*(texts | row for row in columns))


@pytest.fixture(scope="module")
def world():
    return EmbeddedWorld(ROWS).load("train")


def test_hash_is_the_same_on_every_machine():
    """Written down once: another value would change every mask that was ever published."""
    assert unit_hash("pair-0", 42) == 0.0429710794931174


def test_two_rates_hold_by_an_order_that_knows_nothing_of_labels(world):
    """The pairs that get eps0 as they are get eps1 once chosen and rejected are exchanged."""
    noise = TwoRateNoise([0.05, 0.6])
    ids = world["id"][:]
    other = rows_of({"id": row["id"], "chosen": row["rejected"], "rejected": row["chosen"]} for row in world)
    flips, exchanged = noise.flips(world, 42), noise.flips(other, 42)
    # The hash of the id decides under both rates: between the two, exactly one of the orders is flipped.
    between = [i for i in ids if 0.05 <= unit_hash(i, 42) < 0.6]
    assert all(flips[i] != exchanged[i] for i in between)
    first = [i for i in between if not flips[i]]
    assert len(first) / len(between) == pytest.approx(0.5, abs=0.05)
    rest = set(ids) - set(between)
    assert all(flips[i] == exchanged[i] == (unit_hash(i, 42) < 0.05) for i in rest)
    assert TwoRateNoise([0.3, 0.3]).flips(world, 42) == SymmetricNoise(0.3).flips(world, 42)


def test_rates_by_category(world):
    names = sorted(set(world["category"]))
    rates = {names[0]: 0.0, names[1]: 0.4}
    flips = CategoryNoise(rates, 0.1).flips(world, 42)
    for i, category in zip(world["id"], world["category"], strict=True):
        assert flips[i] == (unit_hash(i, 42) < rates.get(category, 0.1))
    with pytest.raises(UserError, match=rf"rates names 'x', but .* \(there are {', '.join(names)}\)"):
        CategoryNoise({"x": 0.1}).flips(world, 42)


def test_mask_files(world, tmp_path):
    mask = SymmetricNoise(0.3).flips(world, 42)
    path = write_lines(tmp_path / "mask.jsonl", ({"id": i, "flipped": f} for i, f in mask.items()))
    noise = NoiseFromMask(path)
    assert noise.flips(world, 1) == mask
    some = world.select(range(5, 10))
    assert noise.flips(some, 1) == {i: mask[i] for i in some["id"]}
    with pytest.raises(UserError, match=r"lacks 1 of the 3 training pairs, 'other' for one"):
        noise.flips(rows_of({"id": i} for i in (*some["id"][:2], "other")), 1)
    write_lines(path, [{"id": "a", "flipped": "yes"}])
    with pytest.raises(UserError, match=r"mask\.jsonl, line 1 has id 'a' and flipped 'yes'"):
        noise.flips(world, 42)
    write_lines(path, [{"id": "a", "flipped": True}, {"id": "a", "flipped": False}])
    said = r"line 2 has id 'a' and flipped False, .* the same in all rows of an id"
    with pytest.raises(UserError, match=said):
        noise.flips(world, 42)
    with pytest.raises(UserError, match=r"There is no file .*none\.parquet"):
        NoiseFromMask(str(tmp_path / "none.parquet")).flips(world, 42)


@pytest.mark.parametrize(
    ("values", "among"),
    [([float("nan"), 0], ", nan among them,"), ([0.5, 1.5], ", 1.5 among them,"), ([0.5], "")],
)
def test_probabilities_are_checked(values, among):
    class Odd(LabelNoise):
        def probabilities(self, rows):
            return values

    with pytest.raises(UserError, match=f"Odd gives {len(values)} probabilities{among} for 2 training pairs"):
        Odd().flips(rows_of([{}, {}]), 42)


def probabilities(noise, rows):
    return np.array(noise.probabilities(rows))


def flips(noise, rows, seed=42):
    return np.array(list(noise.flips(rows, seed).values()))


def agree(observed, expected):
    for group in np.array_split(np.argsort(expected, kind="stable"), 10):
        p = expected[group]
        tolerance = 4 * np.sqrt(np.sum(p * (1 - p))) / len(group)
        assert observed[group].mean() == pytest.approx(p.mean(), abs=tolerance + 1e-12)


@pytest.mark.parametrize("kind", [*KINDS, "symmetric"])
def test_what_all_kinds_have_in_common(kind, world):
    masks = []
    for share in (0.1, 0.2, 0.3):
        noise = (KINDS | {"symmetric": SymmetricNoise})[kind](share)
        expected = probabilities(noise, world)
        assert expected.mean() == pytest.approx(share, abs=1e-9)
        assert (np.ptp(expected) > 0.1) == (noise.rate is None) == (kind != "symmetric")
        masks.append(flips(noise, world))
        agree(masks[-1], expected)
    for low, high in itertools.pairwise(masks):
        assert (high >= low).all() and high.sum() > low.sum() > 0
    order = random.Random(0).sample(range(ROWS), ROWS)
    assert noise.flips(world.select(order), 42) == noise.flips(world, 42)
    # Another seed draws anew.
    other = flips(noise, world, seed=1)
    agree(other, expected)
    same = np.mean(expected**2 + (1 - expected) ** 2)
    assert np.mean(other == masks[-1]) == pytest.approx(same, abs=0.04)


def test_near_ties(world):
    expected, gaps = probabilities(NearTieNoise(0.3), world), np.abs(logit(np.array(world["eta"][:])))
    taus = -gaps / logit(expected)
    assert np.ptp(taus) < 1e-6 and taus[0] == pytest.approx(3.4, abs=0.1)
    tie = rows_of([{"eta": 0.5}, {"eta": 1.0}])
    assert probabilities(NearTieNoise(0.25), tie) == pytest.approx([0.5, 0.0], abs=1e-9)


ETAS = np.array([0.001, 0.2, 0.5, 0.65, 0.97, 0.9999])


@pytest.mark.parametrize("tau", [0.4, 1.0, 3.0, 1e6])
def test_labels_at_another_temperature_have_its_law(tau):
    """P(the first text is preferred) once labels that were drawn with these probabilities went through."""
    swapped = {"chosen": " b", "rejected": " a"}
    rows = rows_of([{"eta": eta} for eta in ETAS] + [swapped | {"eta": 1 - eta} for eta in ETAS])
    stays, moves = np.split(probabilities(TemperatureLabels(tau), rows), 2)
    then = expit(logit(ETAS) / tau)
    assert ETAS * (1 - stays) + (1 - ETAS) * moves == pytest.approx(then, rel=1e-9)
    assert stays == pytest.approx(1 - np.minimum(1, then / ETAS), abs=1e-12)


def test_a_share_decides_the_temperature(world):
    expected = probabilities(TemperatureLabels(share=0.3), world)
    clean = np.array(world["eta"][:])
    then = clean * (1 - expected)
    likely = clean > 0.5
    taus = logit(clean[likely]) / logit(then[likely])
    assert np.ptp(taus) < 1e-5 and taus[0] > 3 and not expected[~likely].any()
    with pytest.raises(UserError, match=r"share is 0\.4, but between 0\.0% and 37\.\d% .* infinite tau"):
        TemperatureLabels(share=0.4).probabilities(world)


def test_spurious_preference_has_the_law_of_a_biased_annotator():
    """sigma(dr + lambda d) for both orders of every pair, one lambda for all; dr is 0 without eta."""
    noise = SpuriousPreferenceNoise(0.3)
    given = [*ETAS, None]
    rows = rows_of(
        [{"chosen": " a", "rejected": " b" + "b" * more, "eta": eta} for more in (1, 2, 4) for eta in given]
        + [{"chosen": " b" + "b" * more, "rejected": " a", "eta": eta} for more in (1, 2, 4) for eta in given]
    )
    against, along = np.split(probabilities(noise, rows), 2)
    assert not along.any()
    more, etas = np.repeat([1, 2, 4], len(given)), np.tile([*ETAS, 0.5], 3)
    lambdas = (logit(etas) - logit(etas * (1 - against))) / more
    assert np.ptp(lambdas) < 1e-9 and lambdas[0] > 0.1


def test_a_favoured_word():
    texts = [(" golden sea", " sea"), (" sea", " a Golden, sea"), (" goldens", " golden"), (" a", " b")]
    rows = rows_of([{"chosen": a, "rejected": b} for a, b in texts * 10])
    expected = probabilities(SpuriousPreferenceNoise(0.3, "golden"), rows)
    assert expected == pytest.approx([0, 0.6, 0.6, 0] * 10)
    chat = [[{"role": "assistant", "content": text}] for text in ("sea", "golden sea")]
    row = {"prompt": [{"role": "user", "content": "golden?"}], "chosen": chat[0], "rejected": chat[1]}
    both = rows_of([row, row | {"chosen": chat[1], "rejected": chat[0]}])
    assert probabilities(SpuriousPreferenceNoise(0.3, "golden"), both) == pytest.approx([0.6, 0])
    with pytest.raises(UserError, match=r"0\.0% and 25\.0% .* alone has the word 'golden' in 25\.0%"):
        SpuriousPreferenceNoise(0.3, "golden").probabilities(rows.select([0, 1, 3, 4]))


def test_annotators_are_assigned_by_the_hash_of_the_id(world):
    names, counts = np.unique(AnnotatorNoise(0.3).annotators(world), return_counts=True)
    assert set(names) == {f"annotator-{k}" for k in range(1, 11)}
    assert counts.min() > ROWS / 10 - 5 * np.sqrt(ROWS * 0.09)


def test_annotators_of_the_rows():
    found = rows_of([{"annotator": "abbb"[i % 4]} for i in range(400)])
    assert AnnotatorNoise(0.3).annotators(found) == list("abbb" * 100)
    expected = probabilities(AnnotatorNoise(0.45), found)
    assert expected.mean() == pytest.approx(0.45) and expected.max() == 0.5
    given = AnnotatorNoise(reliabilities={"a": 0.9, "b": 0.25})
    assert probabilities(given, found) == pytest.approx([0.1, 0.75, 0.75, 0.75] * 100)
    assigned = rows_of([{} for _ in range(400)])
    named = given.annotators(assigned)
    assert set(named) == {"a", "b"}
    assert probabilities(given, assigned) == pytest.approx([{"a": 0.1, "b": 0.75}[name] for name in named])
    for reliabilities, message in (
        ({"a": 0.9}, r"\(a, b\), but 'b' is left out"),
        ({"a": 0.9, "b": 0.9, "c": 0.9}, r"\(a, b\), but 'c' has no pair"),
    ):
        with pytest.raises(UserError, match=message):
            AnnotatorNoise(reliabilities=reliabilities).probabilities(found)
    some = rows_of([{"id": "x"}, {"annotator": "a"}])
    with pytest.raises(UserError, match="1 of the 2 training pairs have no annotator, 'x' for one"):
        AnnotatorNoise(0.3).probabilities(some)


def test_categories_by_a_share(world):
    expected = probabilities(CategoryNoise(share=0.3), world)
    rates = dict(zip(world["category"][:], expected, strict=True))
    ordered = np.array(sorted(rates.values()))
    gamma = np.log(2 * ordered[0]) / np.log(1 / 6)
    assert ordered == pytest.approx(0.5 * (np.arange(1, 7) / 6) ** gamma)
    assert [rates[name] for name in world["category"][:]] == expected.tolist()
    with pytest.raises(UserError, match=r"between 50\.0% and 50\.0% .* of the 1 groups"):
        CategoryNoise(share=0.3).probabilities(rows_of([{}, {}]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((partial(SymmetricNoise, rate), f"noise_rate is {rate}") for rate in (-0.1, 1.0, float("nan"))),
        *((partial(kind, 0.5), "share is 0.5, but it must be above 0 and below") for kind in KINDS.values()),
        (lambda: TwoRateNoise([0.1, 1.0]), r"rates is 1\.0"),
        (lambda: TwoRateNoise([0.1]), r"rates is \[0\.1\], but two"),
        (lambda: CategoryNoise({"c": 1.0}), r"rates of 'c' is 1\.0"),
        (lambda: CategoryNoise(), "CategoryNoise has rates None and share None"),
        (lambda: CategoryNoise(others=0.1, share=0.3), r"share 0\.3 and others 0\.1"),
        (lambda: TemperatureLabels(2, 0.3), r"tau 2 and share 0\.3; give one"),
        (lambda: TemperatureLabels(0), "tau is 0, but it must be above 0"),
        (lambda: TemperatureLabels(float("inf")), "tau is inf"),
        (lambda: AnnotatorNoise(), "reliabilities None and share None; give one"),
        (lambda: AnnotatorNoise(reliabilities={}), "reliabilities None and share None; give one"),
    ],
)
def test_wrong_options(make, message):
    """Columns that are missing, and kinds that are given together: test_cli.py and test_by_content.py."""
    with pytest.raises(UserError, match=message):
        make()
