"""Whole runs of the module in float64 against Algorithm 1 as it is written here.

Here each pair's gradient is taken alone, and both optimizers are by hand.
"""

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback

from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule
from pacmr_lightning.meta_gradient import GhostDotProduct, PromptAugmentationConsistency
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


def algorithm_1(policy, vnet, batches, *, alpha_in_gradient=True, virtual_lr=None):
    """Run Algorithm 1 (DPO without a ``vnet``) on omega and Theta in place; the norms of VNet's updates."""
    moves = []
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
    return moves


@pytest.mark.parametrize(
    ("options", "keep"),
    [({}, True), ({"alpha_in_gradient": False}, False), ({"virtual_lr": 0.1}, True), (None, None)],
    ids=["alpha", "without alpha, pairs run again", "fixed", "DPO"],
)
def test_algorithm_1_by_hand(options, keep, tiny_tokenizer_folder, make_policy, tmp_path):
    """With a warm-up from 0 and a cosine: every parameter of policy and VNet."""
    policy = make_policy(changes={"vocab_size": 300}, moved=False, double=True)
    set_random({name: p for name, p in policy.named_parameters() if "norm" not in name})
    weighting, learned = Unweighted(), [*policy.adapter().values()]
    if options is not None:
        more = {"learning_rate": VNET_RATE, "every": EVERY, "keep_gradients": keep, **options}
        weighting = VNetWeighting(PromptAugmentationConsistency(TAU), GhostDotProduct(), **more)
        weighting.vnet.double()
        set_random(dict(weighting.vnet.named_parameters()))
        learned += weighting.vnet.parameters()
    start = [p.detach().clone() for p in learned]
    rates = {"learning_rate": PEAK, "warmup_ratio": WARMUP / UPDATES}
    module = PreferenceModule(policy, DPO(BETA), weighting, micro_batch_size=4, **rates)
    sizes = {"global_batch_size": 8, "meta_every": weighting.every, "meta_batch_size": 12, "noise_rate": 0.3}
    data = PreferenceDataModule(EmbeddedWorld(256, 8), tiny_tokenizer_folder, **sizes)
    batches, watch = [], Callback()
    watch.on_train_batch_start = lambda trainer, module, batch, index: batches.append(batch)
    trainer = quiet_trainer(tmp_path, [watch], max_steps=UPDATES, max_epochs=-1, limit_val_batches=0)
    trainer.fit(module, data)
    # Written down once: a seed means the same pairs on every machine and in every version.
    assert batches[0].train.ids[:4] == [f"world-0-{i}" for i in (208, 64, 5, 19)]
    found = [p.detach().clone() for p in learned]
    with torch.no_grad():
        for p, value in zip(learned, start, strict=True):
            p.copy_(value)
    moves = algorithm_1(policy, module.vnet, batches, **(options or {}))
    for p, value, first in zip(learned, found, start, strict=True):
        torch.testing.assert_close(value, p.detach(), rtol=1e-9, atol=1e-11)
        assert (value - first).abs().max() > 1e-4
    if options is not None:
        assert batches[0].meta.ids[:4] == [f"world-0-{i}" for i in (87, 174, 123, 188)]
        assert len(moves) == 6 and weighting.skipped == moves.count(0.0) == (0 if options else 1)
