"""``pacmr inspect``: its numbers are those of a run, of other tokenizations and of plain counting."""

import json
import re
from collections import Counter, defaultdict
from functools import partial

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pacmr_lightning.batch import Segment
from pacmr_lightning.command_line.parser import run_tool
from pacmr_lightning.commands import inspect as inspect_command
from pacmr_lightning.datamodules import EmbeddedWorld, Files, PreferenceDataModule
from pacmr_lightning.datamodules.inspection import SHOWN, count_repeats, inspect_pairs, show_rows, token_text
from pacmr_lightning.datamodules.tokenization import tokenize_pairs
from pacmr_lightning.errors import UserError

main = partial(run_tool, "inspect", inspect_command.inspect)

HH = "\n\nHuman: {}\n\nAssistant:"
USER = {"role": "user", "content": "What is the sea?"}


def mixed_rows(seed):
    random = np.random.default_rng(seed)
    rows = [
        {"prompt": "x", "chosen": " a", "rejected": " a"},
        {"prompt": "x", "chosen": " ", "rejected": " b"},
        {"chosen": "\n\nHuman: yes", "rejected": "\n\nHuman: no"},
        {"chosen": HH.format("a") + "b", "rejected": HH.format("c") + "d"},
    ]
    for i in range(60):
        one, other = (" rain" * int(n) for n in random.integers(1, 12, 2))
        prompt = "What is the best of all books? " * int(random.integers(1, 6)) + str(i % 20)
        rows.append({"prompt": prompt, "chosen": one, "rejected": other + "!", "category": f"c{i % 3}"})
        rows.append({"chosen": HH.format(prompt) + one, "rejected": HH.format(prompt) + other + "."})
    return rows


@pytest.fixture
def sources(write_rows):
    chats = [
        {"chosen": [USER, {"role": "assistant", "content": f"a{i % 7}"}]}
        | {"rejected": [USER, {"role": "assistant", "content": "b" * i}]}
        for i in range(40)
    ]
    return {
        "files": Files(write_rows(mixed_rows(0)), write_rows(mixed_rows(1), "validation.jsonl")),
        "one file": Files(write_rows(mixed_rows(2), "one.jsonl"), validation_fraction=0.3),
        "chat": Files(write_rows(chats, "chats.jsonl"), write_rows(chats[:9], "chats-validation.jsonl")),
        "world": EmbeddedWorld(pairs=300, validation_pairs=50),
    }


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("kind", ["files", "one file", "chat", "world"])
@pytest.mark.parametrize("max_length", [75, 500])
def test_counts_are_those_of_a_run(sources, chat_tokenizer, tmp_path, kind, max_length):
    chat_tokenizer.save_pretrained(tmp_path / "tokenizer")
    run = PreferenceDataModule(sources[kind], str(tmp_path / "tokenizer"), max_length=max_length)
    run.setup("fit")
    report, pairs = inspect_pairs(sources[kind], chat_tokenizer, max_length)
    for split, numbers in report.items():
        assert numbers["counts"] == {k: n for k, n in run.counts[split].items() if k != "flipped"}
    assert pairs.rows[:] == run.train_pairs.rows[:]


@pytest.mark.parametrize("kind", ["files", "chat"])
def test_lengths_are_those_of_the_kept_pairs(sources, chat_tokenizer, kind):
    report, _ = inspect_pairs(sources[kind], chat_tokenizer, 60)
    assert report["train"]["counts"]["too long"] > 0
    for split, numbers in report.items():
        rows, lengths = sources[kind].load(split), numbers["lengths"]
        everything, _ = tokenize_pairs(rows, chat_tokenizer, 10**6)
        prompt, chosen, rejected = (
            np.array([len(ids) for ids in everything[f"{name}_ids"]])
            for name in ("prompt", "chosen", "rejected")
        )
        total = prompt + np.maximum(chosen, rejected)
        short = total <= 60
        assert lengths["longest"] == total[short].max()
        for name, counts in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
            assert lengths[name] == pytest.approx(counts[short].mean())
        assert lengths["chosen_longer"] == (chosen > rejected)[short].mean()
        assert lengths["rejected_longer"] == (chosen < rejected)[short].mean()


def counted(table):
    """The same as ``repeats``, pair by pair."""
    rows = list(table.itertuples(index=False, name=None))
    labels = defaultdict(list)
    for prompt, chosen, rejected in rows:
        labels[prompt, frozenset((chosen, rejected))].append(chosen)
    several = {key: chosen for key, chosen in labels.items() if len(chosen) > 1}
    contradicting = [chosen for chosen in several.values() if len(set(chosen)) > 1]
    return {
        "copies": len(rows) - len(set(rows)),
        "comparisons": len(several),
        "labels": sum(map(len, several.values())),
        "contradicting_comparisons": len(contradicting),
        "least_wrong": sum(min(Counter(chosen).values()) for chosen in contradicting),
    }


