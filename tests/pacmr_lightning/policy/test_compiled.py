"""Compiled layers compute what plain ones do, shifted and by pair too."""

import shutil
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import GhostDotProduct
from pacmr_lightning.meta_gradient.step_pairs import StepPairs
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.attention import AttentionPlan
from pacmr_lightning.policy.base_model import compile_layers
from pacmr_lightning.policy.packed_attention import VARLEN

# Of torch's own, when it traces an autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
TWO = {"target_modules": ["q_proj", "down_proj"]}
"""LoRA linears of attention and MLP; tracing the other five likewise takes most of the time."""


@pytest.fixture
def graphs(monkeypatch):
    """Counts what torch.compile traces, and runs it as it is traced; inductor would take minutes on a CPU."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield made
    torch._dynamo.reset()


@pytest.fixture
def plain_and_compiled(make_policy):
    def make(**options):
        options = TWO | options
        policies = [make_policy(**options), make_policy(compile=True, **options)]
        policies[1].load_state_dict(policies[0].state_dict())
        return policies

    return make


def passes(policy: PolicyModel, batch, scale: float = 0.5) -> list[torch.Tensor]:
    """Values of policy and reference and the gradient, as they are, shifted, and the ghost dot product."""
    adapter = policy.adapter()
    direction = {name: torch.linspace(-0.1, 0.1, p.numel()).view_as(p) for name, p in adapter.items()}

    def gradient():
        found = policy.log_probs(batch)
        return [found.chosen, *torch.autograd.grad((found.chosen - found.rejected).sum(), adapter.values())]

    found = gradient()
    reference = policy.reference_log_probs(batch)
    with policy.shifted(direction, scale):
        found += gradient()
    assert not torch.equal(found[0], found[len(found) // 2])  # the shift matters
    pairs = StepPairs(policy, DPO(0.5), batch.with_reference(reference), None)
    dots = GhostDotProduct().coefficients(pairs, direction)
    return [*found, reference.chosen, reference.rejected, dots]


HALF = {"dtype": "bfloat16", "lora_compute_dtype": "base"}
# Numbers of pairs and seeds; the first again, after pairs' gradients were taken.
BATCHES = [(5, 0), (5, 0)]
MORE_BATCHES = [(1, 0), (5, 1), (4, 2), (1, 0)]


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, BATCHES),
        pytest.param(HALF, BATCHES, marks=pytest.mark.slow),
        pytest.param({}, MORE_BATCHES, marks=pytest.mark.slow),
        pytest.param({"gradient_checkpointing": True}, MORE_BATCHES, marks=pytest.mark.slow),
    ],
)
def test_equal_and_no_field_is_lost(options, batches, graphs, plain_and_compiled, make_batch):
    plain, compiled = plain_and_compiled(**options, changes={"num_hidden_layers": 1})
    for n, seed in batches:
        batch = make_batch(n, seed=seed)
        before = len(graphs)
        expected = passes(plain, batch)
        assert len(graphs) == before
        torch.testing.assert_close(passes(compiled, batch), expected, rtol=0, atol=0)
    assert 0 < len(graphs) <= 12
    before = len(graphs)
    passes(compiled, batch, 0.25)
    asked = {"input_ids": batch.input_ids[:1, :4], "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(compiled.generate(**asked), plain.generate(**asked))
    assert len(graphs) == before, "another shift and generation are not compiled"


@pytest.mark.parametrize("options", [TWO, pytest.param(HALF, marks=pytest.mark.slow)])
def test_graphs_serve_packed_pairs_of_any_lengths(options, make_policy, make_batch, monkeypatch):
    """Layers share a graph for the first, whose input has no gradient, for others, and without gradients."""
    made = []

    def counted(kind):
        return lambda graph, inputs: made.append(kind) or make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=counted("forward"), bw_compiler=counted("backward"))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    counters.clear()
    options = {"layout": "packed", "changes": {"num_hidden_layers": 3}, **options}
    plain, compiled = make_policy(**options), make_policy(compile=True, **options)
    compiled.load_state_dict(plain.state_dict())
    for n, seed in [(4, 0), (9, 1), (1, 2), (2, 3)]:
        batch = make_batch(n, seed=seed)
        found, truth = (
            torch.autograd.grad((x.chosen - x.rejected).sum(), policy.adapter().values())
            for policy, x in ((policy, policy.log_probs(batch)) for policy in (compiled, plain))
        )
        assert all(map(torch.equal, found, truth))
        with torch.no_grad():
            assert torch.equal(compiled.log_probs(batch).chosen, plain.log_probs(batch).chosen)
    assert compiled._plan == AttentionPlan(VARLEN, "packed")
    assert (made.count("forward"), made.count("backward")) == (3, 2)
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_what_is_refused(make_policy, make_batch, monkeypatch):
    with pytest.raises(UserError, match="set gradient_checkpointing to true or false"):
        PolicyModel("model", compile=True, gradient_checkpointing="selective")
    with pytest.raises(UserError, match="no layers that can be compiled"):
        compile_layers(nn.Linear(2, 2))
    policy = make_policy(compile=True)
    monkeypatch.setattr(PolicyModel, "is_sharded", True)
    with pytest.raises(UserError, match="set compile to false"):
        policy.log_probs(make_batch())


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a compiler")
def test_inductor(plain_and_compiled, make_batch):
    plain, compiled = plain_and_compiled(changes={"num_hidden_layers": 1})
    batch = make_batch()
    for found, truth in zip(passes(compiled, batch), passes(plain, batch), strict=True):
        torch.testing.assert_close(found, truth, atol=1e-4 * float(1 + truth.detach().abs().max()), rtol=0)
