"""Responses of reference and policy during a real run of a tiny model."""

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pacmr_lightning.callbacks import SampleResponses
from pacmr_lightning.callbacks.to_loggers import verbatim
from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel

from ..conftest import quiet_trainer, read_lines


@pytest.fixture
def fit(tmp_path, tiny_llama):
    tiny_llama(tmp_path / "model")

    def fit(run, callback, steps):
        folder = str(tmp_path / "model")
        torch.manual_seed(1)  # the adapter's A
        preference = PreferenceModule(PolicyModel(folder), max_new_tokens=5, learning_rate=0.05)
        data = PreferenceDataModule(EmbeddedWorld(40, 8), folder, global_batch_size=8)
        logger = TensorBoardLogger(tmp_path / run, name="tensorboard", version="")
        options = {"max_steps": steps, "max_epochs": 10, "limit_val_batches": 0, "logger": logger}
        trainer = quiet_trainer(tmp_path / run, [callback], **options)
        trainer.fit(preference, data)
        return preference

    return fit


def test_rows_and_texts(fit, tmp_path):
    module = fit("run", SampleResponses(prompts=3, every=2), 5)
    rows = read_lines(tmp_path / "run/responses.jsonl")
    assert [row["step"] for row in rows] == [0] * 3 + [2] * 3 + [4] * 3 + [5] * 3
    first, last = rows[:3], rows[-3:]
    assert [row["prompt"] for row in first] == EmbeddedWorld(40, 8).prompts[:3]
    # The policy starts as the reference and leaves it; the reference stays.
    assert all(row["response"] == row["reference"] for row in first)
    assert [row["reference"] for row in first] == [row["reference"] for row in last]
    assert any(row["response"] != row["reference"] for row in last)
    tokens = module.trainer.datamodule.tokenizer(last[0]["prompt"], return_tensors="pt")
    plain = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    plain |= {"max_new_tokens": 5, "do_sample": False}
    answer = module.policy.generate(**plain)[0, tokens["input_ids"].shape[1] :]
    expected = module.trainer.datamodule.tokenizer.decode(answer, skip_special_tokens=True)
    assert last[0]["response"] == expected
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (tag,) = (tag for tag in events.Tags()["tensors"] if tag.startswith("responses/"))
    shown = events.Tensors(tag)
    assert [event.step for event in shown] == [0, 1, 3, 4]
    page = shown[-1].tensor_proto.string_val[0].decode()
    cells = [[row[key] for key in ("id", "prompt", "reference", "response")] for row in last]
    assert page.splitlines()[2:] == [f"| {' | '.join(map(verbatim, row))} |" for row in cells]


def test_training_does_not_feel_it(fit, tmp_path, monkeypatch):
    """Under ZeRO-3 the module's device stays the one it was made on."""
    monkeypatch.setattr(PreferenceModule, "device", torch.device("meta"))
    adapters = []
    for run, every in (("with", 1), ("without", 100)):
        adapters.append(fit(run, SampleResponses(prompts=2, every=every), 4).policy.adapter())
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())
