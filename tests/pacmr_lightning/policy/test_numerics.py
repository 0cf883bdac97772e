"""What "auto" is on a machine."""

import pytest
import torch

from pacmr_lightning.policy.numerics import base_dtype


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
