"""Sums, norms and clipping of an adapter's gradient against autograd and numpy in float64."""

import numpy as np
import pytest
import torch

from pacmr_lightning.meta_gradient.gradient import add_gradient, clip, norm, zeros


@pytest.fixture
def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (5, 2), "c": (7,)}
    return {
        name: torch.nn.Parameter(torch.randn(size, generator=generator, dtype=torch.double))
        for name, size in shapes.items()
    }


def losses(parameters):
    """One whose gradient is not laid out as the parameter is, one that does not depend on all elements."""
    a, b, c = parameters.values()
    yield (a.T.sin() * torch.arange(15.0, dtype=torch.double).view(5, 3)).sum() + b.sum() + (c * c).sum()
    yield (a @ b).exp().sum() * c[0]


@pytest.mark.parametrize("share", [0.1, 10.0])
def test_norm_and_clip(parameters, share):
    found = zeros(parameters)
    for loss in losses(parameters):
        add_gradient(found, parameters, loss)
    before = np.concatenate([v.numpy().flatten() for v in found.values()])
    length = np.linalg.norm(before)
    assert norm(found).shape == () and float(norm(found)) == pytest.approx(length, rel=1e-14)
    clip(found, share * length)
    after = np.concatenate([v.numpy().flatten() for v in found.values()])
    np.testing.assert_allclose(after, before * min(1, share * length / (length + 1e-6)), rtol=1e-14)
