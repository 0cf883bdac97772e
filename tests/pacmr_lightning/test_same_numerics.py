"""Whole runs against Algorithm 1 as it is written here, in float64: pair by pair, both optimizers by hand."""

import math
from collections.abc import Callable, Mapping
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback

from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule
from pacmr_lightning.meta_gradient import GhostDotProduct, PromptAugmentationConsistency
from pacmr_lightning.meta_gradient.step_pairs import StepPairs
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.objectives import DPO
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import Unweighted, VNetWeighting

from ..conftest import quiet_trainer

BETA, TAU = 0.05, 0.53
PEAK, WARMUP, UPDATES = 0.02, 3, 12
VNET_RATE, EVERY = 1e-2, 2


def set_random(parameters: Mapping[str, torch.Tensor]) -> None:
    """Random numbers by name, since libraries differ in the order in which they draw."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in sorted(parameters):
            p = parameters[name]
            values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_((0.3 if "lora_B" in name else 0.2) * values)


def adam(betas: tuple[float, float]) -> Callable[[torch.Tensor, torch.Tensor, float], None]:
    """Adam without weight decay of one flat tensor, by its paper."""
    count, mean, square = 0, 0.0, 0.0

    def step(parameters, gradient, learning_rate):
        nonlocal count, mean, square
        count += 1
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        root = (square / (1 - betas[1] ** count)).sqrt()
        parameters -= learning_rate * mean / (1 - betas[0] ** count) / (root + 1e-8)

    return step


def algorithm_1(policy, vnet, batches, *, alpha_in_gradient=True, virtual_lr=None):
    """Run Algorithm 1 (DPO without a ``vnet``) in place; u of all updates, norms of those of VNet."""
    margins, moves = [], []
    omega = list(policy.adapter().values())
    theta = [] if vnet is None else list(vnet.parameters())
    step_omega, step_theta = adam((0.9, 0.95)), adam((0.9, 0.999))

    def flat(values):
        return torch.cat([value.detach().flatten() for value in values])

    def write(parameters, vector):
        with torch.no_grad():
            for p, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
                p.copy_(part.view_as(p))

    def rewards(batch):
        return Rewards(policy.log_probs(batch), policy.reference_log_probs(batch), BETA)

    def weights(delta, u):
        return torch.ones_like(u) if vnet is None else vnet(delta, u)[0].detach()

    for t, batch in enumerate(batches):
        cosine = 0.55 + 0.45 * math.cos(math.pi * (t - WARMUP) / (UPDATES - WARMUP))
        learning_rate = PEAK * (t / WARMUP if t < WARMUP else cosine)
        now, size = flat(omega), len(batch.train)
        gradients, values = [], []
        for i in range(size):
            found = rewards(batch.train[i : i + 1])
            gradients.append(flat(torch.autograd.grad(-F.logsigmoid(found.u).sum(), omega)))
            values.append([found.delta.item(), found.u.item()])
        gradients, (delta, u) = torch.stack(gradients), torch.tensor(values, dtype=torch.float64).T
        margins.append(u)
        if vnet is not None and t % EVERY == 0:
            alpha = learning_rate if virtual_lr is None else virtual_lr
            write(omega, now - alpha * (weights(delta, u)[:, None] * gradients).mean(0))
            with torch.no_grad():
                p = rewards(batch.meta).u.sigmoid()
            second = rewards(batch.meta.augmented).u
            first, other = p >= TAU, p <= 1 - TAU
            assert 0 < (first | other).sum() < len(p)
            loss = -(F.logsigmoid(second[first]).sum() + F.logsigmoid(-second[other]).sum()) / len(p)
            d_meta = flat(torch.autograd.grad(loss, omega))
            write(omega, now)
            factor = alpha / (PEAK if virtual_lr is None else virtual_lr) if alpha_in_gradient else 1.0
            moves.append(0.0)
            if factor:
                c = (gradients @ d_meta).clamp(-10, 10)
                gradient = torch.autograd.grad(-(factor / size) * (c * vnet(delta, u)[0]).sum(), theta)
                before = flat(theta)
                after = before.clone()
                step_theta(after, flat(gradient), VNET_RATE)
                write(theta, after)
                moves[-1] = float((after - before).norm())
        gradient = (weights(delta, u)[:, None] * gradients).mean(0)
        gradient *= min(1.0, 1.0 / float(gradient.norm() + 1e-6))
        step_omega(now, gradient, learning_rate)
        write(omega, now)
    return margins, moves


TOLERANCE = {torch.float64: {"rtol": 1e-9, "atol": 1e-11}, torch.float32: {"rtol": 0, "atol": 1e-2}}


@pytest.mark.parametrize(
    ("options", "keep", "dtype"),
    [
        ({}, True, torch.float64),
        ({"alpha_in_gradient": False}, False, torch.float64),
        ({"virtual_lr": 0.1}, True, torch.float64),
        (None, None, torch.float64),
        ({}, True, torch.float32),
    ],
    ids=["alpha", "without alpha, pairs run again", "fixed", "DPO", "float32"],
)
def test_algorithm_1_by_hand(options, keep, dtype, tiny_tokenizer_folder, make_policy, tmp_path, monkeypatch):
    """With a warm-up from 0 and a cosine: u of every update, every parameter of policy and VNet.

    When AdamW steps, the pairs' own gradients are freed.
    """
    policy = make_policy(changes={"vocab_size": 300}, moved=False, double=dtype == torch.float64)
    set_random({name: p for name, p in policy.named_parameters() if "norm" not in name})
    weighting, learned = Unweighted(), [*policy.adapter().values()]
    if options is not None:
        more = {"learning_rate": VNET_RATE, "every": EVERY, "keep_gradients": keep, **options}
        weighting = VNetWeighting(PromptAugmentationConsistency(TAU), GhostDotProduct(), **more)
        weighting.vnet.to(dtype)
        set_random(dict(weighting.vnet.named_parameters()))
        learned += weighting.vnet.parameters()
    start = [p.detach().clone() for p in learned]
    rates = {"learning_rate": PEAK, "warmup_ratio": WARMUP / UPDATES}
    module = PreferenceModule(policy, DPO(BETA), weighting, micro_batch_size=4, **rates)
    sizes = {"global_batch_size": 8, "meta_every": weighting.every, "meta_batch_size": 12, "noise_rate": 0.3}
    data = PreferenceDataModule(EmbeddedWorld(256, 8), tiny_tokenizer_folder, **sizes)
    steps, watch = [], Callback()
    watch.on_train_batch_end = lambda _, module, outputs, batch, i: steps.append((batch, outputs["record"].u))
    alive, held, init = WeakSet(), [], StepPairs.__post_init__
    monkeypatch.setattr(StepPairs, "__post_init__", lambda pairs: alive.add(pairs) or init(pairs))
    watch.on_before_optimizer_step = lambda *_: held.append(len(alive))
    trainer = quiet_trainer(tmp_path, [watch], max_steps=UPDATES, max_epochs=-1, limit_val_batches=0)
    trainer.fit(module, data)
    assert held == [0] * UPDATES
    batches, u = zip(*steps, strict=True)
    # Written down once: a seed means the same pairs on every machine and in every version.
    firsts = 208, 72, 160, 248, 41, 227, 128, 219, 232, 0, 124, 226
    assert all(f"world-0-{i}" in batch.train.ids for i, batch in zip(firsts, batches, strict=True))
    found = [p.detach().clone().double() for p in learned]
    policy.double()
    for p, value in zip(learned, start, strict=True):
        p.data = value.double().clone()
    margins, moves = algorithm_1(policy, module.vnet, batches, **(options or {}))
    u, margins = (torch.stack(values).double().sort().values for values in (u, margins))
    torch.testing.assert_close(u, margins, **TOLERANCE[dtype])
    for p, value, first in zip(learned, found, start, strict=True):
        torch.testing.assert_close(value, p.detach(), **TOLERANCE[dtype])
        assert (value - first).abs().max() > 1e-4
    if options is not None:
        assert {f"world-0-{i}" for i in (87, 174, 123, 188)} < set(batches[0].meta.ids)
        assert len(moves) == 6 and weighting.skipped == moves.count(0.0) == (0 if options else 1)
