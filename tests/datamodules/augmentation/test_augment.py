"""``pacmr augment`` from rows to Parquet and report, with tiny models that translate, and with a kill -9."""

import json
import random
import re
from collections import Counter
from functools import partial
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pacmr_lightning.command_line.parser import run_tool
from pacmr_lightning.commands.augment import augment
from pacmr_lightning.datamodules import PreferenceDataModule
from pacmr_lightning.datamodules.augmentation.augmented_prompts import Augmentations, read_augmentations
from pacmr_lightning.datamodules.augmentation.rewriter import UNCHANGED, Rules
from pacmr_lightning.datamodules.augmentation.translator import BackTranslation
from pacmr_lightning.datamodules.rewording import VERSION, reword
from pacmr_lightning.datamodules.sources import EmbeddedWorld, Files
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.answer_store import AnswerStore

from ...conftest import stored
from .marian import back_and_forth, random_words, sentence, translators  # noqa: F401
from .test_structure import frame

main = partial(run_tool, "augment", augment)


@pytest.fixture(scope="module")
def rewriter(translators):  # noqa: F811
    return BackTranslation(*translators, num_beams=1)


def rows_of(path):
    return pq.read_table(path).to_pylist()


def test_every_prompt_of_the_embedded_world(rewriter, tmp_path, capsys):
    source, output = EmbeddedWorld(300, 1), tmp_path / "new" / "world.parquet"
    augment(source, str(output), rewriter)
    training = source.load("train")
    pairs = Counter(training["prompt"])
    category = dict(zip(training["prompt"], training["category"], strict=True))
    found = rows_of(output)
    assert [row["prompt"] for row in found] == list(dict.fromkeys(training["prompt"]))
    for row in found:
        assert row["augmented_prompt"] == back_and_forth(row["prompt"])
        assert row["prompt_hash"] == blake2b(row["prompt"].encode(), digest_size=8).hexdigest()
        assert (row["pairs"], row["category"]) == (pairs[row["prompt"]], category[row["prompt"]])
        assert row["method"] == "back-translation"
        assert json.loads(row["settings"]) == rewriter.settings
    assert read_augmentations(output).prompts == {p: back_and_forth(p) for p in pairs}

    printed, report = capsys.readouterr().out, (tmp_path / "new" / "world-report.md").read_text()
    numbers = report[: report.index("## Examples")]
    assert numbers.strip() in printed and "## Examples" not in printed
    same = sum(p == back_and_forth(p) for p in pairs)
    assert f"of {len(pairs)} of {len(pairs)} distinct training prompts" in report and same > 0
    ratios = np.quantile([len(back_and_forth(p)) / len(p) for p in pairs], (0.5, 0.05, 0.95))
    assert "{:.2f} ({:.2f} to {:.2f})\n".format(*ratios) in numbers
    assert "which 300 pairs have" in numbers and f"left as they were: {same} (" in numbers
    assert f"in no meta-batch: {same} ({same / len(pairs):.1%})" in numbers
    assert len(re.findall("^### ", report, re.M)) == 6


STRANGE = (
    "\n\nHuman: Did he — “really” — yell? I was lost... and 3 friends\n\nAssistant: Human:  The sea,\n\n"
    "- is my best book\n- 22\n\nHuman: https://a.b/c\n\nAssistant:",
    "SUBREDDIT: r/sea\n\nTITLE: My friend [26M] is lost\n\nPOST: I was lost.  What is the best book?\n\n"
    "* a house, I was in the house, my friend was in the city, the best city in the storm \n\nEnd\n\nTL;DR:",
    "SUBREDDIT: r/sea\nTITLE: The sea\nPOST: Is it calm?\n TL;DR: ",
    "  What is the sea?\n\n1. a mood\n2) a book \n",
    "book" * 20,
)