@pytest.mark.parametrize("size", [1, 5, 60, 400])
def test_repeats_against_counting_pair_by_pair(size):
    for seed in range(5):
        random = np.random.default_rng(seed)
        numbers = random.integers(0, 2**64, 12, dtype="uint64")
        chosen = random.integers(0, 5, size)
        rejected = (chosen + random.integers(1, 5, size)) % 5
        prompts = numbers[random.integers(5, 12, size)]
        table = pd.DataFrame({"prompt": prompts, "chosen": numbers[chosen], "rejected": numbers[rejected]})
        assert count_repeats(table) == counted(table)


def test_prompts_and_their_overlap(write_rows, tokenizer):
    def rows(*prompts):
        return [{"prompt": prompt, "chosen": f" {i}", "rejected": " no!"} for i, prompt in enumerate(prompts)]

    source = Files(
        write_rows(rows("sea", "sea", "rain", "The  best\n", "book", "dropped")),
        write_rows(rows("SEA ", "rain", "rain", "the best", "mood"), "validation.jsonl"),
    )
    report, _ = inspect_pairs(source, tokenizer, 500)
    assert (report["train"]["prompts"], report["train"]["in_other_split"]) == (5, 1)
    assert (report["validation"]["prompts"], report["validation"]["in_other_split"]) == (4, 2)


def plain(renderable):
    return getattr(renderable, "renderable", renderable).plain


def test_rows_are_shown_as_the_batch_has_them(write_rows, pair_rows, tokenizer):
    """The shortest, the median and the longest pair, token by token."""
    texts = pair_rows(9)
    texts[2] = {"prompt": "Sea", "chosen": " calm", "rejected": " I\tdo"}
    texts[4]["prompt"] = "What is the best of all books? " * 80
    path = write_rows(texts)
    _, pairs = inspect_pairs(Files(path, path), tokenizer, 5000)
    parts = ("prompt_ids", "chosen_ids", "rejected_ids")
    lengths = [sum(len(row[part]) for part in parts) for row in pairs.rows]
    shown = [plain(part) for part in show_rows(pairs, tokenizer)]
    rows = [2, sorted(range(9), key=lengths.__getitem__)[4], 4]
    batch = pairs.batch(rows)
    for place, row in enumerate(rows):
        heading, prompt, *responses = shown[4 * place : 4 * place + 4]
        counts = {kind: int((batch.segment_ids[place] == kind).sum()) for kind in Segment}
        assert pairs.rows[row]["id"] in heading
        assert (
            f"{counts[Segment.PROMPT]} prompt" in heading and f"{counts[Segment.PAD]} of padding" in heading
        )
        for text, kind in zip(responses, (Segment.CHOSEN, Segment.REJECTED), strict=True):
            pieces, name = re.findall("‹(.*?)›", text), kind.name.lower()
            assert len(pieces) == counts[kind] and f"{counts[kind]} {name}" in heading
            written = "".join(pieces).replace("▁", " ").replace("\\t", "\t")
            assert written == texts[row][name] + "<eos>"
        tokens = prompt.removeprefix("prompt: ").replace(" ", "").replace("▁", " ")
        start, *end = re.split(rf"\[…{counts[Segment.PROMPT] - 2 * SHOWN}tokensareleftouthere…\]", tokens)
        whole = "<bos>" + texts[row]["prompt"]
        assert start == whole if row != 4 else whole.startswith(start) and whole.endswith(*end)


def test_tokens_of_tokenizers_that_drop_blanks_when_decoding():
    """As SentencePiece does: decoded alone, a word would lose the blank before it."""
    words = ["<unk>", "▁the", "▁sea", "s", "▁"]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert tokenizer.decode([2]) == "sea"
    assert token_text([1, 2, 3, 2], tokenizer, counts=True) == "‹the› ‹▁sea› ‹s› ‹▁sea›"


def test_tokens_that_a_terminal_would_obey_or_cannot_show(tokenizer):
    ids = tokenizer("\x1b[31m\n\u2028é", add_special_tokens=False)["input_ids"]
    text = token_text(ids, tokenizer, counts=False)
    assert text.isprintable() and text.startswith("\\x1b [ 3 1 ")
    assert "⏎" in text and text.endswith(" ".join(tokenizer.convert_ids_to_tokens(ids[-2:])))


