"""The datamodule's options for label noise, as the kind of noise that they ask for."""

from __future__ import annotations

from collections.abc import Sequence

from pacmr_lightning.errors import UserError

from .base import LabelNoise
from .groups import CategoryNoise
from .mask import NoiseFromMask
from .rates import SymmetricNoise, TwoRateNoise


def label_noise(
    noise: LabelNoise | None,
    noise_rate: float,
    noise_rates: Sequence[float] | None,
    category_noise_rates: dict[str, float] | None,
    noise_mask: str | None,
) -> LabelNoise | None:
    """The noise that the datamodule's options ask for; None where labels stay as found.

    Raises:
        UserError: a rate is outside [0, 1), ``noise_rates`` are not two, or more than one kind is given.
    """
    plain = SymmetricNoise(noise_rate)
    kinds = {
        "noise": noise,
        "noise_rates": noise_rates,
        "category_noise_rates": category_noise_rates,
        "noise_mask": noise_mask,
    }
    given = [name for name, value in kinds.items() if value is not None]
    if noise_rate and given != ["category_noise_rates"]:
        given = ["noise_rate", *given]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are given together; take out all but one.")
    if noise_rates is not None:
        return TwoRateNoise(noise_rates)
    if category_noise_rates is not None:
        return CategoryNoise(category_noise_rates, noise_rate)
    if noise_mask is not None:
        return NoiseFromMask(noise_mask)
    return plain if noise_rate else noise
