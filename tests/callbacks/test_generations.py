"""``pacmr predict`` with a real tiny model: its file, after kill -9, in two processes, from the store."""

import json
import signal
import sqlite3
import subprocess
import sys

import pytest
import torch

from pacmr_lightning.callbacks import GenerationWriter
from pacmr_lightning.datamodules import EmbeddedWorld, Files, PreferenceDataModule
from pacmr_lightning.datamodules.tokenizer import load_tokenizer
from pacmr_lightning.errors import UserError
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel

from ..conftest import TURNS, quiet_trainer, read_lines, short_fit, stored

FIELDS = ["id", "prompt", "response", "finish_reason", "prompt_tokens", "response_tokens"]


@pytest.fixture
def model(tmp_path, tiny_llama):
    ends = [1, *range(40, 90)]  # so that some responses end early
    keys = {"max_position_embeddings": 256, "initializer_range": 0.2, "eos_token_id": ends}
    return tiny_llama(tmp_path / "model", **keys)


@pytest.fixture
def predict(tmp_path, model):
    """Predict in this process; ``moved`` is the scale of the adapter's weights."""

    def run(source=None, moved=0.0, folder="run", new=5, data=None, trainer=None, **writer):
        torch.manual_seed(1)
        module = PreferenceModule(PolicyModel(model), max_new_tokens=new)
        module.configure_model()
        with torch.no_grad():
            for parameter in module.policy.adapter().values():
                parameter.add_(moved)
        options = {"validation_batch_size": 4, "predict_prompts": 10, **(data or {})}
        trainer = quiet_trainer(tmp_path / folder, [GenerationWriter(**writer)], **(trainer or {}))
        data = PreferenceDataModule(source or EmbeddedWorld(8, 8), model, **options)
        greedy = writer.get("temperature") and str(quiet_trainer(None).predict(module, data))
        trainer.predict(module, data)
        assert not greedy or greedy == str(quiet_trainer(None).predict(module, data))
        return read_lines(writer.get("output", tmp_path / folder / "generations.jsonl"))

    return run


