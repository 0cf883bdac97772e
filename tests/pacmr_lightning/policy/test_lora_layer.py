"""The policy's LoRA layer against PEFT's and float64: values, gradients, single pairs', shifts and bf16."""

from contextlib import nullcontext

import pytest
import torch

from pacmr_lightning.meta_gradient import CentralDifference, GhostDotProduct, SoftPromptConsistency
from pacmr_lightning.meta_gradient.step_pairs import StepPairs
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import selfcheck
from pacmr_lightning.policy.lora_layer import PerPair
from pacmr_lightning.policy.token_layout import Rows
from pacmr_lightning.weighting import Unweighted, VNetWeighting
from pacmr_lightning.weighting.algorithm_1 import weighted_gradient

FACTOR = 1.6
"""Error that is accepted of LoRA in bf16 over that of LoRA in fp32, both on a bf16 base."""
HALF = {"dtype": "bfloat16", "lora_compute_dtype": "base"}
PEFT = {"dtype": "bfloat16", "lora_compute_dtype": "float32"}
BETA = 0.5


def flat(tensors) -> torch.Tensor:
    return torch.cat([x.detach().double().flatten() for x in tensors])


def off(found, truth) -> float:
    return float((found - truth).detach().norm() / truth.detach().norm())


def step_pairs(policy, batch, keep=False, micro_batch_size=None):
    batch = batch.with_reference(policy.reference_log_probs(batch))
    return StepPairs(policy, DPO(BETA), batch, micro_batch_size, keep)


def gradient(pairs) -> dict[str, torch.Tensor]:
    return weighted_gradient(pairs, Unweighted()).gradient


def u_and_gradient(pairs) -> list[torch.Tensor]:
    found = weighted_gradient(pairs, Unweighted())
    return [found.rewards.u, flat(found.gradient.values())]


def vnet_gradient(policy, pairs, meta) -> torch.Tensor:
    torch.manual_seed(0)
    weighting = VNetWeighting(SoftPromptConsistency(), GhostDotProduct(clip=None), virtual_lr=1e-2)
    weighting.update(pairs, meta, 1e-2, 1e-2)
    return flat(p.grad for p in weighting.vnet.parameters() if p.grad is not None)


def random_direction(policy, length=1.0) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    found = {name: torch.randn(p.shape) for name, p in policy.adapter().items()}
    scale = length / flat(found.values()).norm().float()
    return {name: scale * d for name, d in found.items()}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_is_pefts_layer_in_float64(name, make_policy):
    """Output and gradients, whole and by pair, of each layer, also in a second backward pass of one graph."""
    policy = make_policy(name, double=True, lora_options={"use_rslora": True})
    torch.manual_seed(0)
    rows = Rows(*[None] * 5, torch.tensor([[0, 0, 1, 2, 0, 1, 1]]), 3)
    for layer in policy.lora_layers().values():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        x = torch.randn(1, 7, layer.in_features, dtype=torch.float64, requires_grad=True)
        g = torch.randn(2, 1, 7, layer.out_features, dtype=torch.float64)
        y, peft = layer(x), type(layer).__mro__[2].forward(layer, x)
        torch.testing.assert_close(y, peft)
        leaves = [w.new_zeros(3, *w.shape, requires_grad=True) for w in (a, b)]
        layer.per_pair = PerPair(rows, leaves)
        by_pair = layer(x)
        layer.per_pair = None
        for each in g:
            truth = torch.autograd.grad(peft, [x, a, b], each, retain_graph=True)
            found = torch.autograd.grad(y, [x, a, b], each, retain_graph=True)
            torch.testing.assert_close(found, truth)
            asked = [x, a, b, *leaves]
            of_x, *none, one, other = torch.autograd.grad(
                by_pair, asked, each, retain_graph=True, allow_unused=True
            )
            torch.testing.assert_close((of_x, one.sum(0), other.sum(0)), truth)
            assert none == [None, None]
            for pair in range(3):
                only = each * (rows.token_pair == pair)[..., None]
                truth = torch.autograd.grad(peft, [a, b], only, retain_graph=True)
                torch.testing.assert_close((one[pair], other[pair]), truth)
    assert torch.autograd.gradcheck(layer, x)


