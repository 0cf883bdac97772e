"""``pacmr inspect``: its numbers are those of a run and of plain counting; rows as the model sees them."""

import json
import re

import numpy as np
import pytest
from datasets import config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pacmr_lightning import cli
from pacmr_lightning.batch import Segment
from pacmr_lightning.datamodules import Files, PreferenceDataModule
from pacmr_lightning.datamodules.inspection import SHOWN, inspect_pairs, show_rows, token_text

from ...conftest import TURNS

HH = "\n\nHuman: {}\n\nAssistant:"
USER = {"role": "user", "content": "What is the sea?"}


@pytest.fixture
def inspect(write_rows, tokenizer, tmp_path, capsys, monkeypatch):
    """Runs the command on rows; the numbers of both splits, and what is printed."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(train, validation, *options, template=None):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        paths = write_rows(train), write_rows(validation, "validation.jsonl")
        command = f"inspect --source Files --source.train {paths[0]} --source.validation {paths[1]}".split()
        output = tmp_path / "new" / "numbers.json"
        cli.main([*command, "--tokenizer", str(tmp_path / "tokenizer"), "--output", str(output), *options])
        return json.loads(output.read_text())["splits"], capsys.readouterr().out

    return run


def texts():
    rows = [
        {"prompt": "x", "chosen": " a", "rejected": " a"},
        {"prompt": "x", "chosen": " ", "rejected": " b"},
        {"chosen": "\n\nHuman: yes", "rejected": "\n\nHuman: no"},
        {"chosen": HH.format("a") + "b", "rejected": HH.format("c") + "d"},
    ]
    for i in range(60):
        one, other = " rain" * (i % 11 + 1), " rain" * (i % 7 + 1)
        prompt = "What is the best of all books? " * (i % 5 + 1) + str(i % 20)
        rows.append({"prompt": prompt, "chosen": one, "rejected": other + "!"})
        rows.append({"chosen": HH.format(prompt) + one, "rejected": HH.format(prompt) + other + "."})
    return rows


def chats():
    def turns(answer):
        return [USER, {"role": "assistant", "content": answer}]

    return [{"chosen": turns(f"a{i % 7}"), "rejected": turns("b" * i)} for i in range(40)]


@pytest.mark.parametrize("rows", [texts(), chats()], ids=["texts", "chats"])
@pytest.mark.parametrize("max_length", [60, 500])
def test_the_numbers_are_those_of_a_run(rows, max_length, inspect, tmp_path):
    numbers, _ = inspect(rows, rows[1::2], "--max_length", str(max_length), template=TURNS)
    cached = set(config.HF_DATASETS_CACHE.rglob("*.arrow"))
    assert cached
    source = Files(*(str(tmp_path / f"{name}.jsonl") for name in ("rows", "validation")))
    run = PreferenceDataModule(source, str(tmp_path / "tokenizer"), max_length=max_length)
    run.setup("fit")
    assert set(config.HF_DATASETS_CACHE.rglob("*.arrow")) == cached
    for split, pairs in (("train", run.train_pairs), ("validation", run.validation_pairs)):
        counts, lengths = numbers[split]["counts"], numbers[split]["lengths"]
        assert counts == {name: n for name, n in run.counts[split].items() if name != "flipped"}
        assert ("too long" in counts) == (max_length == 60)
        sizes = {p: np.array([*map(len, pairs.rows[f"{p}_ids"])]) for p in ("prompt", "chosen", "rejected")}
        prompt, chosen, rejected = sizes.values()
        means = {part: size.mean() for part, size in sizes.items()}
        means |= {"chosen_longer": (chosen > rejected).mean(), "rejected_longer": (chosen < rejected).mean()}
        longest = (prompt + np.maximum(chosen, rejected)).max()
        assert lengths == pytest.approx(means | {"longest": longest})


def test_rows_are_shown_as_the_batch_has_them(write_rows, pair_rows, tokenizer):
    texts = pair_rows(9)
    texts[2] = {"prompt": "Sea", "chosen": " calm", "rejected": " I\tdo"}
    texts[4]["prompt"] = "What is the best of all books? " * 80
    path = write_rows(texts)
    _, pairs = inspect_pairs(Files(path, path), tokenizer, 5000)
    parts = ("prompt_ids", "chosen_ids", "rejected_ids")
    lengths = [sum(len(row[part]) for part in parts) for row in pairs.rows]
    shown = [getattr(part, "renderable", part).plain for part in show_rows(pairs, tokenizer)]
    rows = [2, sorted(range(9), key=lengths.__getitem__)[4], 4]
    batch = pairs.batch(rows)
    for place, row in enumerate(rows):
        heading, prompt, *responses = shown[4 * place : 4 * place + 4]
        counts = {kind.name.lower(): int((batch.segment_ids[place] == kind).sum()) for kind in Segment}
        tokens = "(tokens: {prompt} prompt, {chosen} chosen, {rejected} rejected, {pad} of padding"
        assert pairs.rows[row]["id"] in heading and tokens.format_map(counts) in heading
        for text, name in zip(responses, ("chosen", "rejected"), strict=True):
            pieces = re.findall("‹(.*?)›", text)
            assert len(pieces) == counts[name]
            written = "".join(pieces).replace("▁", " ").replace("\\t", "\t")
            assert written == texts[row][name] + "<eos>"
        tokens = prompt.removeprefix("prompt: ").replace(" ", "").replace("▁", " ")
        start, *end = re.split(rf"\[…{counts['prompt'] - 2 * SHOWN}tokensareleftouthere…\]", tokens)
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


def test_the_command_counts(inspect, pair_rows):
    def longer(rows):
        return [row | {"chosen": row["chosen"] * 2} for row in rows]

    train = longer(pair_rows(40))
    train += [row | {"prompt": row["prompt"] * 20} for row in train[:4]]
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in train[:3]]
    # Labels of the first four pairs, with those of the other response: 2 + 3, 2 + 1, 1 + 1 and 2.
    train += [train[0], train[1], train[3], *swapped, swapped[0], swapped[0]]
    train += [train[0] | {"chosen": " A third one."}, train[0] | {"label": "tie"}]
    train += [{"prompt": "Name it", "chosen": f" {i}", "rejected": f" {i}"} for i in range(4)]
    train += [{"prompt": f"Name [red]{i}[/red]", "chosen": " a", "rejected": " b"} for i in range(12)]
    validation = longer(pair_rows(3))
    validation += [validation[0] | {"prompt": validation[0]["prompt"].upper()}]
    numbers, printed = inspect(train, validation, "--max_length", "150")
    found = numbers["train"]
    kept = {"rows": 70, "kept": 62, "no augmented prompt": 12}
    assert found["counts"] == kept | {"too long": 4, "equal responses": 4}
    repeats = {"copies": 5, "comparisons": 4, "labels": 12}
    assert found["repeats"] == repeats | {"contradicting_comparisons": 3, "least_wrong": 4}
    assert not any(numbers["validation"]["repeats"].values())
    prompts = [(one["prompts"], one["in_other_split"]) for one in numbers.values()]
    assert prompts == [(52, 12), (4, 3)]
    for label, value in (
        ("rows", "70"),
        ("  dropped, too long", "4 (5.7%)"),
        ("  dropped, equal responses", "4 (5.7%)"),
        ("tokens of the longest pair", str(found["lengths"]["longest"])),
        ("no augmented prompt", "12 (19.4%)"),
        ("distinct prompts", "52"),
        ("copies of an earlier pair", "5 (8.1%)"),
        ("comparisons with several labels", "4 (12 labels)"),
        ("  whose labels contradict each other", "3 (75.0%)"),
        ("  labels that must be wrong", "4 (33.3%)"),
        ("prompt also in the other split", "12 (19.4%)"),
    ):
        assert re.search(rf"^ {re.escape(label)} +{re.escape(value)} ", printed, re.MULTILINE), label
    assert found["warnings"] == [] and "\n!" not in printed and "‹<eos>›" in printed


def test_what_is_odd_about_tokens_is_said(inspect, pair_rows):
    rows = [row | {"id": f"r{i}"} for i, row in enumerate(pair_rows(40))]
    numbers, printed = inspect([row | {"prompt": "<bos><bos>" + row["prompt"]} for row in rows], rows[:3])
    assert numbers["train"]["counts"]["two BOS"] == 40 and "max_length 1024\n" in printed
    sentence = "train: 40 of 40 prompts begin with BOS (<bos>) twice (r0 for one); take it out of the texts."
    assert numbers["train"]["warnings"] == [sentence] and f"! {sentence[:38]}" in printed
    again = [row | {side: f"{row['prompt']}{row[side]}" for side in ("chosen", "rejected")} for row in rows]
    numbers, _ = inspect([*again[:30], *rows[30:]], rows[:3])
    told = "30 of 40 rows repeat the prompt in each response (r0 for one); take it out of the responses."
    assert [numbers[split]["warnings"] for split in numbers] == [[f"train: {told}"], []]


def test_special_tokens_in_texts_are_said(inspect):
    """In messages, and in responses before their end; a prompt that is a text may have been rendered."""
    row = {"prompt": "<bos>What is the sea?<eos>", "chosen": " calm<eos>", "rejected": " rain"}
    odd = row | {"id": "odd", "rejected": " rain <eos> and more"}
    numbers, _ = inspect([row, row, odd], [row])
    told = "train: 1 of 3 rows have a special token, such as <eos>, inside of a text (odd for one), which is"
    assert [said[: len(told)] for said in numbers["train"]["warnings"]] == [told]
    sides = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    rows = [{"prompt": [USER | {"content": text}], **sides} for text in ("sea", "sea<eos>")]
    numbers, _ = inspect(rows, rows[:1], template=TURNS)
    assert numbers["train"]["counts"]["special tokens"] == 1


def test_what_the_template_changes_is_said(inspect):
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
    told = "train: the chat template changes or leaves out a text of the messages in 4 of 9 rows (r3 for one)"
    said = [line for line in numbers["train"]["warnings"] if line.startswith("train: ")]
    assert [line[: len(told)] for line in said] == [told]
    assert numbers["validation"]["warnings"] == []
    assert " ".join(printed.split()).count("! train: the chat template") == 1


def test_wrong_options(inspect, pair_rows, tmp_path, capsys):
    rows = pair_rows(3)
    (tmp_path / "file").write_text("")
    for options, message in (
        (["--max_length", "1"], "max_length is 1, but it must be at least 2"),
        (["--output", str(tmp_path)], "which is a folder; name a file"),
        (["--output", f"{tmp_path}/validation.jsonl"], "where the source's own rows are; name another file"),
        (["--max_length", "3"], "None of the 3 train pairs can be used at max_length 3"),
        (["--max_length", "99"], "raise max_length or validation_fraction, or give other validation pairs."),
        (["--output", str(tmp_path / "file" / "numbers.json")], "file cannot be made"),
    ):
        with pytest.raises(SystemExit):
            inspect(rows, [row | {"prompt": "x" * 99} for row in rows], *options)
        assert message in capsys.readouterr().err
