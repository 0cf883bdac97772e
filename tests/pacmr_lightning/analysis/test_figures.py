"""VNet's surfaces: the network on a grid, the density of its visits, files and figures."""

from dataclasses import asdict

import numpy as np
import pytest
import torch
from scipy.special import expit

from pacmr_lightning.analysis.figures import draw_heat_maps, draw_page, draw_surfaces, limits
from pacmr_lightning.analysis.surface import (
    Surface,
    density,
    grid,
    load_surface,
    save_surface,
    slope_and_offset,
)
from pacmr_lightning.rewards import Visits
from pacmr_lightning.weighting import VNet


def surface(middle=1.0, rise=0.0, points=61, noise=0.3, step=200, known=True):
    """g = sigmoid(a u) with a = middle + rise u, whatever Delta is."""
    generator = np.random.default_rng(0)
    u = generator.normal(0, 4 / 3, 2000).astype(np.float32)
    sums = generator.normal(-2, 4 / 3, 2000).astype(np.float32)
    axes = np.linspace(-6, 2, points), np.linspace(-4, 4, points)
    a = np.tile(middle + rise * axes[1], (points, 1))
    flipped = np.where(generator.random(2000) < noise, 1, 0) if known else np.full(2000, -1)
    visits = Visits(u, sums, expit(u), flipped.astype(np.int8))
    return Surface(step, "pacmr", "tldr", noise, *axes, a, 0 * a, density(visits, *axes), visits)


def visits_of(u, delta):
    u, delta = np.asarray(u, np.float32), np.asarray(delta, np.float32)
    return Visits(u, delta, np.full_like(u, 0.5), np.zeros(len(u), np.int8))


def test_panels_of_the_figures():
    made = surface(rise=0.05, known=False)
    for draw in (draw_surfaces, draw_heat_maps):
        titles = [axis.get_title() for axis in draw(made).axes]
        assert [title for title in titles if title] == ["Slope $a(z)$", "Offset $b(z)$", "Weight $g(z)$"]
    assert draw_heat_maps(made).get_tightbbox().x1 <= 4.2, "negative numbers at the colour bars"
    page = draw_page([made, made], ["20% noise", "30% noise"])
    titles = [axis.get_title() for axis in page.axes]
    assert titles[:2] == ["Slope $a(z)$, 20% noise", "Slope $a(z)$, 30% noise"] and len(titles) == 8
    # One vertical scale a row; flat surfaces get a scale all the same.
    assert limits([made, surface(middle=2.0)], "a") == pytest.approx((0.8, 2.0))
    assert limits([surface()], "b") == pytest.approx((-0.05, 0.05))
    assert {axis.get_zlim() for axis in page.axes[4:6]} == {(0.0, 1.0)}


def test_pairs_that_are_all_alike_can_be_drawn(tmp_path):
    visits = visits_of(*np.zeros((2, 8)))
    delta, u = grid(visits, 3)
    flat = np.ones((3, 3))
    made = Surface(1, "pacmr", "tldr", 0.3, delta, u, flat, 0 * flat, density(visits, delta, u), visits)
    for draw in (draw_surfaces, draw_heat_maps):
        draw(made).savefig(tmp_path / "figure.png")


def test_what_is_saved_is_loaded(tmp_path):
    made = surface(rise=0.5, noise=float("nan"))  # of labels whose noise is unknown
    save_surface(made, tmp_path)
    np.testing.assert_equal(asdict(load_surface(tmp_path)), asdict(made))


def test_slope_and_offset_of_a_network():
    vnet = VNet(hidden=(2,), slope=0.0)
    with torch.no_grad():  # a = relu(Delta) + 2 relu(-u), b = relu(Delta) + relu(-u)
        vnet.layers[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
        vnet.layers[0].bias.zero_()
        vnet.layers[2].weight.copy_(torch.tensor([[1.0, 2.0], [1.0, 1.0]]))
    delta, u = np.linspace(-1, 1, 21), np.linspace(-3, 3, 11)
    a, b = slope_and_offset(vnet, delta, u)
    np.testing.assert_allclose(a, np.add.outer(delta.clip(0), 2 * (-u).clip(0)))
    np.testing.assert_allclose(b, np.add.outer(delta.clip(0), (-u).clip(0)))


def test_density_is_the_share_of_the_visits_inside():
    generator = np.random.default_rng(0)
    visits = visits_of(generator.normal(size=4000), generator.normal(3, 2, size=4000))
    delta, u = grid(visits, 31)
    found = density(visits, delta, u)
    cell = (delta[1] - delta[0]) * (u[1] - u[0])
    margins = [(axis[1] - axis[0]) / 2 for axis in (delta, u)]
    inside = (np.abs(visits.u) <= u[-1] + margins[1]) & (visits.delta >= delta[0] - margins[0])
    inside &= visits.delta <= delta[-1] + margins[0]
    assert found.sum() * cell == pytest.approx(inside.mean(), rel=1e-6)
    assert inside.mean() > 0.98
    # The middle cell holds what a normal density has there.
    assert found[13:18, 13:18].mean() == pytest.approx(1 / (2 * np.pi * 2), rel=0.15)
    np.testing.assert_allclose(u, -u[::-1])
