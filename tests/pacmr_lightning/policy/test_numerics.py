"""What "auto" is on a machine; histograms of nearly equal values."""

import numpy as np
import pytest
import torch

from pacmr_lightning.policy.numerics import base_dtype, histogram


@pytest.mark.parametrize(
    ("gpu", "multiplies", "found"),
    [(False, False, torch.float32), (True, True, torch.bfloat16), (True, False, torch.float32)],
)
def test_the_dtype_of_a_base(gpu, multiplies, found, monkeypatch):
    """Before Ampere a GPU only emulates bfloat16, of which torch says that it is supported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: multiplies or including_emulation
    )
    assert base_dtype("auto") == found
    assert base_dtype("float32") == torch.float32 and base_dtype("auto", gpu=True) == torch.bfloat16


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [0.0, 1.0, -3e4])
def test_a_histogram_of_nearly_equal_values(value, dtype):
    """As the weights of a VNet after its first update: np.histogram has too few numbers between them."""
    above = np.nextafter(dtype(value), dtype(np.inf))
    for values in ([value, above, above], [value] * 3):
        counts, edges = histogram(np.array(values, dtype=dtype), 30)
        assert counts.sum() == 3 and len(edges) == 31 and (np.diff(edges) > 0).all()
        assert edges[0] <= value and edges[-1] >= above
    drawn = np.random.default_rng(0).normal(size=100)
    assert np.array_equal(histogram(drawn, 30)[0], np.histogram(drawn, 30)[0])