@pytest.fixture
def inspect(write_rows, tokenizer, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def run(train, validation, *options, template=None):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        paths = write_rows(train), write_rows(validation, "validation.jsonl")
        command = ["--source", "Files", "--source.train", paths[0], "--source.validation", paths[1]]
        output = tmp_path / "new" / "numbers.json"
        main([*command, "--tokenizer", str(tmp_path / "tokenizer"), "--output", str(output), *options])
        return json.loads(output.read_text()), capsys.readouterr().out

    return run


def test_the_command_counts(inspect, pair_rows):
    def longer(rows):
        return [row | {"chosen": row["chosen"] * 2} for row in rows]

    train = longer(pair_rows(40))
    train += [row | {"prompt": row["prompt"] * 20} for row in train[:4]]
    train += train[:2] + [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in train[:3]]
    train += [{"prompt": "Name it", "chosen": f" {i}", "rejected": f" {i}"} for i in range(4)]
    train += [{"prompt": f"Name [red]{i}[/red]", "chosen": " a", "rejected": " b"} for i in range(12)]
    numbers, printed = inspect(train, longer(pair_rows(3)), "--max_length", "150")
    found = numbers["splits"]["train"]
    kept = {"rows": 65, "kept": 57, "no augmented prompt": 12}
    assert found["counts"] == kept | {"too long": 4, "equal responses": 4}
    repeats = {"copies": 2, "comparisons": 3, "labels": 8}
    assert found["repeats"] == repeats | {"contradicting_comparisons": 3, "least_wrong": 3}
    for label, value in (
        ("rows", "65"),
        ("  dropped, too long", "4 (6.2%)"),
        ("  dropped, equal responses", "4 (6.2%)"),
        ("no augmented prompt", "12 (21.1%)"),
        ("copies of an earlier pair", "2 (3.5%)"),
        ("  whose labels contradict each other", "3 (100.0%)"),
        ("  labels that must be wrong", "3 (37.5%)"),
        ("prompt also in the other split", "8 (14.0%)"),
    ):
        assert re.search(rf"^ {re.escape(label)} +{re.escape(value)} ", printed, re.MULTILINE), label
    assert found["warnings"] == [] and "\n!" not in printed and "‹<eos>›" in printed
    assert 20 < found["lengths"]["longest"] < 150


def test_what_is_odd_about_tokens_is_said(inspect, pair_rows):
    rows = [row | {"id": f"r{i}"} for i, row in enumerate(pair_rows(40))]
    numbers, printed = inspect([row | {"prompt": "<bos><bos>" + row["prompt"]} for row in rows], rows[:3])
    assert numbers["splits"]["train"]["counts"]["two BOS"] == 40
    sentence = "train: 40 of 40 prompts begin with BOS (<bos>) twice (r0 for one); take it out of the texts."
    assert numbers["splits"]["train"]["warnings"] == [sentence] and f"! {sentence[:38]}" in printed


def test_special_tokens_in_texts_are_said(inspect):
    """In messages, and in responses before their end; a prompt that is a text may have been rendered."""
    rows = [
        {"prompt": f"<bos>What is {i}?<eos>", "chosen": " calm<eos>", "rejected": " rain"} for i in range(4)
    ]
    numbers, _ = inspect(rows, rows[:1])
    assert "special tokens" not in numbers["splits"]["train"]["counts"]
    rows[2] |= {"id": "odd", "rejected": " rain <eos> and more"}
    numbers, _ = inspect(rows, rows[:1])
    sentence = (
        "train: 1 of 4 rows have a special token, such as <eos>, inside of a text (odd for one), which is"
    )
    assert [said[: len(sentence)] for said in numbers["splits"]["train"]["warnings"]] == [sentence]
    chats = [[USER], [USER | {"content": "sea<eos>"}]]
    sides = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    rows = [{"prompt": chat, **sides} for chat in chats]
    numbers, _ = inspect(rows, rows[:1], template=template)
    assert numbers["splits"]["train"]["counts"]["special tokens"] == 1


def test_what_the_template_changes_is_said(inspect):
    """One line, with a count and a row."""
    template = (
        "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content | trim }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    system = {"role": "system", "content": "Be calm."}
    rows = []
    for i in range(9):
        prompt = [system] * (i == 3) + [USER | {"content": f"{i}?"}]
        texts = {side: side + " " * (i > 5) for side in ("chosen", "rejected")}
        sides = {side: [{"role": "assistant", "content": text}] for side, text in texts.items()}
        rows.append({"id": f"r{i}", "prompt": prompt, **sides})
    numbers, printed = inspect(rows, rows[:2], template=template)
    said = [line for line in numbers["splits"]["train"]["warnings"] if line.startswith("train: ")]
    assert [line.partition(" for one)")[0] for line in said] == [
        "train: the chat template changes or leaves out a text of the messages in 4 of 9 rows (r3",
    ]
    assert numbers["splits"]["validation"]["warnings"] == []
    assert " ".join(printed.split()).count("! train: the chat template") == 1


def test_wrong_options(inspect, pair_rows, tmp_path):
    rows = pair_rows(3)
    (tmp_path / "file").write_text("")
    for options, message in (
        (["--max_length", "1"], "max_length is 1, but it must be at least 2"),
        (["--output", str(tmp_path)], "which is a folder; name a file"),
        (["--max_length", "3"], "None of the 3 pairs can be used at max_length 3"),
        (["--output", str(tmp_path / "file" / "numbers.json")], "file cannot be made"),
    ):
        with pytest.raises(UserError, match=message):
            inspect(rows, rows, *options)