def test_a_layer_that_is_used_twice(make_policy):
    """As tied layers are: each use adds its part, also to products, and an output may be the next input."""
    layer = next(iter(make_policy(double=True, target_modules=["q_proj"]).lora_layers().values()))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.manual_seed(0)
    x, g = torch.randn(2, 2, 5, layer.in_features, dtype=torch.float64)

    def peft(x):
        return layer.base_layer(x) + layer.scaling["default"] * (x @ a.T @ b.T)

    for along in ((), (torch.randn_like(a), torch.randn_like(b))):
        shapes = [()] if along else [a.shape, b.shape]
        leaves = [a.new_zeros(2, *size, requires_grad=True) for size in shapes]
        layer.per_pair = PerPair(Rows(*[None] * 5, torch.tensor([[0] * 5, [1] * 5]), 2), leaves, along)
        y = layer(layer(x))
        torch.testing.assert_close(y, peft(peft(x)))
        y.backward(g)
        assert a.grad is b.grad is None
        for pair in range(2):
            truth = torch.autograd.grad(peft(peft(x[pair])), [a, b], g[pair])
            if along:
                truth = [sum((part * d).sum() for part, d in zip(truth, along, strict=True))]
            torch.testing.assert_close([leaf.grad[pair] for leaf in leaves], [*truth])


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"double": True}, 1e-12),
        ({"double": True, "gradient_checkpointing": True}, 1e-12),
        ({"double": True, "target_modules": ["q_proj", "v_proj", "up_proj"]}, 1e-12),
        ({"double": True, "lora_options": {"alpha_pattern": {"k_proj": 3}}}, 1e-12),
        ({"double": True, "name": "gpt2"}, 1e-12),
        ({"layout": "packed"}, 1e-5),
        (HALF, 0.02),
        (HALF | {"gradient_checkpointing": "selective"}, 0.02),
        (PEFT, 0.02),
    ],
)
def test_layers_of_one_input_are_one_node(options, tolerance, make_policy, make_batch, monkeypatch):
    """As each alone: values, gradients of one graph twice, single pairs', and all of them shifted."""
    batch, together = make_batch(4), make_policy(**options)
    rows = together.rows(batch)  # the self-check sees which
    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "share_inputs", lambda *_: None)
        (alone := make_policy(**options)).rows(batch)
    found = []
    for policy in (together, alone):
        direction = {name: d.to(policy.adapter()[name]) for name, d in random_direction(policy).items()}
        for scale in (0.0, -0.3):
            with policy.shifted(direction, scale):
                logs = policy.log_probs(batch, rows)
                loss, adapter = (logs.chosen - 0.5 * logs.rejected).sum(), [*policy.adapter().values()]
                # torch recomputes selectively once.
                passes = (True, False) if options.get("gradient_checkpointing") != "selective" else (False,)
                each = [torch.autograd.grad(loss, adapter, retain_graph=again) for again in passes]
                assert all(map(torch.equal, each[0], each[-1]))
                kept = step_pairs(policy, batch, True)
                found += [logs.chosen, flat(each[0]), kept.along(direction)]
                found += [flat(part.each[name] for name in policy.adapter()) for part in kept.kept]
    assert any(layer.others for layer in together.lora_layers().values()) == ("name" not in options)
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert off(one.double(), other.double()) < tolerance


def test_an_output_is_only_for_the_input_it_was_computed_of(make_policy, make_batch):
    policy = make_policy(double=True)
    policy.rows(make_batch())
    module = policy.model.base_model.layers[0].self_attn
    q, k = module.q_proj, module.k_proj
    x = torch.randn(1, 3, q.in_features, dtype=torch.float64)
    of_other = k(x + 1)
    assert k in q.others and q(x) is not None
    torch.testing.assert_close(k(x + 1), of_other)
    with policy.forgets_outputs():
        q(x)
    assert k.waiting == (None, None)
    k.scaling["default"] = 0.0
    assert q(x) is not None and torch.equal(k(x), k.base_layer(x))


