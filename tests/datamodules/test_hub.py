"""Datasets in their upstream layouts, written in the test and loaded through ``datasets``."""

import json
import os
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, load_from_disk

from pacmr_lightning.datamodules import (
    TLDR,
    AnthropicHH,
    HHCompletions,
    HubCompletions,
    HubPreferences,
    TLDRCompletions,
    reading,
)
from pacmr_lightning.datamodules.evaluation_prompts import draw_prompts
from pacmr_lightning.datamodules.hh import SUBSETS
from pacmr_lightning.datamodules.tokenization import tokenize_completions, tokenize_pairs
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import content_digest

from ..conftest import read_lines, write_lines


def post(i: int, gap: str = "\n\n", end: str = "") -> str:
    parts = f"SUBREDDIT: r/{'cats' if i % 2 else 'dogs'}", f"TITLE: Post {i}", "POST: One.\n\nTwo.", "TL;DR:"
    return gap.join(parts) + end


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def with_messages(prompt: str, **sides: str) -> dict:
    """A row of trl-internal-testing/tldr-preference-trl-style."""
    turns = {side: [message("user", prompt), message("assistant", text)] for side, text in sides.items()}
    return {"prompt": prompt, **turns}


def write_parquet(folder: Path, split: str, rows: list[dict]) -> str:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return str(folder)


def write_csv(folder: Path, rows: list[dict]) -> str:
    folder.mkdir(exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / "train.csv", index=False)
    return str(folder)


@pytest.fixture
def tldr(tmp_path):
    """As the Hub has it, further columns included."""
    more = {"info": {"id": "t3_1", "subreddit": "x"}, "choice": 1}
    for split, count in (("train", 6), ("validation", 4), ("validation_cnndm", 2)):
        sides = ({"chosen": f" Good {split} {i}.", "rejected": f"Bad {i}."} for i in range(count))
        rows = [more | with_messages(post(i), **texts) for i, texts in enumerate(sides)]
        write_parquet(tmp_path / "tldr", split, rows)
    return str(tmp_path / "tldr")


def test_tldr(tldr, tokenizer, monkeypatch):
    source = TLDR(tldr)
    rows = source.load("train")
    assert len(rows) == 6 and len(source.load("validation")) == 4
    assert rows[1]["prompt"] == post(1) and not rows[1]["chat"]
    assert (rows[1]["chosen"], rows[1]["rejected"]) == (" Good train 1.", " Bad 1.")
    assert rows["category"][:3] == ["r/dogs", "r/cats", "r/dogs"]
    _, counts = tokenize_pairs(rows, tokenizer, 768)
    assert counts["kept"] == 6 and counts["no augmented prompt"] == 0
    assert len(TLDR(tldr, "validation_cnndm").load("validation")) == 2
    monkeypatch.setattr(reading, "checked", None)
    assert len(TLDR(tldr).load("train")) == 6, "from the cache"


def test_tldr_summaries(tmp_path, tldr):
    """They have the prompts of the comparisons; evaluation takes the distinct posts of their test split."""
    folder = tmp_path / "summaries"
    for split, numbers in (("train", range(6)), ("valid", [1]), ("test", [7, 8, 8, 9])):
        write_parquet(folder, split, [{"prompt": post(i, "\n", " "), "label": f"Sum {i}."} for i in numbers])
    summaries = TLDRCompletions(str(folder))
    assert summaries.load("train")["prompt"][:] == TLDR(tldr).load("train")["prompt"][:]
    assert summaries.load("validation")["completion"][0] == " Sum 1."
    source = TLDR(tldr, test_prompts=str(folder))
    assert source.prompts == [post(7), post(8), post(9)]
    assert {prompt.text for prompt in draw_prompts(source, None, 42)} == set(source.prompts)
    drawn = {prompt.text for prompt in draw_prompts(TLDR(tldr), None, 42)}
    assert drawn == set(TLDR(tldr).load("validation")["prompt"][:])


