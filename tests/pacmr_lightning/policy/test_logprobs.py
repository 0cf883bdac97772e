"""Shared-prompt rows give the log-probabilities of plain forwards of prompt + response."""

import warnings
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, OPTConfig

from pacmr_lightning.batch import LogProbs, PairBatch, Segment
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.attention import AttentionPlan, use_attention
from pacmr_lightning.policy.chunked_log_probs import token_log_probs
from pacmr_lightning.policy.model import middle_states
from pacmr_lightning.policy.packed_attention import VARLEN
from pacmr_lightning.policy.token_layout import TILES, Rows, rows_of, shared_mask

from ..conftest import CONFIGS
from .test_attention import values_and_gradient

SMALL = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LAYOUTS = ("shared", "separate", "packed", "plain")
ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen2-mixed", "mistral", "gpt2"]


def sequences(batch: PairBatch) -> list[list[tuple[torch.Tensor, slice, torch.Tensor]]]:
    """Of each pair's chosen and rejected: one unpadded row, where its response is predicted, the response."""
    found = []
    for tokens, segments in zip(batch.input_ids, batch.segment_ids, strict=True):
        prompt = tokens[segments == Segment.PROMPT]
        responses = [tokens[segments == segment] for segment in (Segment.CHOSEN, Segment.REJECTED)]
        places = slice(len(prompt) - 1, -1)
        found.append([(torch.cat([prompt, response])[None], places, response) for response in responses])
    return found


def plain(model: torch.nn.Module, batch: PairBatch, value) -> LogProbs:
    """(N,) values of whole logits and response, one sequence at a time through the transformers model."""
    sides = [
        torch.stack(
            [value(model(row, use_cache=False).logits[0, places], response) for row, places, response in side]
        )
        for side in zip(*sequences(batch), strict=True)
    ]
    return LogProbs(*sides)


def log_prob(logits: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, response[:, None]).sum()


def rows_in(layout: str, policy: PolicyModel, batch: PairBatch, attention: str = "sdpa") -> Rows:
    """In a layout, with its attention switched on."""
    use_attention(policy.model, VARLEN if layout == "packed" else attention)
    return rows_of(layout, batch)


def adapter_gradient(policy: PolicyModel, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, list(policy.adapter().values()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equal_to_plain_forwards(name, attention, make_policy, make_batch):
    policy, batch = make_policy(name, attn_implementation=attention, logit_chunk=7), make_batch()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # the self-check must find nothing to warn about
        policy.log_probs(batch)
        assert policy._plan == AttentionPlan(attention, "shared")
        truth = plain(policy.model, batch, log_prob)
        for layout in LAYOUTS:
            found = policy.score(rows_in(layout, policy, batch, attention))
            torch.testing.assert_close(vars(found), vars(truth), atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_of_responses(layout, make_policy, make_batch):
    """The mean of transformers' own middle layer, one sequence at a time."""
    policy, batch = make_policy(double=True), make_batch()
    truth = []
    for row, places, _ in (side for pair in sequences(batch) for side in pair):
        with torch.no_grad():
            outputs = policy.model.base_model(row, output_hidden_states=True)
        middle = outputs.hidden_states[len(outputs.hidden_states) // 2][0, places]
        truth.append(middle.mean(0))
    found = policy.response_states(rows_in(layout, policy, batch))
    assert found.dtype == torch.float32 and len(found) == len(batch)
    torch.testing.assert_close(found, torch.stack(truth).view_as(found).float())
    use_attention(policy.model, "sdpa")
    reference = policy.reference_states(batch)
    with policy.reference():
        assert torch.equal(reference, policy.response_states(policy.rows(batch)))
    assert not torch.allclose(reference, found, atol=0.1)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "openai-gpt", "gemma2", "mixtral", "mamba"])
def test_states_without_the_layers_above(kind):
    small = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 64, "pad_token_id": 0}
    if "gpt" in kind:
        small = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 64}
    elif kind != "mamba":
        small |= {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small)).eval()
    inputs = {"input_ids": torch.randint(1, 64, (2, 7))}
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)
    with torch.no_grad():
        states = model.base_model(**inputs, output_hidden_states=True).hidden_states
        truth = states[1 if kind == "mamba" else 2]  # Mamba's list begins after the first layer
        hooks = dict(layers[1]._forward_hooks)
        layers[2].forward = lambda *_, **__: pytest.fail("the last layer ran")
        assert torch.equal(middle_states(model, inputs), truth)
    assert dict(layers[1]._forward_hooks) == hooks, "nothing is left behind"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_equal_to_plain_forwards(name, make_policy, make_batch):
    policy, batch = make_policy(name, double=True).train(), make_batch()
    weights = torch.linspace(-1, 1, len(batch), dtype=torch.float64)

    def gradient(found: LogProbs) -> tuple[torch.Tensor, ...]:
        return adapter_gradient(policy, (weights * found.chosen + weights.flip(0) * found.rejected).sum())

    truth = gradient(plain(policy.model, batch, log_prob))
    for layout in LAYOUTS:
        found = gradient(policy.score(rows_in(layout, policy, batch)))
        torch.testing.assert_close(found, truth, atol=1e-10, rtol=1e-8)


