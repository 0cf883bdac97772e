"""Pictures for loggers: their values, and axes that stay."""

from functools import partial

import matplotlib
import numpy as np
import pytest

from pacmr_lightning.analysis import cards
from pacmr_lightning.analysis.surface import Surface, Visits, density


@pytest.fixture
def surface():
    generator = np.random.default_rng(0)
    u, delta = generator.normal(0, 1, 400), generator.normal(-1, 2, 400)
    visits = Visits(u, delta, 1 / (1 + np.exp(-u)), (np.arange(400) % 4 == 0).astype(np.int8))
    axes = np.linspace(-8, 8, 41), np.linspace(-4, 4, 41)
    a, b = np.full((41, 41), 1.0), np.zeros((41, 41))
    return Surface(10, "pacmr", "toy", 0.25, *axes, a, b, density(visits, *axes), visits)


def inside(image):
    """Rows and columns of the axes' area of a map: the longest runs of its colours."""
    frame = cards._map_frame(("delta", "u"), (-8.0, 8.0), (-4.0, 4.0))
    (left, bottom), (right, top) = frame.axis.get_window_extent().get_points().round().astype(int)
    return slice(image.shape[0] - top, image.shape[0] - bottom), slice(left, right)


def test_a_map_has_the_colours_of_its_values(surface):
    image = cards.draw_map(surface, "g", (0.0, 1.0))
    assert image.shape == (300, 400, 3) and image.dtype == np.uint8
    area = image[inside(image)]
    for share, place in ((0.02, -2), (0.98, 1)):  # the top row is the largest u
        row = area[int(len(area) * share)]
        u = 8 * (0.5 - share)
        expected = np.array(matplotlib.colormaps[cards.COLORS](1 / (1 + np.exp(-u))))[:3] * 255
        assert np.abs(np.median(row, axis=0) - expected).max() < 12, place
    assert (np.abs(area.astype(int) - [213, 94, 0]).sum(-1) < 60).sum() > 100, "g = 1/2 is orange"


def test_pictures_do_not_feel_earlier_ones(surface):
    """Frames are kept; the values of one picture must not stay in the next."""
    others = Surface(**{**vars(surface), "a": -surface.a, "step": 20})
    maps = partial(cards.draw_map, name="g", scale=(0.0, 1.0))
    functions = partial(cards.draw_weight_function, start=(1.0, 0.0))
    for draw in (maps, functions):
        first, other, again = draw(surface), draw(others), draw(surface)
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()
    weight, flipped = surface.visits.weight, surface.visits.flipped
    first = cards.draw_distribution(weight, flipped)
    assert (first != cards.draw_distribution(1 - weight, flipped)).any()
    np.testing.assert_array_equal(first, cards.draw_distribution(weight, flipped))


def test_axes_stay_until_values_leave_them():
    small = np.linspace(-0.3, 0.3, 1001)
    known = cards.widened(None, small)
    assert known == (-4.0, 4.0), "a power of two, at least eight times the values"
    assert cards.widened(known, 0.1 * small) == known == cards.widened(known, 12 * small)
    assert cards.widened(known, 20 * small) == (-8.0, 8.0)
    assert cards.widened(known, np.append(small, 1e6)) == known, "one value of a thousand"
    assert cards.widened(None, np.zeros(5)) == (-1.0, 1.0)
    assert cards.widened(None, np.full(5, 1.05), center=1.0, least=0.5) == (0.5, 1.5)


def test_precision_and_recall_are_drawn(surface):
    flipped = surface.visits.flipped == 1
    perfect = cards.draw_precision_recall(flipped, {"low_weight": flipped.astype(float)})
    useless = cards.draw_precision_recall(flipped, {"low_weight": (~flipped).astype(float)})
    dark = [(picture.sum(-1) < 60)[20:100, 80:400].sum() for picture in (perfect, useless)]
    assert dark[0] > dark[1] + 100, "a line along precision 1"