def dialogue(*turns: str) -> str:
    names = ("\n\nHuman: ", "\n\nAssistant: ")
    return "".join(names[i % 2] + turn for i, turn in enumerate(turns))


@pytest.fixture
def hh(tmp_path):
    """As Anthropic/hh-rlhf has it: a folder a subset, transcripts only."""
    for subset in SUBSETS:
        (tmp_path / "hh" / subset).mkdir(parents=True)
        for split, count in (("train", 50), ("test", 8)):
            rows = []
            for i in range(count):
                turns = [f"{subset} {split} {i}?"] if i % 2 else [f"{subset} {split} {i}?", "Well.", "And?"]
                rows.append({"chosen": dialogue(*turns, "Yes."), "rejected": dialogue(*turns, "No.")})
            rows.append({"chosen": dialogue("a", "b", "c", "d"), "rejected": dialogue("a", "x", "c", "d")})
            write_lines(tmp_path / "hh" / subset / f"{split}.jsonl.gz", rows)
    return str(tmp_path / "hh")


def test_hh(hh, tokenizer):
    source = AnthropicHH(hh)
    train, validation = source.load("train"), source.load("validation")
    assert len(train) + len(validation) == 4 * 51 and 0 < len(validation) < 40
    assert set(train["category"]) == set(SUBSETS)
    _, counts = tokenize_pairs(train, tokenizer, 768)
    assert counts["different prompts"] == 4
    assert set(AnthropicHH(hh, ["harmless-base"]).load("train")["category"]) == {"harmless-base"}
    other = AnthropicHH(hh, split_seed=1).load("validation")
    assert set(other["prompt"]) != set(validation["prompt"])

    everything, single = source.prompts, AnthropicHH(hh, single_turn=True).prompts
    assert len(everything) == 4 * 8 and len(single) == 4 * 4 and set(single) < set(everything)
    assert all(prompt.count("\n\nHuman:") == 1 for prompt in single)
    assert all(" test " in prompt and prompt.endswith("\n\nAssistant:") for prompt in everything)
    responses, held_out = (HHCompletions(hh).load(split) for split in ("train", "validation"))
    assert responses["id"][:] == train["id"][:] and not set(responses["prompt"]) & set(held_out["prompt"])
    tokens, counts = tokenize_completions(responses, tokenizer, 768)
    assert counts["different prompts"] + len(tokens) == len(train)
    assert {tokenizer.decode(ids) for ids in tokens["completion_ids"]} == {" Yes.<eos>"}


def test_any_dataset(tmp_path):
    rows = [{"question": f"q {i}", "better": " a", "worse": " b", "n": i} for i in range(40)]
    path = write_parquet(tmp_path / "any", "train", rows)
    names = {"prompt": "question", "chosen": "better", "rejected": "worse", "id": "n"}
    source = HubPreferences(path, columns=names, validation_fraction=0.3)
    train, validation = source.load("train"), source.load("validation")
    assert len(train) + len(validation) == 40 and len(validation) > 0
    assert train["prompt"][0].startswith("q ") and train["id"][0] in {str(i) for i in range(40)}
    # The same dataset under other names is other rows, cache or not.
    swapped = HubPreferences(path, columns=names | {"chosen": "worse", "rejected": "better"})
    assert set(swapped.load("train")["chosen"]) == {" b"}


def test_conversations(tmp_path):
    row = {"messages": [message("user", "q"), message("assistant", "a")]}
    for split, count in (("train", 3), ("test", 2)):
        path = write_parquet(tmp_path / "chat", split, [row] * count)
    source = HubCompletions(path, columns={"completion": "messages"}, validation_split="test")
    assert source.load("train")["chat"][:] == [True] * 3 and len(source.load("validation")) == 2


