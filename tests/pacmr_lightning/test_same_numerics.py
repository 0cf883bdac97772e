"""The same numerics before and after an optimisation: 30 updates with a fixed seed have the stored losses.

What is stored was found in float64 by the plain form of Algorithm 1, in which each of a step's gradients has
passes of its own. An optimisation changes how sums are rounded, and nothing else. A shorter run is compared
with Algorithm 1 as it is written here, with gradients pair by pair and both optimizers by hand.
"""

import math
from collections.abc import Callable, Mapping

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule
from pacmr_lightning.datamodules.tokenizer import train_tokenizer
from pacmr_lightning.meta_gradient import GhostDotProduct, PromptAugmentationConsistency
from pacmr_lightning.meta_gradient import step_pairs as kept_gradients
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.objectives import DPO
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import Unweighted, VNetWeighting

from ..conftest import quiet_trainer

VOCABULARY = 400
WEIGHTINGS = {
    "dpo": Unweighted,
    "pacmr": lambda: VNetWeighting(
        PromptAugmentationConsistency(0.53),
        GhostDotProduct(),
        learning_rate=1e-2,
        every=5,
        alpha_in_gradient=False,
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


def fit(
    module: PreferenceModule, tokenizer: str, steps: int, folder: object, *callbacks: pl.Callback
) -> None:
    data = PreferenceDataModule(
        EmbeddedWorld(pairs=256, validation_pairs=8),
        tokenizer,
        global_batch_size=8,
        meta_every=module.weighting.every,
        meta_batch_size=12,
        noise_rate=0.3,
    )
    options = {"max_steps": steps, "max_epochs": -1, "limit_val_batches": 0}
    quiet_trainer(folder, callbacks, **options).fit(module, data)


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
    losses = Losses()
    fit(module, tokenizer, len(LOSSES["dpo"]), tmp_path, losses)
    moved = [distance(*pair) for pair in zip(start, learned, strict=True)]
    tolerance = TOLERANCE[dtype]
    assert losses.found == pytest.approx(LOSSES[method], rel=tolerance)
    assert moved == pytest.approx(MOVED[method], rel=100 * tolerance)


class Batches(pl.Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.found.append(batch)


def adam(betas: tuple[float, float]) -> Callable[[torch.Tensor, torch.Tensor, float], None]:
    """Adam without weight decay of one flat tensor, by its paper."""
    state = {"step": 0, "mean": 0.0, "square": 0.0}

    def step(parameters, gradient, learning_rate):
        state["step"] += 1
        state["mean"] = betas[0] * state["mean"] + (1 - betas[0]) * gradient
        state["square"] = betas[1] * state["square"] + (1 - betas[1]) * gradient**2
        mean, square = (
            state[n] / (1 - b ** state["step"]) for n, b in zip(("mean", "square"), betas, strict=True)
        )
        parameters -= learning_rate * mean / (square.sqrt() + 1e-8)

    return step


def algorithm_1(policy, vnet, batches, peak, warmup, *, every, vnet_lr, alpha_in_gradient, virtual_lr):
    """Run Algorithm 1 on omega and Theta in place; the norms of VNet's updates."""
    beta, tau, updates, moves = 0.05, 0.53, len(batches), []
    omega = list(policy.adapter().values())
    theta = list(vnet.parameters())
    step_omega, step_theta = adam((0.9, 0.95)), adam((0.9, 0.999))

    def flat(values):
        return torch.cat([value.detach().flatten() for value in values])

    def write(parameters, vector):
        with torch.no_grad():
            for p, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
                p.copy_(part.view_as(p))

    def rewards(batch):
        return Rewards(policy.log_probs(batch), policy.reference_log_probs(batch), beta)

    for t, batch in enumerate(batches):
        cosine = 0.55 + 0.45 * math.cos(math.pi * (t - warmup) / (updates - warmup))
        learning_rate = peak * (t / warmup if t < warmup else cosine)
        now, size = flat(omega), len(batch.train)
        gradients, values = [], []
        for i in range(size):
            found = rewards(batch.train[i : i + 1])
            gradients.append(flat(torch.autograd.grad(-F.logsigmoid(found.u).sum(), omega)))
            values.append([found.delta.item(), found.u.item()])
        gradients, (delta, u) = torch.stack(gradients), torch.tensor(values, dtype=torch.float64).T
        if t % every == 0:
            alpha = learning_rate if virtual_lr is None else virtual_lr
            g = vnet(delta, u)[0].detach()
            write(omega, now - alpha * (g[:, None] * gradients).mean(0))
            with torch.no_grad():
                p = rewards(batch.meta).u.sigmoid()
            second = rewards(batch.meta.augmented).u
            first, other = p >= tau, p <= 1 - tau
            assert 0 < (first | other).sum() < len(p)
            loss = -(F.logsigmoid(second[first]).sum() + F.logsigmoid(-second[other]).sum()) / len(p)
            d_meta = flat(torch.autograd.grad(loss, omega))
            write(omega, now)
            factor = alpha / (peak if virtual_lr is None else virtual_lr) if alpha_in_gradient else 1.0
            moves.append(0.0)
            if factor:
                c = (gradients @ d_meta).clamp(-10, 10)
                gradient = torch.autograd.grad(-(factor / size) * (c * vnet(delta, u)[0]).sum(), theta)
                before = flat(theta)
                after = before.clone()
                step_theta(after, flat(gradient), vnet_lr)
                write(theta, after)
                moves[-1] = float((after - before).norm())
        gradient = (vnet(delta, u)[0].detach()[:, None] * gradients).mean(0)
        gradient *= min(1.0, 1.0 / float(gradient.norm()))
        step_omega(now, gradient, learning_rate)
        write(omega, now)
    return moves


@pytest.mark.parametrize(
    "options", [{}, {"alpha_in_gradient": False}, {"virtual_lr": 0.1}], ids=["alpha", "without", "fixed"]
)
def test_algorithm_1_by_hand(options, tokenizer, make_policy, tmp_path):
    """12 updates in float64 with a warm-up from 0 and a cosine: every parameter of policy and VNet."""
    peak, warmup, steps = 0.02, 3, 12
    policy = make_policy(changes={"vocab_size": VOCABULARY}, moved=False, double=True)
    set_random({name: p for name, p in policy.named_parameters() if "norm" not in name})
    weighting = VNetWeighting(
        PromptAugmentationConsistency(0.53), GhostDotProduct(), learning_rate=1e-2, every=2, **options
    )
    weighting.vnet.double()
    set_random(dict(weighting.vnet.named_parameters()))
    learned = [*policy.adapter().values(), *weighting.vnet.parameters()]
    start = [p.detach().clone() for p in learned]
    module = PreferenceModule(
        policy, DPO(0.05), weighting, learning_rate=peak, warmup_ratio=warmup / steps, micro_batch_size=4
    )
    batches = Batches()
    fit(module, tokenizer, steps, tmp_path, batches)
    found = [p.detach().clone() for p in learned]
    with torch.no_grad():
        for p, value in zip(learned, start, strict=True):
            p.copy_(value)
    chosen = {"alpha_in_gradient": True, "virtual_lr": None} | options
    moves = algorithm_1(policy, weighting.vnet, batches.found, peak, warmup, every=2, vnet_lr=1e-2, **chosen)
    for p, value, first in zip(learned, found, start, strict=True):
        torch.testing.assert_close(value, p.detach(), rtol=1e-9, atol=1e-11)
        assert (value - first).abs().max() > 1e-4
    assert len(moves) == 6 and weighting.skipped == moves.count(0.0) == (0 if options else 1)
