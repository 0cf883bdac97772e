"""Shared-prompt rows give the log-probabilities of plain forwards of prompt + response."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, OPTConfig

from pacmr_lightning.batch import LogProbs, PairBatch, Segment
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.attention import AttentionPlan
from pacmr_lightning.policy.logprobs import token_values
from pacmr_lightning.policy.masks import shared_mask
from pacmr_lightning.policy.rows import packed_rows, padded, row_multiple, rows_of, separate_rows, shared_rows
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.runs.memory_estimate import LiveBytes

SMALL = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LAYOUTS = ("shared", "separate", "packed", "plain")
ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen2-mixed", "mistral", "gpt2"]


def plain_log_probs(model: torch.nn.Module, batch: PairBatch) -> LogProbs:
    """One unpadded sequence at a time through the transformers model, its whole logits, log_softmax."""
    sums: list[list[torch.Tensor]] = [[], []]
    for tokens, segments in zip(batch.input_ids, batch.segment_ids, strict=True):
        prompt = tokens[segments == Segment.PROMPT]
        for side, segment in enumerate((Segment.CHOSEN, Segment.REJECTED)):
            response = tokens[segments == segment]
            sequence = torch.cat([prompt, response])[None]
            logits = model(input_ids=sequence, use_cache=False).logits[0, len(prompt) - 1 : -1]
            sums[side].append(logits.log_softmax(-1).gather(1, response[:, None]).sum())
    return LogProbs(torch.stack(sums[0]), torch.stack(sums[1]))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equal_to_plain_forwards(name, attention, make_policy, make_batch):
    policy, batch = make_policy(name, attn_implementation=attention, logit_chunk=7), make_batch()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # the self-check must find nothing to warn about
        truth = plain_log_probs(policy.model, batch)
        found = policy.log_probs(batch)
    assert policy._plan == AttentionPlan(attention, "shared")
    for layout in LAYOUTS:
        with torch.no_grad():
            found = policy.log_probs_in(layout, batch)
        torch.testing.assert_close(found.chosen, truth.chosen, atol=1e-4, rtol=0)
        torch.testing.assert_close(found.rejected, truth.rejected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("trained_head", [False, True])
def test_entropies_and_perplexities(trained_head, make_policy, make_batch):
    """Of transformers' own logits, with and without gradient, of frozen heads and of trained ones."""
    targets = {"target_modules": ["q_proj", "lm_head"]} if trained_head else {}
    policy, batch = make_policy(double=True, logit_chunk=7, **targets), make_batch()
    entropies, perplexities = [[], []], [[], []]
    for tokens, segments in zip(batch.input_ids, batch.segment_ids, strict=True):
        prompt = tokens[segments == Segment.PROMPT]
        for side, segment in enumerate((Segment.CHOSEN, Segment.REJECTED)):
            response = tokens[segments == segment]
            with torch.no_grad():
                logits = policy.model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            entropies[side].append(torch.distributions.Categorical(logits=logits).entropy())
            perplexities[side].append(torch.nn.functional.cross_entropy(logits, response))
    chosen, rejected = map(torch.stack, perplexities)
    for layout in LAYOUTS:
        for with_gradient in (False, True):
            with torch.set_grad_enabled(with_gradient):
                plain = policy.log_probs_in(layout, batch)
                found = policy.score(rows_of(layout, batch), layout == "plain", entropies=True)
            assert plain.entropies is None and torch.equal(found.chosen, plain.chosen)
            assert found.chosen.requires_grad == with_gradient and not found.entropies.chosen.requires_grad
            for values, truth in zip(
                (found.entropies.chosen, found.entropies.rejected), entropies, strict=True
            ):
                torch.testing.assert_close(values, torch.stack([each.sum() for each in truth]))
            rewards = Rewards.of(found, batch.with_reference(plain), 0.1)
            torch.testing.assert_close(rewards.perplexity_difference, chosen - rejected)
            torch.testing.assert_close(rewards.entropy, torch.stack([each.mean() for each in entropies[0]]))
            swapped = rewards.exchanged()
            torch.testing.assert_close(swapped.perplexity_difference, rejected - chosen)
            torch.testing.assert_close(swapped.entropy, torch.stack([each.mean() for each in entropies[1]]))
        if layout == "shared":
            weights = torch.linspace(-1, 1, len(batch), dtype=torch.float64)
            gradients = [
                torch.autograd.grad((weights * each.chosen).sum(), list(policy.adapter().values()))
                for each in (plain, found)
            ]
            assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_of_responses(layout, make_policy, make_batch):
    """Of transformers' own layers, one sequence at a time: the middle's mean, and the last's at the end."""
    policy, batch = make_policy(double=True), make_batch()
    truth = []
    for tokens, segments in zip(batch.input_ids, batch.segment_ids, strict=True):
        prompt = tokens[segments == Segment.PROMPT]
        for segment in (Segment.CHOSEN, Segment.REJECTED):
            sequence = torch.cat([prompt, tokens[segments == segment]])[None]
            with torch.no_grad():
                outputs = policy.model.base_model(sequence, output_hidden_states=True)
            middle = outputs.hidden_states[len(outputs.hidden_states) // 2][0, len(prompt) - 1 : -1]
            truth.append(torch.cat([middle.mean(0), outputs.last_hidden_state[0, -2]]))
    found = policy.response_states(rows_of(layout, batch))
    assert found.dtype == torch.float32 and len(found) == len(batch)
    torch.testing.assert_close(found, torch.stack(truth).view_as(found).float())


def test_states_are_the_reference_s(make_policy, make_batch):
    policy, batch = make_policy(), make_batch()
    found = policy.reference_states(batch)
    with policy.reference():
        assert torch.equal(found, policy.response_states(policy.rows(batch)))
    assert not torch.allclose(found, policy.response_states(policy.rows(batch)), atol=0.1)


def test_gradients_equal_to_plain_forwards(make_policy, make_batch):
    policy, batch = make_policy(double=True), make_batch()
    weights = torch.linspace(-1, 1, len(batch), dtype=torch.float64)

    def gradient(found: LogProbs) -> list[torch.Tensor]:
        loss = (weights * found.chosen + weights.flip(0) * found.rejected).sum()
        return torch.autograd.grad(loss, list(policy.adapter().values()))

    truth = gradient(plain_log_probs(policy.model, batch))
    for layout in LAYOUTS:
        for found, expected in zip(gradient(policy.log_probs_in(layout, batch)), truth, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8)


def test_gradient_checkpointing_changes_nothing(make_policy, make_batch):
    batch = make_batch()
    found = []
    for option in (False, True):
        policy = make_policy(gradient_checkpointing=option)
        policy.train()
        log_probs = policy.log_probs(batch)
        found.append(torch.autograd.grad(log_probs.chosen.sum(), list(policy.adapter().values())))
    assert policy.model.base_model.gradient_checkpointing
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpoints_of_a_policy_keep_no_random_state(make_policy, make_batch, monkeypatch):
    """It has no dropout, and on a GPU each state is a copy that waits for the device."""
    policy, batch = make_policy(gradient_checkpointing=True).train(), make_batch()
    policy.log_probs(batch)
    kept = []
    monkeypatch.setattr(torch, "get_rng_state", lambda: kept.append(1))
    found = policy.log_probs(batch)
    torch.autograd.grad(found.chosen.sum(), list(policy.adapter().values()))
    assert not kept


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(num_local_experts=4, router_jitter_noise=0.3, num_key_value_heads=2, **SMALL),
        OPTConfig(layerdrop=0.5, dropout=0.5, ffn_dim=64, word_embed_proj_dim=32, **SMALL),
    ],
    ids=["router noise", "skipped layers"],
)
def test_nothing_of_a_policy_is_random(config, make_batch, tmp_path):
    """In training either, so that a recomputed layer is the layer."""
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    batch, found = make_batch(), []
    for recomputed in (False, True):
        policy = PolicyModel(str(tmp_path), target_modules=["q_proj"], gradient_checkpointing=recomputed)
        torch.manual_seed(0)
        policy.build(announce=False)
        value = policy.train().log_probs_in("separate", batch).chosen.sum()
        found.append([value, *torch.autograd.grad(value, list(policy.adapter().values()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_by_hand():
    """Pair: prompt 5 6 7, chosen 8 2, rejected 9 10 2, one column of padding."""
    batch = PairBatch.collate(
        ["x", "y"], [[5, 6, 7], [5, 6, 7, 4]], [[8, 2], [8, 2]], [[9, 10, 2], [9, 10, 2]]
    )
    rows = shared_rows(batch)
    assert rows.position_ids[0, :8].tolist() == [0, 1, 2, 3, 4, 3, 4, 5]
    first = rows.source[0] == 0
    assert rows.source[1][first].tolist() == [2, 3, 2, 5, 6]
    assert rows.targets[first].tolist() == [8, 2, 9, 10, 2]
    assert rows.owner[first].tolist() == [0, 0, 2, 2, 2]
    assert rows.token_pair.tolist() == [[0] * 9, [1] * 9]
    mask = shared_mask(rows, LlamaConfig(attn_implementation="sdpa"), torch.bfloat16)[0, 0]
    assert mask.dtype == torch.bfloat16 and mask.unique().tolist() == [torch.finfo(torch.bfloat16).min, 0]
    visible = mask.eq(0).int().tolist()
    assert visible[4] == [1, 1, 1, 1, 1, 0, 0, 0, 0]  # chosen sees prompt and itself
    assert visible[6] == [1, 1, 1, 0, 0, 1, 1, 0, 0]  # rejected does not see chosen
    assert visible[2] == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert visible[8] == [0, 0, 0, 0, 0, 0, 0, 0, 1]  # padding sees itself only
    rows = separate_rows(batch)
    assert rows.input_ids.tolist() == [
        [5, 6, 7, 8, 2, 0, 0],
        [5, 6, 7, 4, 8, 2, 0],
        [5, 6, 7, 9, 10, 2, 0],
        [5, 6, 7, 4, 9, 10, 2],
    ]
    rows = packed_rows(batch)
    assert rows.input_ids.tolist() == [
        [*(5, 6, 7, 8, 2), *(5, 6, 7, 4, 8, 2), *(5, 6, 7, 9, 10, 2), *(5, 6, 7, 4, 9, 10, 2)]
    ]
    assert rows.position_ids.tolist() == [[*range(5), *range(6), *range(6), *range(7)]]
    assert rows.lengths.tolist() == [5, 6, 6, 7]
    assert rows.token_pair.tolist() == [[0] * 5 + [1] * 6 + [0] * 6 + [1] * 7]
    assert rows.source[1].tolist() == [2, 3, 8, 9, 13, 14, 15, 20, 21, 22]
    assert rows.targets.tolist() == [8, 2, 8, 2, 9, 10, 2, 9, 10, 2]
    assert rows.owner.tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 3, 3]


def test_slices_drop_needless_padding(make_batch):
    batch = make_batch(6, augmented=True)
    parts = list(batch.micro_batches(2))
    assert [len(p) for p in parts] == [2, 2, 2]
    assert sum(p.token_count for p in parts) == batch.token_count
    assert all((p.segment_ids[:, -1] != Segment.PAD).any() for p in parts)
    picked = batch[torch.tensor([4, 1])]
    assert picked.ids == ["pair-4", "pair-1"] and picked.augmented.ids == picked.ids


def test_an_ignored_mask_is_found(make_policy, make_batch, monkeypatch):
    """An attention implementation that drops prepared masks: flash kernels do, and some architectures."""
    policy, batch = make_policy(), make_batch()
    decoder = policy.model.base_model
    forward = decoder.forward

    def deaf(*args, attention_mask=None, **kwargs):
        if attention_mask is not None and attention_mask.dim() == 4:
            attention_mask = None
        return forward(*args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(decoder, "forward", deaf)
    with pytest.warns(UserWarning, match="one sequence a row"), torch.no_grad():
        found = policy.log_probs(batch)
    assert policy._plan.layout == "separate"
    truth = plain_log_probs(policy.model, batch)
    torch.testing.assert_close(found.rejected, truth.rejected.detach(), atol=1e-4, rtol=0)


def test_an_ignored_window_is_found_on_a_short_pair(make_policy, make_batch, monkeypatch):
    """The window is cut by a model on its own sequences but not on prepared masks: the pair at hand is
    shorter than the window, the check's row is not."""
    policy = make_policy("mistral", changes={"sliding_window": 40})
    batch = make_batch(2, longest=5)
    assert batch.input_ids.shape[1] < 40
    monkeypatch.setattr(
        "pacmr_lightning.policy.masks.shared_mask",
        lambda rows, config, dtype: shared_mask(rows, _WithoutWindow(config), dtype),
    )
    with pytest.warns(UserWarning, match="one sequence a row"), torch.no_grad():
        policy.log_probs(batch)
    assert policy._plan.layout == "separate"


class _WithoutWindow:
    """A config that hides its window from the mask, as an architecture unknown to us would."""

    def __init__(self, config):
        self._config = config
        self._attn_implementation = config._attn_implementation

    def get_text_config(self):
        return self

    def to_dict(self):
        return {**self._config.to_dict(), "sliding_window": None, "layer_types": None}


def test_transformed_logits_are_found(make_policy, make_batch, monkeypatch):
    """Soft-capped or scaled logits (Gemma, Cohere, Granite): the head alone does not give the model's own."""
    policy, batch = make_policy(), make_batch()
    monkeypatch.setattr(policy.model, "forward", _scaled(policy.model.forward))
    with (
        pytest.warns(UserWarning, match="one sequence a row"),
        pytest.warns(UserWarning, match="whole logits"),
        torch.no_grad(),
    ):
        found = policy.log_probs(batch)
    assert policy._plan.layout == "plain"
    truth = plain_log_probs(policy.model, batch)
    torch.testing.assert_close(found.chosen, truth.chosen.detach(), atol=1e-4, rtol=0)


def _scaled(forward):
    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits / 3
        return output

    return scaled


def plain_kl(policy, batch: PairBatch) -> torch.Tensor:
    """Mean KL over the response positions of each pair, from whole logits of one sequence at a time."""
    expected = []
    for tokens, segments in zip(batch.input_ids, batch.segment_ids, strict=True):
        prompt = tokens[segments == Segment.PROMPT]
        values = []
        for segment in (Segment.CHOSEN, Segment.REJECTED):
            sequence = torch.cat([prompt, tokens[segments == segment]])[None]
            p = policy.model(input_ids=sequence).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            with policy.reference():
                q = policy.model(input_ids=sequence).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            values.append((p.exp() * (p - q)).sum(-1))
        expected.append(torch.cat(values).mean())
    return torch.stack(expected)


def test_what_held_out_pairs_are_judged_by(make_policy, make_batch):
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
    for found, truth in ((own, policy.log_probs(batch)), (reference, policy.reference_log_probs(batch))):
        torch.testing.assert_close(found.chosen, truth.chosen)
        torch.testing.assert_close(found.rejected, truth.rejected)
    assert not torch.equal(own.chosen, reference.chosen)
    brought = batch.with_reference(own)
    assert policy.judged(brought)[1] is brought.reference
    fresh = make_policy(moved=False)
    assert fresh.judged(batch)[2].abs().max() == 0


def test_token_kl_of_transformed_logits(make_policy, make_batch, monkeypatch):
    policy, batch = make_policy(double=True), make_batch(3)
    monkeypatch.setattr(policy.model, "forward", _scaled(policy.model.forward))
    with (
        pytest.warns(UserWarning, match="one sequence a row"),
        pytest.warns(UserWarning, match="whole logits"),
    ):
        found = policy.judged(batch)[2]
    with torch.no_grad():
        torch.testing.assert_close(found, plain_kl(policy, batch))


class MostRows(TorchDispatchMode):
    """Inside, keeps the largest number of rows that a matrix with some number of columns has."""

    def __init__(self, columns: int):
        super().__init__()
        self.columns, self.rows = columns, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dim() and found.shape[-1] == self.columns:
            self.rows = max(self.rows, found.numel() // self.columns)
        return found


@pytest.mark.parametrize("frozen", [True, False])
def test_logits_of_a_large_vocabulary(frozen):
    """4,000 response tokens of Qwen2's vocabulary, on tensors without contents: forward and backward make no
    logits of more tokens than a chunk has, and hold but a few matrices of that size at a time."""
    vocabulary, width, tokens, chunk = 151_936, 896, 4_000, 1_000
    with FakeTensorMode():
        head = torch.nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16).requires_grad_(not frozen)
        hidden = torch.zeros(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.long)
        with LiveBytes(head) as live, MostRows(vocabulary) as most:
            values = token_values(hidden, head, targets, -(-tokens // chunk), frozen).log_probs
            values.sum().backward()
    assert most.rows == chunk > width
    # Logits in bf16 and fp32; where the head is trained, their softmax, its gradient and the head's own too.
    bound = 6.5 * chunk * vocabulary if frozen else 17 * chunk * vocabulary + 3 * vocabulary * width
    assert live.peak < bound


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed", "mistral", "gpt2"])
@pytest.mark.parametrize("layout", ["shared", "separate"])
def test_padding_to_whole_tiles_changes_nothing(name, layout, make_policy, make_batch, monkeypatch):
    """As rows are on a GPU, in float64: values and gradients are those of the rows as they come."""
    policy, batch = make_policy(name, double=True), make_batch()

    def found():
        values = policy.log_probs_in(layout, batch)
        loss = (values.chosen * torch.linspace(-1, 1, len(batch)) - values.rejected).sum()
        return [values.chosen, values.rejected, *torch.autograd.grad(loss, list(policy.adapter().values()))]

    expected = found()
    monkeypatch.setattr("pacmr_lightning.policy.rows.row_multiple", lambda device: 64)
    rows = rows_of(layout, batch)
    assert rows.input_ids.shape == rows.token_pair.shape == (len(rows.input_ids), 64)
    for value, truth in zip(found(), expected, strict=True):
        torch.testing.assert_close(value, truth, atol=1e-10, rtol=1e-8)


def test_rows_are_padded_on_gpus_only(make_batch):
    assert row_multiple(torch.device("cpu")) == 1 and row_multiple(torch.device("cuda", 1)) == 64
    batch = make_batch()
    as_found = shared_rows(batch)
    assert padded(as_found, 1) is as_found
    length = batch.input_ids.shape[1]
    assert padded(as_found, length) is as_found
    assert padded(as_found, length - 1).input_ids.shape[1] == 2 * (length - 1)
    # One row of all sequences has no padding to begin with.
    assert rows_of("packed", batch).input_ids.numel() == separate_rows(batch).real.sum()