def test_a_saved_dataset(tmp_path):
    """As ``Dataset.save_to_disk`` and ``DatasetDict.save_to_disk`` write them."""
    pairs = Dataset.from_list([{"prompt": f"p{i}", "chosen": " a", "rejected": " b"} for i in range(40)])
    pairs.save_to_disk(tmp_path / "one")
    DatasetDict(train_sft=pairs, train=pairs, train_prefs=pairs).save_to_disk(tmp_path / "named")
    load_from_disk(tmp_path / "named").map(lambda row: {"n": 1})  # writes its cache there
    for name, split in (("one", "train"), ("named", "train"), ("named", "train_prefs[:9]+train_sft[9:]")):
        source = HubPreferences(str(tmp_path / name), train_split=split, validation_fraction=0.3)
        prompts = [*source.load("train")["prompt"], *source.load("validation")["prompt"]]
        assert sorted(prompts) == sorted(pairs["prompt"])
    (tmp_path / "one" / "state.json").write_text("{")
    for name, split, why in (("one", "train", "Expecting"), ("named", "test", r"Unknown.*\['train_sft', ")):
        said = rf"The split '{split}' of the dataset .*{name} cannot be loaded \({why}"
        with pytest.raises(UserError, match=said):
            HubCompletions(str(tmp_path / name), train_split=split).load("train")


def test_csv(tmp_path):
    """Each cell is its text, whatever it looks like; an empty cell is missing."""
    texts = ["None", "NA", "null", "nan", "2", "007", "2.0", "True", "2020-01-02", "1e5", "12:30"]
    rows = [
        {"id": f"{i:03d}", "question": f"q{i}", "good": text, "bad": str(i), "category": "NA", "margin": ""}
        | {"annotator": f"{i % 2:02d}", "flipped": i > 3, "eta": 0.5}
        for i, text in enumerate(texts)
    ]
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    found = HubPreferences(write_csv(tmp_path / "csv", rows), columns=columns).load_all()
    assert found["chosen"][:] == texts and set(found["category"]) == {"NA"}
    for name in ("id", "annotator", "flipped", "eta"):
        assert found[name][:] == [row[name] for row in rows]
    assert found["rejected"][:] == [row["bad"] for row in rows] and set(found["unread"]) == {"margin"}
    some = HubPreferences(str(tmp_path / "csv"), train_split="train[:2]+train[90%:]", columns=columns)
    assert some.load_all()["chosen"][:] == [*texts[:2], texts[-1]]
    path = write_csv(tmp_path / "csv", [*rows, rows[0] | {"id": 9, "good": None}])
    with pytest.raises(UserError, match=r"row 12 has no 'chosen' .*, or its value is null"):
        HubPreferences(path, columns=columns).load_all()
    pd.DataFrame(rows).drop(columns="margin").to_csv(f"{path}/train-1.csv", index=False)
    with pytest.raises(UserError, match=r"train\.csv and .*train-1\.csv differ in the columns margin; "):
        HubPreferences(path, columns=columns).load_all()


@pytest.mark.parametrize("others", [True, False])
def test_messages_as_json_in_csv(tmp_path, others, caplog):
    """They are messages if all rows have them; among other texts they are texts, such as code."""
    sides = [json.dumps([message("assistant", text)]) for text in ("NA", "b")]
    rows = [{"prompt": json.dumps([message("user", "q")]), "chosen": sides[0], "rejected": sides[1]}]
    rows += [{"prompt": "q", "chosen": "a", "rejected": "b"}] * others
    with caplog.at_level("INFO"):
        found = HubPreferences(write_csv(tmp_path / "csv", rows)).load_all()
    assert found["chat"][:] == ([False] * 2 if others else [True])
    assert found["chosen"][0] == sides[0]
    said = "1 of 2 texts in 'chosen' read as chat messages, but others do not, so all stay texts."
    assert (said in caplog.text) == others


