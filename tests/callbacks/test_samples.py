"""Callbacks that sample from a tiny model: responses to look at, their KL to the reference, gold reward."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pacmr_lightning.callbacks import GoldReward, RunSummary, SampleResponses, SequenceKL, samples
from pacmr_lightning.callbacks.samples import verbatim
from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.generation import repeated_bigrams
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel

from ..conftest import read_lines
from .conftest import train


@pytest.fixture
def fit(tmp_path, tiny_llama):
    model = tiny_llama(tmp_path / "model", initializer_range=0.2)
    return lambda run, *callbacks, **data: train(tmp_path / run, model, callbacks, data=data)


def logged(folder):
    return EventAccumulator(str(folder)).Reload()


def test_rows_and_texts(fit, tmp_path):
    trainer = fit("run", SampleResponses(prompts=3, every=2))
    rows = read_lines(tmp_path / "run/responses.jsonl")
    assert [row["step"] for row in rows] == [0] * 3 + [2] * 3 + [4] * 3 + [5] * 3
    first, last = rows[:3], rows[-3:]
    assert [row["prompt"] for row in first] == EmbeddedWorld(40, 8).prompts[:3]
    # The policy starts as the reference and leaves it; the reference stays.
    assert all(row["response"] == row["reference"] for row in first)
    assert [row["reference"] for row in first] == [row["reference"] for row in last]
    assert any(row["response"] != row["reference"] for row in last)
    tokenizer = trainer.datamodule.tokenizer
    tokens = tokenizer(last[0]["prompt"], return_tensors="pt", return_token_type_ids=False)
    answer = trainer.lightning_module.policy.generate(**tokens, max_new_tokens=5, do_sample=False)
    new = answer[0, tokens["input_ids"].shape[1] :]
    assert last[0]["response"] == tokenizer.decode(new, skip_special_tokens=True)
    (tag,) = (tag for tag in logged(tmp_path / "run").Tags()["tensors"] if tag.startswith("responses/"))
    shown = logged(tmp_path / "run").Tensors(tag)
    assert [event.step for event in shown] == [0, 1, 3, 4]
    page = shown[-1].tensor_proto.string_val[0].decode()
    cells = [[row[key] for key in ("id", "prompt", "reference", "response")] for row in last]
    assert page.splitlines()[2:] == [f"| {' | '.join(map(verbatim, row))} |" for row in cells]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory, tiny_llama):
    """The trainer of a run in float64 that samples at its end, and tokens of the prompts and responses."""
    folder, seen = tmp_path_factory.mktemp("sampled") / "run", []

    class Watch(GoldReward):
        def on_fit_start(self, trainer, pl_module):
            pl_module.policy.double()
            super().on_fit_start(trainer, pl_module)

        def _sample(self, trainer, pl_module):
            prompts, responses = super()._sample(trainer, pl_module)
            seen.extend((asked, one) for (*_, asked), one in zip(prompts, responses, strict=True))
            return prompts, responses

    # With this many ends some responses end by themselves.
    model = tiny_llama(folder.parent / "model", initializer_range=0.2, eos_token_id=[1, *range(40, 90)])
    watch = Watch(200, 64, lambda _, response: len(response), max_new_tokens=4)
    source = EmbeddedWorld(40, 8)
    source.gold_reward = gold_reward
    loggers = [CSVLogger(folder, "", ""), TensorBoardLogger(folder, "", "")]
    data = {"source": source, "predict_prompts": 3}
    return train(folder, model, [RunSummary(), watch], data=data, logger=loggers), seen


def gold_reward(prompt, response):
    return len(response) / len(prompt)


def test_gold_reward_of_a_run(sampled):
    """Metrics of ``on_train_end`` are in the summary, whose callback comes first."""
    trainer, seen = sampled
    folder, tokenizer = Path(trainer.default_root_dir), trainer.datamodule.tokenizer
    rows = read_lines(folder / "samples.jsonl")
    assert len({row["prompt"] for row in rows[:3]}) == 3
    for i, (row, (prompt, response)) in enumerate(zip(rows, seen, strict=True)):
        assert row["prompt"] == rows[i % 3]["prompt"] and prompt == tokenizer(row["prompt"])["input_ids"]
        assert row["response"] == tokenizer.decode(response, skip_special_tokens=True)
        assert row["gold_reward"] == gold_reward(row["prompt"], row["response"])
    metrics = json.loads((folder / "summary.json").read_text())["metrics"]
    last = pd.read_csv(folder / "metrics.csv").iloc[-1]
    rewards = {"gold": [row["gold_reward"] for row in rows], "second": [len(row["response"]) for row in rows]}
    for kind, values in rewards.items():
        values = torch.tensor(values, dtype=torch.double)
        for name, expected in (("reward", values.mean()), ("reward_stderr", values.std() / 200**0.5)):
            tag, value = f"val/{kind}_{name}", pytest.approx(float(expected))
            assert float(trainer.callback_metrics[tag]) == metrics[tag] == value == last[tag]
            shown = logged(folder).Scalars(tag)[-1].value
            assert shown == pytest.approx(value.expected, rel=1e-5) and shown != 0


def test_kl_of_sampled_responses(sampled):
    """KL equals that of the model's whole logits, and its mean that of log(pi / pi_ref)."""
    trainer, seen = sampled
    policy = trainer.lightning_module.policy
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
    responses = [response for _, response in seen]
    lengths = list(map(len, responses))
    assert float(metrics["val/response_tokens"]) == pytest.approx(sum(lengths) / 200)
    assert float(metrics["val/response_perplexity"]) == pytest.approx(math.exp(surprise / sum(lengths)))
    assert float(metrics["val/response_repetition"]) == pytest.approx(repeated_bigrams(responses))
    # Some ended by themselves, with a token that counts, and others were cut.
    ended = [response[-1] in policy.model.generation_config.eos_token_id for response in responses]
    assert any(ended) and not all(ended) and set(lengths) == {1, 2, 3, 4}