def test_frames_survive_gibberish(rewriter, write_rows, tmp_path):
    """Each prompt has one row, with the category of its first pair; pairs that cannot be used have none."""
    rows = [{"prompt": prompt, "chosen": " a", "rejected": " b"} for prompt in (*STRANGE, STRANGE[0], " ")]
    rows[0]["category"], rows[5]["category"] = "first", "second"
    unusable = {"chosen": "\n\nHuman: x\n\nAssistant: a", "rejected": "\n\nHuman: y\n\nAssistant: b"}
    augment(Files(write_rows([*rows, unusable])), str(tmp_path / "out.parquet"), rewriter)
    first, *others = rows_of(tmp_path / "out.parquet")
    assert (first["category"], first["pairs"]) == ("first", 2) and {row["pairs"] for row in others} == {1}
    found = read_augmentations(tmp_path / "out.parquet").prompts
    assert list(found) == list(STRANGE)
    assert found.pop(STRANGE[4]) == STRANGE[4]
    assert "\n  - longer than the model reads: 1 (" in (tmp_path / "out-report.md").read_text()
    with pytest.raises(UserError, match=r"No training pair of rows\.jsonl has a usable prompt"):
        augment(Files(write_rows([unusable])), "out.parquet", Rules())
    for prompt, augmented in found.items():
        assert augmented != prompt and frame(augmented) == frame(prompt)
    new = found[STRANGE[1]]
    assert re.fullmatch(r"SUBREDDIT: r/sea\n\nTITLE: .+\n\nPOST: .+\n\n\* .+ \n\n.+\n\nTL;DR:", new)
    assert found[STRANGE[3]].startswith("  What is the ocean?\n\n1. a mood\n2) a book \n")


def test_conversations(rewriter, write_rows, tmp_path):
    prompt = [
        {"role": "system", "content": "the sea"},
        {"role": "user", "content": "the sea\n\nin a calm mood"},
        {"role": "assistant", "content": "the sea"},
        {"role": "user", "content": "Which novel?"},
    ]
    sides = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    augment(Files(write_rows([{"prompt": prompt, **sides}])), str(tmp_path / "out.parquet"), rewriter)
    [(before, after)] = read_augmentations(tmp_path / "out.parquet").prompts.items()
    assert json.loads(before) == prompt
    contents = [message["content"] for message in json.loads(after)]
    assert contents == ["the sea", "the ocean\n\nin a calm mood", "the sea", "What book?"]
    assert [message["role"] for message in json.loads(after)] == [m["role"] for m in prompt]


def test_n_counts_the_pairs_that_vnet_learns_from(write_rows, tiny_tokenizer_folder, tmp_path):
    """Some of TL;DR's pairs are too long, and rules change nothing of some prompts.

    Labels of the chosen pairs are flipped as often as others'.
    """
    rows, n = [], 876
    for i in range(1500):
        number, topic = i // 6, "r/" + "abc"[(i // 6) % 3]
        prompt = f"SUBREDDIT: {topic}\n\nTITLE: {number}\n\nPOST: I do not know.\n\nTL;DR:"
        prompt = prompt if number % 8 else f"sea {number}"
        sides = {"chosen": f" {i}" + " book" * (60 * (i % 50 == 0)), "rejected": f" rain {i}"}
        rows.append({"id": f"p{i}", "prompt": prompt, "category": topic} | sides)
    path, output = write_rows(rows), str(tmp_path / "out.parquet")
    words = ["--source", "Files", "--source.train", path, "--source.validation", path, "--output", output]
    words += ["--rewriter", "Rules", "--n", str(n), "--tokenizer", tiny_tokenizer_folder]
    main([*words, "--max_length", "100"])
    found = read_augmentations(output).prompts.items()
    assert all(augmented == reword(prompt) for prompt, augmented in found)
    assert json.loads(rows_of(output)[0]["settings"]) == {"version": VERSION}
    options = {"max_length": 100, "meta_every": 10, "augmentations": output, "noise_rate": 0.3}
    data = PreferenceDataModule(Files(path, path), tiny_tokenizer_folder, **options)
    data.setup("fit")
    pairs = data.train_pairs
    assert data.counts["train"]["too long"] > 0 and len(pairs) > n
    chosen = pairs.with_augmented_prompt
    assert len(chosen) == n == sum(row["pairs"] for row in rows_of(output))
    assert np.mean([pairs.swapped[i] for i in chosen]) == pytest.approx(np.mean(pairs.swapped), abs=0.03)
    prompts = Counter(row["prompt"] for row in rows)
    assert any(row["pairs"] < prompts[row["prompt"]] for row in rows_of(output))
    categories = Counter(pairs.rows[i]["category"] for i in chosen)
    assert max(categories.values()) - min(categories.values()) <= 0.1 * n