def test_weights_are_cast_once_a_pass(make_policy, make_batch, monkeypatch):
    """To the same bits as by each layer, also after they were written without a trace, as DeepSpeed does."""
    batch, policy = make_batch(4), make_policy(**HALF)

    def values():
        logs, adapter = policy.log_probs(batch), policy.adapter().values()
        gradient = torch.autograd.grad((logs.chosen - logs.rejected).sum(), adapter)
        kept = step_pairs(policy, batch, True).kept
        return [logs.chosen, *gradient, *(each for part in kept for each in part.each.values())]

    for seed in range(2):
        torch.manual_seed(seed)
        for weight in policy.adapter().values():
            weight.data += torch.randn_like(weight)
        found = values()
        with monkeypatch.context() as patch:
            patch.setattr(policy, "_weights_cast", nullcontext)
            assert all(map(torch.equal, found, values()))
    layer = policy._own_layers[0]
    for each in (layer, *layer.others):
        each.base_layer.float()
    x = torch.randn(3, layer.in_features)
    expected = layer(x)  # of an input in fp32, by weights in fp32
    with policy._weights_cast():
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("kind", ["linear", "conv1d", "4bit"])
@pytest.mark.parametrize("options", [{}, {"lora_options": {"use_rslora": True}}])
def test_a_layer_rounds_its_output_once_and_its_gradients_never(kind, options, make_policy):
    more = {}
    if kind == "4bit":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes, the extra quantization, is not installed")
        sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        more = {"quantization": "4bit", "changes": sizes}
    policy = make_policy("gpt2" if kind == "conv1d" else "llama", **HALF, **options, **more)
    layer = next(iter(policy._lora_layers.values()))
    scale = layer.scaling["default"]
    assert scale == (4.0 if options else 2.0)
    torch.manual_seed(0)
    x = torch.randn(3, 7, layer.in_features).bfloat16().requires_grad_()
    g = torch.randn(3, 7, layer.out_features).bfloat16()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    y = layer(x)
    found = torch.autograd.grad(y, [x, a, b], g)
    assert [part.dtype for part in (y, *found)] == [torch.bfloat16] * 2 + [torch.float32] * 2

    base = layer.base_layer(x)
    (base_gradient,) = torch.autograd.grad(base, x, g)
    a, b = (w.detach().bfloat16().double() for w in (a, b))
    x, g = x.detach().double(), g.double()
    h = scale * (x @ a.T).float().bfloat16().double()
    exact = base.detach().double() + h @ b.T
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=2**-9)
    # PEFT's way would hand on the same sum: the base's output was rounded before.
    assert off(y.double(), exact) < 1.2 * off(exact.bfloat16().double(), exact)
    gh = scale * g @ b
    of_a, of_b = gh.flatten(0, 1).T @ x.flatten(0, 1), g.flatten(0, 1).T @ h.flatten(0, 1)
    for part, truth in zip(found, [base_gradient.double() + gh @ a, of_a, of_b], strict=True):
        assert off(part.double(), truth) < 4e-3
    assert off(found[2].double(), of_b) < 1e-5, "bf16 would leave 1e-3"