def test_training_does_not_feel_it(fit, tmp_path, monkeypatch):
    """Samples depend on their seed alone. Under ZeRO-3 the module's device stays the one it was made on."""
    monkeypatch.setattr(PreferenceModule, "device", torch.device("meta"))
    left, rows, kls = [], [], []
    for run, every, seed in (("end", 100, 0), ("along", 2, 0), ("other", 100, 1)):
        gold = GoldReward(samples=8, max_new_tokens=4, every=every, seed=seed)
        trainer = fit(run, SampleResponses(prompts=2, every=every), gold)
        left.append([*trainer.lightning_module.policy.adapter().values(), torch.get_rng_state()])
        rows.append(read_lines(tmp_path / run / "samples.jsonl"))
        kls.append({event.step: event.value for event in logged(tmp_path / run).Scalars("val/sequence_kl")})
        assert [event.step for event in logged(tmp_path / run).Scalars("val/gold_reward")] == list(kls[-1])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*left, strict=True))
    assert rows[0] == rows[1] != rows[2]
    assert list(kls[1]) == [1, 3, 4] and len(set(kls[1].values())) == 3
    assert kls[0] == {4: kls[1][4]}


def test_what_does_not_fit_is_refused_before_training(fit, tmp_path, monkeypatch):
    first = SampleResponses(prompts=1)  # which writes before the first update
    with pytest.raises(UserError, match=r"max_new_tokens is 9000, but .* has 2048 .*; lower max_new_t"):
        fit("run", first, GoldReward(max_new_tokens=9000))
    monkeypatch.setattr(PreferenceDataModule, "predict_dataloader", list)
    for callback in (GoldReward, SequenceKL):
        with pytest.raises(UserError, match=f"{callback.__name__} needs prompts, but the data has none; rem"):
            fit("run", first, callback(samples=8))
    source = EmbeddedWorld(40, 8)
    source.gold_reward = None
    with pytest.raises(UserError, match="The data of task toy has no gold reward; remove GoldReward"):
        fit("run", first, GoldReward(), source=source, task="toy")
    assert not (tmp_path / "run/responses.jsonl").exists()


def test_few_long_prompts_at_a_time(fit, monkeypatch):
    """Memory of a batch is that of its tokens; all are sampled all the same, in their order, and plainly."""
    calls, generate = [], PolicyModel.generate

    def noted(policy, **options):
        if options["do_sample"]:
            calls.append(options)
        return generate(policy, **options)

    monkeypatch.setattr(PolicyModel, "generate", noted)
    monkeypatch.setattr(samples, "SAMPLED_TOKENS", 66)  # two prompts of up to 30 tokens
    fit("run", GoldReward(7, batch_size=3, max_new_tokens=3), predict_prompts=3)
    assert [call["attention_mask"].sum(1).tolist() for call in calls] == [[30, 24], [25, 30], [24, 25], [30]]
    plain = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert all(plain.items() <= call.items() for call in calls)