def test_rows_in_the_order_of_the_data(predict, model, tmp_path, caplog):
    rows = predict(new=8)
    prompts = EmbeddedWorld(8, 8).prompts
    assert [list(row) for row in rows] == [FIELDS] * 10
    places = [prompts.index(row["prompt"]) for row in rows]
    lengths = [row["prompt_tokens"] for row in rows]
    assert places == sorted(places) and lengths != sorted(lengths, reverse=True)
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    cut = sum(row["finish_reason"] == "length" for row in rows)
    assert all((row["response_tokens"] < 8) <= (row["finish_reason"] == "stop") for row in rows)
    assert f"10 of {len(prompts)} prompts, drawn with seed 42." in caplog.text
    assert "these are the reference's responses" in caplog.text
    said = f"10 responses are in {tmp_path}/run/generations.jsonl, {cut} of them truncated at 8 tokens."
    assert said in caplog.text
    before = {file: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    assert predict(new=8, moved=0.3, trainer={"fast_dev_run": True}) == rows
    for batches in (1, 2):
        with pytest.raises(UserError, match=f"would leave {4 * batches} of 10 responses in"):
            predict(new=8, trainer={"limit_predict_batches": batches})
    assert before == {file: file.read_bytes() for file in (tmp_path / "run").iterdir()}

    # Another policy answers the same prompts under the same ids.
    caplog.clear()
    other = predict(new=8, moved=0.3, folder="other")
    assert [(r["id"], r["prompt"]) for r in other] == [(r["id"], r["prompt"]) for r in rows]
    assert [r["response"] for r in other] != [r["response"] for r in rows]
    assert "reference's responses" not in caplog.text


def test_what_was_answered_is_not_generated_again(predict, tmp_path, caplog):
    rows = predict()
    store = sqlite3.connect(tmp_path / "run" / "generations.jsonl.answers.sqlite")
    with store:
        answers = [json.loads(value) for (value,) in store.execute("SELECT value FROM answers")]
        assert len(answers) == 10
        store.execute('UPDATE answers SET value = replace(value, \'"text": "\', \'"text": "stored \')')
    again = predict()
    assert [row["response"] for row in again] == [f"stored {row['response']}" for row in rows]
    assert "10 came from an earlier run." in caplog.text
    # A batch of which one answer is missing is generated whole, as it was.
    with store:
        store.execute("DELETE FROM answers WHERE rowid = 1")
    mixed = predict()
    assert sum(row in rows for row in mixed) == 4 and sum(row in again for row in mixed) == 6
    # Other weights, lengths and samples have answers of their own.
    for options in ({"moved": 1e-3}, {"new": 4}, {"temperature": 1.0}):
        assert not any(row["response"].startswith("stored") for row in predict(**options))


def test_chat_messages_stay_messages(predict, model, write_rows, tmp_path):
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(model)
    question = [{"role": "user", "content": "What is the sea?"}]
    sides = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    rows = [
        {"id": "chat", "prompt": question, **sides},
        {"id": "text", "prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": " a", "rejected": " b"},
    ]
    path = write_rows(rows)
    output = tmp_path / "new" / "answers.jsonl"
    with pytest.raises(UserError, match=r"generation.output is .*, where the source's own rows are"):
        predict(Files(path, path), output=str(path))
    chat, text = predict(Files(path, path), output=str(output))
    assert {path.name for path in output.parent.iterdir()} == {output.name, f"{output.name}.answers.sqlite"}
    assert not (tmp_path / "run").exists()
    assert (chat["id"], chat["prompt"]) == ("chat", question)
    assert (text["id"], text["prompt"]) == ("text", "\n\nHuman: Hi\n\nAssistant:")
    rendered = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert chat["prompt_tokens"] == len(tokenizer(rendered, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": {"predict_max_length": 3}}, "None of the 10 prompts to answer has 1 to 3 tokens"),
        ({"new": 250}, r"The prompt \w+ has \d+ tokens and max_new_tokens is 250"),
        ({"output": "a.txt"}, r"output is a.txt, but it must be a file ending in .jsonl"),
        ({"output": "model/config.json/a.jsonl"}, r"config.json is a file and no folder"),
        ({"top_p": 2.0}, "top_p is 2"),
        ({"top_p": 0.5}, r"top_p is 0\.5, but greedy decoding does not sample"),
        ({"temperature": -1.0}, "temperature is -1"),
    ],
)
def test_bad_input_leaves_nothing(options, message, predict, inside):
    with pytest.raises(UserError, match=message):
        predict(**options)
    assert [path.name for path in inside.iterdir()] == ["model"]


@pytest.fixture
def command(tmp_path, model):
    """Return the command line of ``pacmr predict`` with the reference on the synthetic benchmark."""
    words = """--data.source EmbeddedWorld --data.validation_batch_size 4 --data.global_batch_size 8
        --model.max_new_tokens 48 --trainer.devices 1"""

    def make(folder, *options):
        base = [sys.executable, "-m", "pacmr_lightning", "predict", *short_fit(model, words)[1:]]
        return [*base, "--trainer.default_root_dir", str(tmp_path / folder), *options]

    return make


STOPPED_BEFORE_THE_SECOND_BATCH = """
import os, signal, sys
from pacmr_lightning.cli import main
from pacmr_lightning.evaluation.answer_store import AnswerStore
put = AnswerStore.put
def once(store, values):
    put(store, values)
    AnswerStore.put = wait
def wait(store, values):
    os.write(1, b"waits\\n")
    signal.pause()
AnswerStore.put = once
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_killed_it_goes_on(command, tmp_path, forked):
    """After kill -9 the same command writes what an uninterrupted one writes."""
    whole = subprocess.run(command("whole"), capture_output=True, text=True, timeout=1200)
    assert whole.returncode == 0, whole.stderr
    process = forked(STOPPED_BEFORE_THE_SECOND_BATCH, *command("run")[3:])
    assert any(line == "waits\n" for line in process.stdout)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    left = stored(tmp_path / "run" / "generations.jsonl.answers.sqlite")
    expected = (tmp_path / "whole" / "generations.jsonl").read_bytes()
    assert 0 < left < len(expected.splitlines()) and not (tmp_path / "run" / "generations.jsonl").exists()
    again = subprocess.run(command("run"), capture_output=True, text=True, timeout=1200)
    assert again.returncode == 0 and f"; {left} came from an earlier run." in again.stderr
    assert (tmp_path / "run" / "generations.jsonl").read_bytes() == expected


@pytest.mark.slow
def test_two_processes_answer_every_prompt_once(command, tmp_path):
    files = []
    for folder, devices in (("one", "1"), ("two", "2")):
        options = f"--trainer.devices {devices} --data.predict_prompts 15 --model.max_new_tokens 6".split()
        options += ["--trainer.strategy", "auto" if devices == "1" else "ddp"]
        done = subprocess.run(command(folder, *options), capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
        files.append((tmp_path / folder / "generations.jsonl").read_bytes())
        assert stored(tmp_path / folder / "generations.jsonl.answers.sqlite") == 15
    assert files[0] == files[1] and len(files[0].splitlines()) == 15
    options[3] = "1"
    none = subprocess.run(command("none", *options), capture_output=True, text=True, timeout=1200)
    assert none.returncode == 2 and "Traceback" not in none.stderr
    sentence = "There are 1 prompts to answer, but each of 2 processes needs one; use fewer"
    assert sentence in none.stderr and not (tmp_path / "none").exists()
