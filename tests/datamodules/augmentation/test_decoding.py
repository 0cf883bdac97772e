"""Draws that depend on seed and text: they follow the model's probabilities; and options that are wrong."""

import pytest
import torch

from pacmr_lightning.datamodules.augmentation.translation import BackTranslation
from pacmr_lightning.errors import UserError


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.7)])
def test_draws_follow_the_softmax(temperature, top_p):
    """Frequencies of 20,000 draws against probabilities that are worked out by hand."""
    logits = torch.tensor([1.0, 0.5, 0.0, -1.0, -3.0])
    p = torch.softmax(logits / temperature, 0)
    # The most probable tokens until top_p is reached.
    kept = torch.cumsum(p, 0) - p < top_p
    p = torch.where(kept, p, 0) / p[kept].sum()
    n = 20_000
    decoding = BackTranslation(sample=True, temperature=temperature, top_p=top_p)
    arguments = decoding.generate_arguments([f"text {i}" for i in range(n)])
    scores = arguments["logits_processor"](torch.zeros(n, 1, dtype=torch.long), logits.repeat(n, 1))
    assert not arguments["do_sample"]
    counts = torch.bincount(scores.argmax(-1), minlength=5)
    # Five standard deviations of a binomial count.
    assert ((counts - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt()).all()
    assert (counts[~kept] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, but at least 1 sentence"),
        ({"num_beams": 0}, "num_beams is 0, but at least 1 beam"),
        ({"temperature": 2.0}, "temperature is 2.0, but it has no effect with sample false"),
        ({"seed": 1}, "seed is 1, but it has no effect with sample false"),
        ({"sample": True, "num_beams": 2}, "num_beams is 2, but it has no effect with sample true"),
        ({"sample": True, "temperature": 0.0}, "temperature is 0.0, but it must be above 0"),
        ({"sample": True, "top_p": 0.0}, r"top_p is 0.0, but it must lie in \(0, 1\]"),
        ({"device": "toaster"}, "device is 'toaster', which does not work here"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UserError, match=message):
        BackTranslation(**options)
