"""Kernels that a GPU starts for one layer of a Llama in bfloat16, with LoRA on all linears, in both passes.

Counted by operations on a CPU; torch's attention and its products of bf16 in fp32 are one operation each.
"""

import shutil
from collections import Counter

import pytest
import torch
from torch._inductor import config as inductor
from torch.utils._python_dispatch import TorchDispatchMode

from pacmr_lightning.policy import lora_layer
from pacmr_lightning.policy.base_model import compile_layers

EAGER, COMPILED = 155, 70
"""What is reached; times 28 layers at 1.5B: 4,340 and 1,960."""
VIEWS = {"alias", "detach", "expand", "select", "slice", "split_with_sizes", "squeeze", "t", "transpose"}
VIEWS |= {"_unsafe_view", "permute", "unsqueeze", "view", "empty", "empty_like", "new_empty_strided"}
LIBRARY = torch.library.Library("tests", "DEF")
LIBRARY.define("product(Tensor a, Tensor b) -> Tensor")
LIBRARY.impl("product", lambda a, b: a.float() @ b.float(), "CompositeExplicitAutograd")


class Operations(TorchDispatchMode):
    """Counts operations that are no view."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name.partition("::")[2]
        self.counts[name] += name not in VIEWS
        if name == "_varlen_attn_backward":  # it differentiates, which nothing may below this mode
            return tuple(map(torch.empty_like, args[1:4]))
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def make_step(make_policy, make_batch, monkeypatch):
    """A policy, and its forward and backward pass; the self-check has run."""

    def make(layers):
        policy = make_policy(dtype="bfloat16", layout="packed", changes={"num_hidden_layers": layers})
        batch = make_batch()
        rows = policy.rows(batch)
        monkeypatch.setattr(lora_layer, "product", torch.ops.tests.product)

        def step():
            found = policy.log_probs(batch, rows)
            torch.autograd.grad((found.chosen - found.rejected).sum(), policy.adapter().values())

        return policy, step

    return make


def test_an_eager_layer(make_step):
    counts = []
    for layers in (1, 2):
        _, step = make_step(layers)
        with Operations() as operations:
            step()
        counts.append(operations.counts)
    layer = counts[1] - counts[0]
    assert layer["mm"] + layer["addmm"] + layer["product"] + layer["addmm_"] > 40, "both passes were counted"
    assert layer.total() <= EAGER, layer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a compiler")
def test_a_compiled_layer(make_step):
    """What Inductor leaves after fusion; on a CPU it fuses no concatenation, so a GPU has fewer."""
    policy, step = make_step(2)
    graphs = []

    def count(nodes):
        kinds = ((type(n).__name__, type(getattr(n, "node", None)).__name__) for n in nodes)
        graphs.append([k for k in kinds if k[0] != "NopKernelSchedulerNode" and k[1] != "MultiOutput"])
        return nodes

    torch._dynamo.reset()
    compile_layers(policy.model)
    with inductor.patch(_post_fusion_custom_pass=count, force_disable_caches=True):
        step()
    torch._dynamo.reset()
    assert len(graphs) == 4  # of the first layer, whose input has no gradient, and of the others
    forward, backward = graphs[2:]
    assert len(forward) > 25 and len(backward) > 35, "both passes were counted"
    assert len(forward) + len(backward) <= COMPILED, (forward, backward)