def test_texts_of_json_lines_stay_texts(tmp_path):
    """Dates, also of a second file that has only these; numbers and texts in one column; odd columns."""
    folder = tmp_path / "lines"
    folder.mkdir()
    rows = [
        {"prompt": f"When, {i}?", "chosen": f"2020-01-{i + 1:02d}", "rejected": "2021-01-01T00:00:00"}
        | {"annotator": [7, "7", 7.0, "x", None][i % 5], "extra": [{"a": i}, i, "i"][i % 3]}
        for i in range(20)
    ]
    for part, some in enumerate((rows[:10], rows[10:])):
        write_lines(folder / f"train-{part}.jsonl", some)
    found = HubPreferences(str(folder)).load_all()
    assert found["chosen"][:] == [row["chosen"] for row in rows]
    assert found["rejected"][:] == [row["rejected"] for row in rows]
    assert found["annotator"][:] == ["7", "7", "7", "x", None] * 4
    turns = [[message("user", f"{i}?"), message("assistant", row["chosen"])] for i, row in enumerate(rows)]
    chats = [{"chosen": turn, "rejected": [turn[0], message("assistant", "No.")]} for turn in turns]
    write_lines(folder / "train-0.jsonl", chats)
    (folder / "train-1.jsonl").unlink()
    found = HubPreferences(str(folder)).load_all()
    assert [json.loads(row["prompt"]) + json.loads(row["chosen"]) for row in found] == turns
    (folder / "train-0.jsonl").unlink()
    # An array, which datasets reads.
    (folder / "train.json").write_text(json.dumps([row | {"annotator": "a", "extra": 1} for row in rows]))
    for at, names in (("chosen", {}), ("rejected", {"id": "rejected", "chosen": "extra", "rejected": "x"})):
        with pytest.raises(UserError, match=f"the column '{at}', whose texts the library datasets reads as"):
            HubPreferences(str(folder), columns=names).load_all()


def test_a_column_can_be_left_out(tmp_path):
    odd = {"category": ["x", "y"], "flipped": "no", "id": "x"}
    rows = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b", **odd} for i in range(4)]
    path = write_parquet(tmp_path / "odd", "train", rows)
    said = r"'category' is .*; --source.columns .* '\{category: null\}' of a Hub source"
    with pytest.raises(UserError, match=said):
        HubPreferences(path).load_all()
    found = HubPreferences(path, columns=dict.fromkeys(odd)).load_all()
    assert set(found["category"]) == {None} == set(found["flipped"])
    assert len(set(found["id"])) == 4


def test_columns_that_are_not_read(tmp_path, caplog):
    odd = {
        "map": pa.array([[("a", 1)]] * 3, pa.map_(pa.string(), pa.int64())),
        "time": pa.array([1] * 3, pa.time64("ns")),
        "views": pa.array(["a"] * 3, pa.string_view()),
        "nothing": pa.nulls(3),
        "image": pa.array([{"bytes": b"x"}] * 3),
    }
    texts = {name: pa.array([f"{name} {i}" for i in range(3)]) for name in ("prompt", "chosen", "rejected")}
    (tmp_path / "odd").mkdir()
    pq.write_table(pa.table(texts | odd), tmp_path / "odd" / "train.parquet")
    with caplog.at_level("INFO"):
        assert HubPreferences(str(tmp_path / "odd")).load_all()["chosen"][:] == texts["chosen"].to_pylist()
    said = f"{tmp_path / 'odd'}: these columns are not read: image, map, nothing, time, views."
    assert said in caplog.messages
    HubPreferences(str(tmp_path / "odd")).write_cleaned(str(tmp_path / "out.jsonl"), set(), set())
    row = {"map": [["a", 1]], "time": "00:00:00", "views": "a", "nothing": None, "image": {"bytes": None}}
    assert read_lines(tmp_path / "out.jsonl")[0] == row | {name: f"{name} 0" for name in texts}


