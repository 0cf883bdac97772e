"""Responses of real tiny models; the truth is a loop that takes the likeliest token, a prompt at a time."""

import math

import pytest
import torch

from pacmr_lightning.evaluation.generation import Decoding, generation_key, repeated_bigrams, respond
from pacmr_lightning.evaluation.prompt_batch import PromptBatch, Response
from pacmr_lightning.policy.chat_template import end_tokens

PROMPTS = [[1, 5], [1, *range(7, 40)], [1, 9, 9, 3], [1, *range(50, 30, -1)], [1]]
TOKENS = 9
GREEDY = Decoding()


@pytest.fixture
def policy(make_policy):
    return lambda name="llama", **options: make_policy(name, changes={"vocab_size": 512}, **options)


def batch_of(prompts, pad_id=0):
    return PromptBatch.collate([str(p) for p in prompts], [""] * len(prompts), prompts, pad_id=pad_id)


def likeliest(policy, prompt, count=TOKENS):
    """``count`` tokens, each from a forward pass over everything before it, without cache and padding."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(policy.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_batch_is_answered_as_each_prompt_alone(name, policy, tokenizer):
    tokenizer.pad_token = "<eos>"
    tokenizer.chat_template = "{{ raise_exception('not asked') }}"  # no reason to fail on texts
    model = policy(name, double=name != "gpt2")
    tokens = [likeliest(model.eval(), prompt) for prompt in PROMPTS]
    own = [tokens[0][3], tokens[1][TOKENS - 1]]
    model.model.generation_config.eos_token_id = own
    ends = {tokenizer.eos_token_id, *own}
    assert set(ends_of(model, tokenizer)) == ends
    model.train()
    found = respond(model, tokenizer, batch_of(PROMPTS, tokenizer.pad_token_id), TOKENS, GREEDY)
    assert model.training
    assert found == [respond(model, tokenizer, batch_of([p]), TOKENS, GREEDY)[0] for p in PROMPTS]
    for prompt, row, response in zip(PROMPTS, tokens, found, strict=True):
        end = next((i for i, token in enumerate(row) if token in ends), None)
        text = tokenizer.decode(row[:end], skip_special_tokens=True)
        length = TOKENS if end is None else end + 1
        assert response == Response(text, "length" if end is None else "stop", len(prompt), length)
    assert {"length", "stop"} == {response.finish_reason for response in found}


@torch.no_grad()
def test_the_model_s_own_penalties_do_not_count(policy, tokenizer):
    model = policy()
    plain = respond(model, tokenizer, batch_of(PROMPTS), TOKENS, GREEDY)
    own = model.model.generation_config
    own.repetition_penalty, own.no_repeat_ngram_size, own.temperature, own.do_sample = 5.0, 1, 0.1, True
    assert respond(model, tokenizer, batch_of(PROMPTS), TOKENS, GREEDY) == plain
    assert model.model.generation_config is own and own.repetition_penalty == 5.0


def ends_of(policy, tokenizer):
    return end_tokens(tokenizer, policy.model.generation_config.eos_token_id)


@torch.no_grad()
def test_samples_depend_on_seed_and_batch_alone(policy, tokenizer):
    model = policy()
    hot = Decoding(temperature=1.0)
    state = torch.get_rng_state()
    first = respond(model, tokenizer, batch_of(PROMPTS), TOKENS, hot)
    assert torch.equal(torch.get_rng_state(), state)
    respond(model, tokenizer, batch_of(PROMPTS[:2]), TOKENS, hot)
    assert respond(model, tokenizer, batch_of(PROMPTS), TOKENS, hot) == first
    assert respond(model, tokenizer, batch_of(PROMPTS), TOKENS, Decoding(1.0, seed=1)) != first
    greedy = respond(model, tokenizer, batch_of(PROMPTS), TOKENS, GREEDY)
    assert greedy != first
    for almost in (Decoding(1.0, top_p=1e-9), Decoding(1e-6)):
        assert respond(model, tokenizer, batch_of(PROMPTS), TOKENS, almost) == greedy


@torch.no_grad()
def test_samples_follow_the_model_s_probabilities(policy, tokenizer):
    """1,000 first tokens at temperature 2: frequencies within five standard errors of softmax(logits / 2)."""
    model, count = policy(), 1000
    found = respond(model, tokenizer, batch_of([PROMPTS[1]] * count), 1, Decoding(temperature=2.0))
    logits = model.eval().model(torch.tensor([PROMPTS[1]])).logits[0, -1]
    expected: dict[str, float] = {}
    for token, probability in enumerate((logits.double() / 2).softmax(0).tolist()):
        ends = token in ends_of(model, tokenizer)
        text = "" if ends else tokenizer.decode([token], skip_special_tokens=True)
        expected[text] = expected.get(text, 0.0) + probability
    texts = [response.text for response in found]
    for text, p in expected.items():
        assert abs(texts.count(text) / count - p) <= 5 * (p * (1 - p) / count) ** 0.5 + 4e-3


def test_the_key_changes_with_all_that_matters(make_policy, tokenizer, monkeypatch):
    def key(limit=5, decoding=GREEDY, ends=2, **options):
        model = make_policy("llama", **options)
        model.model.generation_config.eos_token_id = ends
        return generation_key(model, tokenizer, limit, decoding)

    own = key()
    assert key() == own
    others = [{"limit": 6}, {"ends": [2, 7]}, {"alpha": 16}, {"moved": False}]
    others += [{"decoding": Decoding(0.5)}, {"decoding": Decoding(0.5, seed=1)}, {"dtype": "bfloat16"}]
    others += [{"changes": {"initializer_range": 0.1}}, {"changes": {"rms_norm_eps": 1e-3}}]
    others += [{"attn_implementation": "eager"}]
    assert len({own, *(key(**options) for options in others)}) == len(others) + 1
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert key() != own


def test_bigrams():
    """ab bc cd | ab ba ab bc: of the second response's 4, one stood before."""
    assert repeated_bigrams(["abcd", "ababc"]) == pytest.approx(1 / 7)
    assert math.isnan(repeated_bigrams(["a", ""]))
