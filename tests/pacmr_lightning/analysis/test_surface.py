"""Surfaces: VNet on a grid, what the grid covers, and the density of the visits on it."""

import numpy as np
import pytest
import torch

from pacmr_lightning.analysis.surface import Visits, density, grid, slope_and_offset
from pacmr_lightning.weighting.vnet import VNet


def visits_of(u, delta):
    u, delta = np.asarray(u, np.float32), np.asarray(delta, np.float32)
    return Visits(u, delta, np.full_like(u, 0.5), np.zeros(len(u), np.int8))


def test_slope_and_offset_of_a_network():
    vnet = VNet(hidden=(2,), slope=0.0)
    with torch.no_grad():  # b = relu(u) + relu(-u) = |u|
        vnet.layers[0].weight.copy_(torch.tensor([[0.0, 1.0], [0.0, -1.0]]))
        vnet.layers[0].bias.zero_()
        vnet.layers[2].weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    delta, u = np.linspace(-1, 1, 21), np.linspace(-3, 3, 11)
    a, b = slope_and_offset(vnet, delta, u)
    np.testing.assert_allclose(b, np.tile(np.abs(u), (21, 1)))
    assert not a.any()


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