@pytest.mark.slow
def test_through_28_layers_it_is_as_near_to_float64(make_policy, make_batch):
    """u, the gradients of DPO and VNet, and c, here and after a virtual step, over four adapters.

    VNet's gradient is a sum with cancellations, so a single adapter's error may be several times larger or
    smaller by chance: ratios of errors are averaged geometrically.
    """
    batch, meta = make_batch(6), make_batch(6, seed=1, augmented=True)
    sizes = {"num_hidden_layers": 28, "initializer_range": 0.05}
    ways = {"exact": "float32", "float32": "float32", "base": "base"}
    policies = {
        way: make_policy(dtype="bfloat16", changes=sizes, lora_compute_dtype=dtype)
        for way, dtype in ways.items()
    }
    policies["exact"].double()
    found = {way: [] for way in ways}
    for seed in range(4):
        along = None
        for way, policy in policies.items():
            torch.manual_seed(seed)
            with torch.no_grad():
                for name, p in policy.adapter().items():
                    p.copy_(torch.randn(p.shape) * (0.02 if ".lora_B." in name else 0.2))
            if along is None:
                along = gradient(step_pairs(policy, meta))
                length = flat(along.values()).norm()
            d = {name: (along[name] / length).to(p) for name, p in policy.adapter().items()}
            pairs = step_pairs(policy, batch)
            parts = [*u_and_gradient(pairs), vnet_gradient(policy, pairs, meta)]
            with policy.shifted(d, -0.1):
                parts += u_and_gradient(step_pairs(policy, batch))
            parts += [pairs.along(d), CentralDifference(0.1).coefficients(pairs, d)]
            found[way].append([part.double() for part in parts])
    peft, own = (
        torch.tensor([[*map(off, *parts)] for parts in zip(found[way], found["exact"], strict=True)])
        for way in ("float32", "base")
    )
    assert float(peft.min()) > 1e-3, "bf16 matters"
    ratios = (own / peft).log().mean(0).exp()
    assert float(ratios.max()) < FACTOR, ratios


@pytest.mark.parametrize("options", [HALF, PEFT])
def test_a_shift_below_the_resolution_of_the_weights_moves_the_outputs(options, make_policy):
    """By 1e-4 of the weights, a fortieth of bf16's spacing; of the rounded sum little would be left."""
    policy, scale = make_policy(**options), 1e-4
    names, layer = next(iter(policy.lora_layers().items()))
    torch.manual_seed(0)
    x = torch.randn(20_000, layer.in_features).bfloat16()
    direction = {name: torch.randn(p.shape) * p.detach().std() for name, p in policy.adapter().items()}
    layer.base_layer.weight.data.zero_()  # or the output's rounding would drown LoRA's
    with torch.no_grad():
        y = layer(x).double()
        with policy.shifted(direction, scale):
            moved = layer(x).double()
    a, b = (policy.adapter()[name].detach().double() for name in names)
    da, db = (direction[name].double() for name in names)
    expected = scale * layer.scaling["default"] * (x.double() @ da.T @ b.T + x.double() @ a.T @ db.T)
    # Outputs are rounded to far more than they move, and still move as much on average.
    assert abs(float(((moved - y) * expected).sum() / expected.square().sum()) - 1) < 0.1


@pytest.mark.parametrize(
    ("layout", "recomputed"),
    [("shared", False), ("separate", "selective"), ("packed", "selective"), ("packed", True)],
)
def test_gradients_of_pairs_add_up(layout, recomputed, make_policy, make_batch):
    """Kept gradients, their dot products, and the graph's, here and shifted; nothing of it stays."""
    policy = make_policy(**HALF, layout=layout, gradient_checkpointing=recomputed)
    batch = make_batch(4)  # 1/4 rounds nothing
    direction = random_direction(policy)
    before = gradient(step_pairs(policy, batch))
    for scale in (0.0, -0.3):
        with policy.shifted(direction, scale):
            kept = step_pairs(policy, batch, True, 2)
            again = step_pairs(policy, batch, micro_batch_size=2)
            assert off(flat(gradient(kept).values()), flat(gradient(again).values())) < 1e-5
            torch.testing.assert_close(kept.along(direction), again.along(direction), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient(step_pairs(policy, batch)), before, rtol=0, atol=0)


def test_the_reference_and_merging_are_pefts(make_policy, make_batch):
    batch = make_batch()
    own, peft = make_policy(**HALF), make_policy(**PEFT)
    assert torch.equal(own.reference_log_probs(batch).chosen, peft.reference_log_probs(batch).chosen)
    assert not torch.equal(own.log_probs(batch).chosen, peft.log_probs(batch).chosen)
    merged = [policy.peft.merge_and_unload().state_dict() for policy in (own, peft)]
    assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[1])
    # Over a float32 base both are the same.
    found = [make_policy(lora_compute_dtype=way).log_probs(batch).chosen for way in ("base", "float32")]
    assert torch.equal(*found)