class Spent(TorchDispatchMode):
    """Bytes of all storages that operations make, ``now`` and at the ``peak``; operations of ``products``."""

    def __init__(self, module):
        super().__init__()
        self.now = self.peak = self.products = 0
        kept = [*module.parameters(), *module.buffers()]
        self.known = {t.untyped_storage()._cdata: t for t in kept}

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        found = operation(*arguments, **(options or {}))
        if "mm" in operation.name():
            self.products += found.numel() * arguments[-2].shape[-1]
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return found

    def add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def freed(_):
            self.now -= size
            del self.known[key]

        self.known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recomputation(name, half, make_policy, make_batch, monkeypatch):
    """The same gradients with less held, and if selective for nearly no more products.

    No random state is kept, as there is no dropout: on a GPU each is a copy, which waits for it.
    """
    batch, gradients, spent = make_batch(8, longest=40), [], []
    for recomputed in (False, "selective", True):
        options = {"dtype": "bfloat16"} if half else {"double": True}
        policy = make_policy(name, gradient_checkpointing=recomputed, **options).train()
        policy.log_probs(batch)
        with monkeypatch.context() as patch, Spent(policy) as live:
            patch.setattr(torch, "get_rng_state", lambda: pytest.fail("a random state is kept"))
            found = policy.log_probs(batch).chosen.sum()
            held = live.now
            gradients.append(adapter_gradient(policy, found))
        spent.append((held, live.products))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=0, atol=0)
    (most, least_work), (held, work), (least, most_work) = spent
    assert least < held < 0.75 * most
    assert work - least_work < 0.15 * (most_work - least_work)  # LoRA's


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(num_local_experts=4, router_jitter_noise=0.3, num_key_value_heads=2, **SMALL),
        OPTConfig(layerdrop=0.5, dropout=0.5, ffn_dim=64, word_embed_proj_dim=32, **SMALL),
    ],
    ids=["router noise", "skipped layers"],
)
def test_nothing_of_a_policy_is_random(config, make_policy, make_batch):
    batch, found = make_batch(), []
    for recomputed in (False, True):
        policy = make_policy(config, target_modules=["q_proj"], gradient_checkpointing=recomputed)
        value = policy.train().score(rows_of("separate", batch)).chosen.sum()
        found.append([value, *adapter_gradient(policy, value)])
    torch.testing.assert_close(*found)


def deaf(forward):
    """An attention implementation that drops prepared masks: flash kernels do, and some architectures."""

    def forward_deaf(*args, attention_mask=None, **kwargs):
        prepared = attention_mask is not None and attention_mask.dim() == 4
        return forward(*args, attention_mask=None if prepared else attention_mask, **kwargs)

    return forward_deaf


def scaled(forward):
    """Soft-capped or scaled logits (Gemma, Cohere, Granite): the head alone does not give the model's own."""

    def forward_scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits / 3
        return output

    return forward_scaled


@pytest.mark.parametrize(
    ("fault", "warned", "layout"),
    [(deaf, ["one sequence a row"], "separate"), (scaled, ["one sequence a row", "whole logits"], "plain")],
)
def test_a_model_with_a_way_of_its_own_is_found(fault, warned, layout, make_policy, make_batch, monkeypatch):
    policy, batch = make_policy(double=True), make_batch(3)
    part = policy.model.base_model if fault is deaf else policy.model
    monkeypatch.setattr(part, "forward", fault(part.forward))
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        found = policy.log_probs(batch)
    assert policy._plan.layout == layout
    assert all(any(words in str(warning.message) for warning in said) for words in warned)
    torch.testing.assert_close(vars(found), vars(plain(policy.model, batch, log_prob)))
    with torch.no_grad():
        torch.testing.assert_close(policy.judged(batch).token_kl, plain_kl(policy, batch))


