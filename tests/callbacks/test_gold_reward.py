import json
import math

import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pacmr_lightning import cli
from pacmr_lightning.callbacks import GoldReward, RunSummary, SequenceKL, samples
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.generation import repeated_bigrams
from pacmr_lightning.evaluation.prompt_batch import PromptBatch
from pacmr_lightning.policy import PolicyModel

from ..conftest import read_lines, short_fit, with_callback

PROMPTS = ["tell me", "tell me of the sea", "sing"]
WORDS = [f"word{i}" for i in range(60)] + ["good", "bad"]


def gold_reward(prompt, response):
    assert prompt in PROMPTS
    return float(response.split().count("good") - response.split().count("bad"))


class Policy(PolicyModel):
    """A tiny Llama with LoRA that records how it samples, without the check of how neighbours count."""

    def __init__(self, folder):
        super().__init__(folder, rank=2)
        self.build()
        self.calls = []

    def leave_reference(self):
        with torch.no_grad():
            for parameter in self.adapter().values():
                parameter.normal_(std=0.3)

    def generate(self, **options):
        if "output_logits" not in options:
            self.calls.append(options)
        return super().generate(**options)


def prompt_batches(data):
    pad = data.tokenizer.pad_token_id
    return [PromptBatch.collate([p], [p], data.tokenizer([p])["input_ids"], pad_id=pad) for p in PROMPTS]


