import csv
import json
import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from peft import LoraConfig, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pacmr_lightning.callbacks import GoldReward, RunSummary
from pacmr_lightning.errors import UserError

PROMPTS = ["tell me", "tell me of the sea", "sing"]
WORDS = [f"word{i}" for i in range(60)] + ["good", "bad"]


def gold_reward(prompt, response):
    assert prompt in PROMPTS
    return float(response.split().count("good") - response.split().count("bad"))


class Policy(torch.nn.Module):
    """A tiny Llama with LoRA, and what it was asked to generate."""

    def __init__(self, tokenizer):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        self.peft = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules="all-linear"))
        self.calls = []

    def generate(self, **options):
        self.calls.append(options)
        return self.peft.generate(**options)


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
def world(tokenizer, make_module, make_data):
    data = make_data()
    data.tokenizer = tokenizer
    data.gold_reward = gold_reward
    data.source = SimpleNamespace(prompts=PROMPTS)
    module = make_module()
    module.policy = Policy(tokenizer)
    module.policy.requires_grad_(False)
    return module, data


def samples_of(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("summary_first", [True, False])
def test_gold_reward_of_a_run(fit, tmp_path, world, summary_first):
    callbacks = [GoldReward(samples=40, max_new_tokens=6, batch_size=16), RunSummary()]
    loggers = [
        CSVLogger(tmp_path, name="csv", version=""),
        TensorBoardLogger(tmp_path, name="tensorboard", version=""),
    ]
    trainer = fit(tmp_path, callbacks[:: -1 if summary_first else 1], *world, max_epochs=1, logger=loggers)
    samples = samples_of(tmp_path)
    assert [row["prompt"] for row in samples] == [PROMPTS[i % 3] for i in range(40)]
    rewards = [row["gold_reward"] for row in samples]
    assert rewards == [gold_reward(row["prompt"], row["response"]) for row in samples]
    assert any(rewards)
    mean = sum(rewards) / 40
    stderr = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 39 / 40)
    expected = {"val/gold_reward": pytest.approx(mean), "val/gold_reward_stderr": pytest.approx(stderr)}
    metrics = json.loads((tmp_path / "summary.json").read_text())["metrics"]
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name, value in expected.items():
        assert float(trainer.callback_metrics[name]) == value
        assert metrics[name] == value
        assert float(last[name]) == value
        assert events.Scalars(name)[-1].value == pytest.approx(value.expected, rel=1e-5)
    for row in samples:
        assert "<pad>" not in row["response"] and "</s>" not in row["response"]
        assert len(row["response"].split()) <= 6


def test_prompts_go_where_the_strategy_computes(fit, tmp_path, world, monkeypatch):
    """Under ZeRO-3 nobody moves the module, whose own device stays the one it was made on."""
    module, data = world

    class Unmoved(Callback):
        def on_train_end(self, trainer, pl_module):
            monkeypatch.setattr(type(pl_module), "device", torch.device("meta"))

    fit(tmp_path, [Unmoved(), GoldReward(samples=4, max_new_tokens=2)], module, data, max_epochs=1)
    assert {call["input_ids"].device.type for call in module.policy.calls} == {"cpu"}


def test_sampling_is_plain_left_padded_and_seeded(fit, tmp_path, world):
    module, data = world

    def sample(folder, seed):
        module.policy.calls.clear()
        fit(
            tmp_path / folder,
            [GoldReward(samples=32, max_new_tokens=6, seed=seed)],
            module,
            data,
            max_epochs=1,
        )
        return samples_of(tmp_path / folder)

    first = sample("first", 0)
    (call,) = module.policy.calls
    assert call["attention_mask"][:, -1].all()
    assert call["attention_mask"].sum(1)[:3].tolist() == [2, 5, 1]
    plain = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert plain.items() <= call.items()
    assert sample("again", 0) == first
    assert sample("other", 1) != first


def test_the_global_random_state_is_left_alone(fit, tmp_path, world):
    class Watch(GoldReward):
        def on_train_end(self, trainer, pl_module):
            before = torch.get_rng_state()
            super().on_train_end(trainer, pl_module)
            assert torch.equal(before, torch.get_rng_state())
            self.seen = True

    watch = Watch(samples=8, max_new_tokens=3)
    fit(tmp_path, [watch], *world, max_epochs=1)
    assert watch.seen


def test_data_without_a_gold_reward_is_refused_before_training(fit, tmp_path, world):
    module, data = world
    data.gold_reward = None
    with pytest.raises(UserError, match=r"The data of task toy has no gold reward; take GoldReward out"):
        fit(tmp_path, [GoldReward()], module, data)
    data.gold_reward, data.source = gold_reward, SimpleNamespace(prompts=None)
    with pytest.raises(UserError, match="no prompts"):
        fit(tmp_path, [GoldReward()], module, data)


@pytest.mark.parametrize("options", [{"samples": 1}, {"max_new_tokens": 0}, {"batch_size": 0}])
def test_bad_options(options):
    (name,) = options
    with pytest.raises(UserError, match=name):
        GoldReward(**options)