def test_an_ignored_window_is_found_once_a_pair_is_longer(make_policy, make_batch, monkeypatch):
    """The window is cut by a model on its own sequences but not on prepared masks."""
    policy = make_policy("mistral", changes={"sliding_window": 12})
    short, batch = make_batch(2, longest=3), make_batch(2)
    assert short.lengths.max() < 12 < batch.lengths[:, 1].max()
    monkeypatch.setattr(
        "pacmr_lightning.policy.token_layout.shared_mask",
        lambda rows, _, dtype: shared_mask(rows, CONFIGS["llama"], dtype),
    )
    with torch.no_grad():
        policy.log_probs(short)
        assert policy._plan.layout == "shared"
        with pytest.warns(UserWarning, match="one sequence a row"):
            policy.log_probs(batch)
    assert policy._plan.layout == "separate"


def plain_kl(policy, batch: PairBatch) -> torch.Tensor:
    """Mean KL over the response positions of each pair, from whole logits of one sequence at a time."""
    expected = []
    for pair in sequences(batch):
        values = []
        for row, places, _ in pair:
            p = policy.model(input_ids=row).logits[0, places].log_softmax(-1)
            with policy.reference():
                q = policy.model(input_ids=row).logits[0, places].log_softmax(-1)
            values.append((p.exp() * (p - q)).sum(-1))
        expected.append(torch.cat(values).mean())
    return torch.stack(expected)


def test_policy_and_reference_of_held_out_pairs(make_policy, make_batch):
    policy, batch = make_policy(double=True), make_batch(3)
    with torch.no_grad():
        expected = plain_kl(policy, batch)
    own, reference, kl, chosen_kl = policy.judged(batch)
    torch.testing.assert_close(kl, expected)
    for i in range(len(batch)):  # with the chosen response in both places its mean is its sum over its length
        segments, tokens = batch.segment_ids[i], batch.input_ids[i]
        prompt, chosen = (tokens[segments == s].tolist() for s in (Segment.PROMPT, Segment.CHOSEN))
        twice = PairBatch.collate(["x"], [prompt], [chosen], [chosen])
        with torch.no_grad():
            torch.testing.assert_close(chosen_kl[i], plain_kl(policy, twice)[0] * len(chosen))
    torch.testing.assert_close(vars(own), vars(policy.log_probs(batch)))
    torch.testing.assert_close(vars(reference), vars(policy.reference_log_probs(batch)))
    assert not torch.equal(own.chosen, reference.chosen)
    assert make_policy(moved=False).judged(batch).token_kl.abs().max() == 0


@pytest.mark.parametrize("frozen", [True, False])
def test_logits_of_a_large_vocabulary(frozen):
    """4,000 response tokens of Qwen2's vocabulary, on tensors without contents: forward and backward hold but
    a few matrices of a chunk's logits at a time."""
    vocabulary, width, tokens, chunk = 151_936, 896, 4_000, 1_000
    with FakeTensorMode():
        head = torch.nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16).requires_grad_(not frozen)
        hidden = torch.zeros(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.long)
        with Spent(head) as live:
            values = token_log_probs(hidden, head, targets, -(-tokens // chunk), frozen)
            values.sum().backward()
    # Logits in bf16 and fp32; where the head is trained, their softmax, its gradient and the head's own too.
    bound = 6.5 * chunk * vocabulary if frozen else 17 * chunk * vocabulary + 3 * vocabulary * width
    assert live.peak < bound


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed", "mistral", "gpt2"])
@pytest.mark.parametrize("layout", ["shared", "separate"])
def test_padding_to_whole_tiles_changes_nothing(name, layout, make_policy, make_batch, monkeypatch):
    policy, batch = make_policy(name, double=True), make_batch()
    expected = values_and_gradient(policy, layout, batch)
    monkeypatch.setitem(TILES, "cpu", 64)
    rows = rows_of(layout, batch)
    assert rows.input_ids.shape == rows.token_pair.shape == (len(rows.input_ids), 64)
    torch.testing.assert_close(values_and_gradient(policy, layout, batch), expected, atol=1e-10, rtol=1e-8)
