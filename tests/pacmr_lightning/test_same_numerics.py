"""The same numerics before and after an optimisation: 30 updates with a fixed seed have the stored losses.

What is stored was found in float64 by the plain form of Algorithm 1, in which each of a step's gradients has
passes of its own. An optimisation changes how sums are rounded, and nothing else.
"""

from collections.abc import Mapping

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule
from pacmr_lightning.datamodules.train_tokenizer import train_tokenizer
from pacmr_lightning.meta_gradient import GhostDotProduct, PromptAugmentationConsistency
from pacmr_lightning.meta_gradient import step_pairs as kept_gradients
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.objectives import DPO
from pacmr_lightning.weighting import Unweighted, VNetWeighting

from ..conftest import quiet_trainer

VOCABULARY = 400
WEIGHTINGS = {
    "dpo": Unweighted,
    "pacmr": lambda: VNetWeighting(
        PromptAugmentationConsistency(0.53), GhostDotProduct(), learning_rate=1e-2, every=5
    ),
}


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


LOSSES = {
    "dpo": numbers(
        """
        0.6645597873 0.7383149654 0.6731571712 0.7197624314 0.6739694637 0.7062921259
        0.6762948159 0.6484007142 0.6485299520 0.7420312017 0.6416903815 0.7013345378
        0.7085184612 0.6544364895 0.7046989879 0.5822027988 0.7359100824 0.6537309658
        0.7396419229 0.6731747225 0.6409236755 0.7382452633 0.6701997475 0.6625780806
        0.6709915775 0.7176671997 0.6898676387 0.7373636738 0.7154207155 0.6388800551
        """
    ),
    "pacmr": numbers(
        """
        0.6645597873 0.7383149654 0.6731591715 0.7197716286 0.6739787726 0.7062794993
        0.6763063539 0.6483939456 0.6485379351 0.7419938957 0.6415904330 0.7014228294
        0.7085924086 0.6543996910 0.7045579010 0.5821822752 0.7364330289 0.6540011848
        0.7396983681 0.6732640269 0.6408414886 0.7381920820 0.6704170894 0.6623819585
        0.6705969430 0.7174266148 0.6897765595 0.7372333549 0.7153947801 0.6390020455
        """
    ),
}
"""Unweighted loss of each update's pairs."""
MOVED = {"dpo": [0.0534405862], "pacmr": [0.0531130939, 0.5912996935]}
"""Norms of what the adapter, and VNet, have moved by."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-6}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    rows = EmbeddedWorld(pairs=256, validation_pairs=8).load("train")
    train_tokenizer([f"{row['prompt']} {row['chosen']}" for row in rows], VOCABULARY).save_pretrained(folder)
    return str(folder)


class Losses(pl.Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.found.append(float(-F.logsigmoid(outputs["record"].u).mean()))


def set_random(parameters: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Random numbers by name, since libraries differ in the order in which they draw; returns copies."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in sorted(parameters):
            p = parameters[name]
            values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_((0.3 if "lora_B" in name else 0.2) * values)
    return [p.detach().clone() for p in parameters.values()]


def distance(start: list[torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> float:
    moves = zip(start, parameters.values(), strict=True)
    return float(torch.stack([(p.detach() - q).norm() for q, p in moves]).norm())


@pytest.mark.parametrize(
    ("method", "dtype", "micro_batch_size", "small"),
    [
        ("dpo", torch.float64, None, 2**26),
        ("dpo", torch.float32, 4, 2**26),
        ("pacmr", torch.float64, None, 2**26),
        ("pacmr", torch.float32, 4, 2**26),
        # Too little for the pairs' gradients, so each of the step's uses of them has passes of its own.
        ("pacmr", torch.float64, 4, 0),
    ],
)
def test_same_numerics(method, dtype, micro_batch_size, small, tokenizer, make_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_gradients, "SMALL", small)
    policy = make_policy(changes={"vocab_size": VOCABULARY}, moved=False, double=dtype == torch.float64)
    set_random({name: p for name, p in policy.named_parameters() if "norm" not in name})
    module = PreferenceModule(
        policy, DPO(0.05), WEIGHTINGS[method](), learning_rate=2e-4, micro_batch_size=micro_batch_size
    )
    learned = [policy.adapter()]
    if module.vnet is not None:
        module.vnet.to(dtype)
        learned.append(dict(module.vnet.named_parameters()))
    start = [set_random(parameters) for parameters in learned]
    data = PreferenceDataModule(
        EmbeddedWorld(pairs=256, validation_pairs=8),
        tokenizer,
        global_batch_size=8,
        meta_every=module.weighting.every,
        meta_batch_size=12,
        noise_rate=0.3,
    )
    losses = Losses()
    steps = {"max_steps": len(LOSSES["dpo"]), "max_epochs": -1, "limit_val_batches": 0}
    quiet_trainer(tmp_path, callbacks=[losses], **steps).fit(module, data)
    moved = [distance(*pair) for pair in zip(start, learned, strict=True)]
    tolerance = TOLERANCE[dtype]
    assert losses.found == pytest.approx(LOSSES[method], rel=tolerance)
    assert moved == pytest.approx(MOVED[method], rel=100 * tolerance)