@pytest.fixture(scope="module")
def tokenizer():
    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "</s>"]
    raw.train_from_iterator(PROMPTS + WORDS, trainers.WordLevelTrainer(special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


@pytest.fixture
def world(tokenizer, make_module, make_data, tmp_path, tiny_llama):
    data = make_data()
    data.tokenizer = tokenizer
    data.gold_reward = gold_reward
    data.predict_dataloader = lambda: prompt_batches(data)
    module = make_module()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    keys = {"tokenizer": tokenizer, "vocab_size": len(tokenizer), **shape}
    module.policy = Policy(tiny_llama(tmp_path / "base", **keys))
    module.policy.requires_grad_(False)
    return module, data


class Length:
    """Another reward."""

    def __call__(self, prompt, response):
        assert prompt in PROMPTS
        return float(len(response))


def test_gold_reward_of_a_run(fit, tmp_path, world):
    """Metrics of ``on_train_end`` are in the summary, whose callback comes first."""
    gold = GoldReward(samples=40, max_new_tokens=6, batch_size=16, second_reward=Length())
    loggers = [
        CSVLogger(tmp_path, name="csv", version=""),
        TensorBoardLogger(tmp_path, name="tensorboard", version=""),
    ]
    trainer = fit(tmp_path, [RunSummary(), gold], *world, max_epochs=1, logger=loggers)
    samples = read_lines(tmp_path / "samples.jsonl")
    assert [row["prompt"] for row in samples] == [PROMPTS[i % 3] for i in range(40)]
    rewards = [row["gold_reward"] for row in samples]
    assert rewards == [gold_reward(row["prompt"], row["response"]) for row in samples]
    assert any(rewards)
    mean = sum(rewards) / 40
    stderr = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 39 / 40)
    expected = {"val/gold_reward": pytest.approx(mean), "val/gold_reward_stderr": pytest.approx(stderr)}
    metrics = json.loads((tmp_path / "summary.json").read_text())["metrics"]
    last = pd.read_csv(tmp_path / "csv" / "metrics.csv").iloc[-1]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name, value in expected.items():
        assert float(trainer.callback_metrics[name]) == value
        assert metrics[name] == value
        assert float(last[name]) == value
        assert events.Scalars(name)[-1].value == pytest.approx(value.expected, rel=1e-5)
    lengths = torch.tensor([float(len(row["response"])) for row in samples])
    assert metrics["val/second_reward"] == pytest.approx(float(lengths.mean()))
    assert metrics["val/second_reward_stderr"] == pytest.approx(float(lengths.std() / 40**0.5))
    assert metrics["val/sequence_kl"] == 0  # nothing was learned
    assert {"val/sequence_kl", "val/response_tokens"} <= set(last.index)
    for row in samples:
        assert "<pad>" not in row["response"] and "</s>" not in row["response"]
        assert len(row["response"].split()) <= 6


def test_sampling_is_plain_left_padded_and_seeded(fit, tmp_path, world, monkeypatch):
    """It leaves the global state alone; prompts go to the strategy's device, also under ZeRO-3."""
    module, data = world

    class Watch(GoldReward):
        def on_train_end(self, trainer, pl_module):
            monkeypatch.setattr(type(pl_module), "device", torch.device("meta"))
            before = torch.get_rng_state()
            super().on_train_end(trainer, pl_module)
            assert torch.equal(before, torch.get_rng_state())
            monkeypatch.undo()

    def sample(folder, seed):
        module.policy.calls.clear()
        fit(tmp_path / folder, [Watch(samples=32, max_new_tokens=6, seed=seed)], module, data, max_epochs=1)
        return read_lines(tmp_path / folder / "samples.jsonl")

    first = sample("first", 0)
    (call,) = module.policy.calls
    assert call["attention_mask"][:, -1].all()
    assert call["attention_mask"].sum(1)[:3].tolist() == [2, 5, 1]
    plain = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert plain.items() <= call.items() and call["input_ids"].device.type == "cpu"
    assert sample("again", 0) == first
    assert sample("other", 1) != first


def test_what_does_not_fit_is_refused_before_training(fit, tmp_path, world):
    module, data = world
    data.gold_reward = None
    with pytest.raises(UserError, match=r"The data of task toy has no gold reward; remove GoldReward"):
        fit(tmp_path, [GoldReward()], module, data)
    data.gold_reward, data.predict_dataloader = gold_reward, list
    for callback in (GoldReward, SequenceKL):
        with pytest.raises(UserError, match=f"{callback.__name__} needs prompts, but the data has none; rem"):
            fit(tmp_path, [callback()], module, data, max_epochs=1)
    data.predict_dataloader = lambda: prompt_batches(data)
    module.policy.model.config.max_position_embeddings = 64
    with pytest.raises(UserError, match=r"max_new_tokens is 60, but .* has 64 positions"):
        fit(tmp_path, [GoldReward(max_new_tokens=60)], module, data, max_epochs=1)
    assert not module.policy.calls


def test_along_the_way(tmp_path, tiny_llama):
    """Metrics have each time at its update, and training is the same to the bit."""
    model = tiny_llama(tmp_path / "model", initializer_range=0.2)
    for name, every in (("end", "null"), ("along", 2)):
        words = f"""--data.source EmbeddedWorld --data.source.pairs 40 --data.source.validation_pairs 8
            --data.global_batch_size 8 --model.learning_rate 0.01 --trainer.max_epochs 1
            --trainer.log_every_n_steps 1 --trainer.default_root_dir {tmp_path / name}
            {with_callback("GoldReward", samples=8, max_new_tokens=4, every=every)}"""
        cli.main(short_fit(model, words))
    end, along = (pd.read_csv(tmp_path / name / "metrics.csv") for name in ("end", "along"))
    looks = along.dropna(subset="val/gold_reward")
    kls = along.dropna(subset="val/sequence_kl")
    assert looks["step"].tolist() == kls["step"].tolist() == [1, 3, 4]
    assert kls["val/sequence_kl"].nunique() == 3
    (last,) = end.dropna(subset="val/gold_reward")["val/gold_reward"]
    assert looks["val/gold_reward"].iloc[-1] == last
    first, second = (
        torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for name in ("end", "along")
    )
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_kl_of_sampled_responses(fit, tmp_path, world):
    """KL equals that of the model's whole logits, and its mean that of log(pi / pi_ref)."""
    module, data = world
    policy = module.policy
    policy.leave_reference()
    policy.double()
    seen = []

    class Watch(SequenceKL):
        def _sample(self, trainer, pl_module):
            prompts, responses = super()._sample(trainer, pl_module)
            seen.extend((asked, one) for (*_, asked), one in zip(prompts, responses, strict=True))
            return prompts, responses

    trainer = fit(tmp_path, [Watch(samples=200, max_new_tokens=4, batch_size=64)], module, data, max_epochs=1)
    sums, ratios, surprise = [], [], 0.0
    for prompt, response in seen:
        tokens = torch.tensor([prompt + response])
        with torch.no_grad():
            p = policy.model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            with policy.reference():
                q = policy.model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        sums.append(float((p.exp() * (p - q)).sum()))
        surprise -= float(q.gather(1, torch.tensor(response)[:, None]).sum())
        ratios.append(float((p - q).gather(1, torch.tensor(response)[:, None]).sum()))
    metrics = trainer.callback_metrics
    mean = sum(sums) / 200
    assert float(metrics["val/sequence_kl"]) == pytest.approx(mean, rel=1e-5)
    ratios = torch.tensor(ratios)
    assert abs(float(ratios.mean()) - mean) < 4 * float(ratios.std()) / 200**0.5
    assert float(metrics["val/sequence_kl_stderr"]) < float(ratios.std()) / 200**0.5
    lengths = [len(response) for _, response in seen]
    assert float(metrics["val/response_tokens"]) == pytest.approx(sum(lengths) / 200)
    assert float(metrics["val/response_perplexity"]) == pytest.approx(math.exp(surprise / sum(lengths)))
    responses = [response for _, response in seen]
    assert float(metrics["val/response_repetition"]) == pytest.approx(repeated_bigrams(responses))
    # Some ended by themselves, with a token that counts, and others were cut.
    ended = [response[-1] == data.tokenizer.eos_token_id for _, response in seen]
    assert any(ended) and not all(ended)


def test_few_long_prompts_at_a_time(fit, tmp_path, world, monkeypatch):
    """Memory of a batch is that of its tokens; all are sampled all the same, in their order."""
    module, data = world
    lengths = [int(batch.attention_mask.sum()) for batch in prompt_batches(data)]
    assert lengths == [2, 5, 1]
    monkeypatch.setattr(samples, "SAMPLED_TOKENS", 16)
    fit(tmp_path, [GoldReward(7, batch_size=3, max_new_tokens=3)], module, data, max_epochs=1)
    sampled = [options["attention_mask"].sum(1).tolist() for options in module.policy.calls]
    assert sampled == [[2, 5], [1, 2], [5, 1], [2]]