def test_errors(tldr, hh, tmp_path):
    for subsets in (["helpful"], []):
        with pytest.raises(UserError, match=r"subsets names .*; choose from harmless-base"):
            AnthropicHH(hh, subsets)
    with pytest.raises(UserError, match="columns names 'winner'"):
        HubPreferences(tldr, columns={"winner": "chosen"})
    wrong, bare, other, broken = (
        write_parquet(tmp_path / name, "train", [row])
        for name, row in (
            ("wrong", {"prompt": "a", "response_j": "b", "response_k": "c"}),
            ("no prompt", {"question": "a", "completion": "b"}),
            ("other prompt", {"question": "a", "chosen": "a b", "rejected": "a c"}),
            ("broken", {"chosen": "a"}),
        )
    )
    file = next(Path(broken).rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-20])
    found = "but prompt, response_j, response_k; name it, as in --source.columns "
    chosen = {"chosen": "winner"}
    for source, said in (
        (TLDR(tldr, "nothing"), r"split 'nothing' of the dataset .*tldr cannot be loaded"),
        (HubPreferences(tldr, columns=chosen), "chosen: .winner., but .* has the columns info, choice"),
        (HubPreferences(wrong), f"wrong has no column 'chosen', {found}'{{chosen: response_j}}'"),
        (HubCompletions(wrong), f"no column 'completion', {found}"),
        (HubCompletions(bare), r"row 1 has no 'prompt' \(columns found: 'question', 'completion'\)"),
        (HubPreferences(other), r"column 'question', .*--source.columns .* '\{prompt: question\}'"),
        (HubPreferences(broken), r"cannot be (read|loaded)"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            source.load("validation" if isinstance(source, TLDR) else "train")
        assert "\n" not in str(caught.value)


def test_real_rows(shared_data, tmp_path):
    """The rows of the real TL;DR and HH, in upstream layout, are the rows of their files."""
    found = read_lines(shared_data / "tldr" / "validation.jsonl.gz")
    rows = [with_messages(row["prompt"], chosen=row["chosen"], rejected=row["rejected"]) for row in found]
    loaded = TLDR(write_parquet(tmp_path / "tldr", "train", rows)).load("train")
    assert loaded["prompt"][:] == [row["prompt"] for row in found]
    assert loaded["chosen"][:] == [row["chosen"].rstrip() for row in found]
    assert all(category.startswith("r/") for category in loaded["category"])

    hh = str(shared_data / "hh"), ["harmless-base"]
    pairs = AnthropicHH(*hh, single_turn=True)
    for source in (pairs, HHCompletions(*hh)):
        assert len(source.load("train")) + len(source.load("validation")) == 2077
    assert len(pairs.prompts) > 50


def test_a_folder_named_like_a_loader_of_datasets(inside):
    """Only its own files are read, those of another split's columns and below a link too."""
    rows = [{"prompt": "p", "chosen": f"c{i}", "rejected": "r"} for i in range(3)]
    for name, count in (("csv", 3), ("others", 2)):
        write_csv(inside / name, rows[:count])
    pd.DataFrame(rows).assign(category="x").to_csv("csv/validation.csv", index=False)
    source = HubPreferences("csv", validation_split="validation")
    assert [len(source.load(split)) for split in ("train", "validation")] == [3, 3]
    Path("linked").mkdir()
    Path("linked/data").symlink_to(inside / "others")
    before = content_digest("linked")
    write_csv(inside / "others", rows)
    assert content_digest("linked") != before


@pytest.mark.parametrize("name", ["rows.csv", "train.parquet"])
def test_a_changed_folder_is_read_again(tmp_path, name):
    file = tmp_path / "any" / name
    file.parent.mkdir()

    def write(chosen, rejected):
        row = pd.DataFrame([{"prompt": "Say a word:", "chosen": chosen, "rejected": rejected}])
        row.to_csv(file, index=False) if name.endswith("csv") else row.to_parquet(file)
        os.utime(file, ns=(0, 10**18))
        return file.stat().st_size

    size = write("one", "two")
    source = HubPreferences(str(file.parent), validation_fraction=0.01)
    assert source.load_all()["chosen"][:] == ["one"]
    assert write("two", "one") == size
    assert source.load_all()["chosen"][:] == ["two"]