def test_a_sample_that_cannot_be_drawn(write_rows, tiny_tokenizer_folder, tmp_path):
    source = Files(write_rows([{"prompt": f"sea {i}", "chosen": " a", "rejected": " b"} for i in range(30)]))
    output = str(tmp_path / "out.parquet")
    for given in ((5,), (None, tiny_tokenizer_folder), (None, None, 512)):
        with pytest.raises(UserError, match=r"n is (5|null), tokenizer .* a sample takes the first two"):
            augment(source, output, Rules(), *given)
    with pytest.raises(UserError, match=r"n is 5, but 0 of \d+ training pairs have an augmented prompt"):
        augment(source, output, Rules(), 5, tiny_tokenizer_folder)


def test_interrupted_and_started_again(translators, write_rows, tmp_path, monkeypatch):  # noqa: F811
    rng = random.Random(8)
    prompts = [" ".join(sentence([*random_words(rng), "."]) for _ in range(2)) for _ in range(12)]
    source = Files(write_rows([{"prompt": prompt, "chosen": "a", "rejected": "b"} for prompt in prompts]))
    output, whole = tmp_path / "output.parquet", tmp_path / "whole.parquet"
    answers, put, written = tmp_path / "output.parquet.answers.sqlite", AnswerStore.put, []
    rewriter = BackTranslation(*translators, batch_size=4, num_beams=1)

    def keep(store, values):
        if len(written) == 12:
            raise KeyboardInterrupt
        put(store, {key: value | {"kept": None} for key, value in values.items()})  # as before UNCHANGED
        written.extend(values)

    monkeypatch.setattr(AnswerStore, "put", keep)
    with pytest.raises(KeyboardInterrupt):
        augment(source, str(output), rewriter)
    assert stored(answers) == 12 and not output.exists()
    written.append("the first of the second run")
    augment(source, str(output), rewriter)
    assert len(written) == 1 + stored(answers) > 20, "nothing was translated again"
    augment(source, str(whole), rewriter)
    assert pq.read_table(whole).equals(pq.read_table(output), check_metadata=True)
    reports = [(tmp_path / f"{name}-report.md").read_text() for name in ("whole", "output")]
    assert reports[0] == reports[1] and f"- {UNCHANGED}: " in reports[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "out.csv"], "output is out.csv, but it must be a file ending in .parquet"),
        (["--rewriter.forward", "./no"], "forward: The model folder ./no does not exist"),
        (["--rewriter.forward", "."], "forward is '.', which AutoConfig cannot load"),
        (["--rewriter.num_beams", "0"], "num_beams is 0"),
        (["--rewriter.batch_size", "0"], "batch_size is 0"),
        (["--rewriter", "Rules", "--tokenizer", "x", "--n", "-3"], "n is -3, but it must be at least 1"),
    ],
)
def test_wrong_input_leaves_nothing(arguments, message, inside):
    with pytest.raises(Exception) as caught:
        main(["--source", "EmbeddedWorld", "--source.pairs", "9", "--output", "o.parquet", *arguments])
    assert message in str(caught.value) or message in str(caught.value.__cause__)
    assert list(inside.iterdir()) == []


def test_files_that_hold_no_augmentations(tmp_path):
    nothing = pa.array([], pa.string())
    for columns, message in (
        ({"prompt": ["a"], "text": ["b"]}, "some.parquet holds no augmented prompts; name a file that pacmr"),
        ({"prompt": nothing, "augmented_prompt": nothing}, "holds no augmented prompts"),
        ({"prompt": ["a"], "augmented_prompt": [[1]]}, r"row 1: 'augmented_prompt' is \[1\], but it mus"),
    ):
        pq.write_table(pa.table(columns), tmp_path / "some.parquet")
        with pytest.raises(UserError, match=message):
            read_augmentations(tmp_path / "some.parquet")
    table = pa.table({"augmented_prompt": ["b", None], "prompt": ["a", "c"], "more": [1, 2]})
    pq.write_table(table, tmp_path / "some.parquet")
    assert read_augmentations(tmp_path / "some.parquet") == Augmentations({"a": "b"})
