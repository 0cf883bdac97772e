import gzip
import json
import os
from datetime import datetime
from decimal import Decimal
from uuid import UUID

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pacmr_lightning.datamodules.columns import SFT
from pacmr_lightning.datamodules.reading import read_preferences, read_rows
from pacmr_lightning.errors import UserError

from .checked_rows import pairs

ROW = {"prompt": "a", "chosen": " b", "rejected": " c"}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json"])
def test_json_lines(write_rows, name):
    extras = {"id": 7, "category": "x", "augmented_prompt": "A", "flipped": True, "eta": 0.25, "unused": [1]}
    extras["annotator"] = 3
    rows = [ROW | extras, ROW, ROW | {"annotator": "", "category": ""}]
    first, *others = read_preferences(write_rows(rows, name))
    assert {k: first[k] for k in ROW} == ROW
    assert (first["id"], first["category"], first["augmented_prompt"]) == ("7", "x", "A")
    assert (first["flipped"], first["eta"], first["annotator"]) == (True, 0.25, "3")
    for row in others:
        assert all(row[name] is None for name in ("category", "flipped", "eta", "annotator"))


def test_parquet_gives_the_same_rows(write_rows, tmp_path):
    said = "\n\nHuman: x\n\nAssistant:"
    rows = [ROW | {"flipped": False}, {"chosen": f"{said} y", "rejected": f"{said} z", "eta": 1}]
    path = tmp_path / "rows.parquet"
    pd.DataFrame(rows).astype({"flipped": "boolean"}).to_parquet(path)
    assert read_preferences(path)[:] == read_preferences(write_rows(rows))[:]
    pd.DataFrame([ROW, ROW | {"chosen": None}]).to_parquet(path)
    with pytest.raises(UserError, match=r"rows\.parquet, row 2 has no 'chosen'"):
        read_preferences(path)


def test_missing_ids_are_hashes_with_a_counter(write_rows):
    ids = read_preferences(write_rows([ROW, ROW | {"chosen": " d"}, ROW, ROW]))["id"][:]
    assert [ids[2], ids[3]] == [ids[0][:-1] + "1", ids[0][:-1] + "2"]
    assert ids[1].endswith("-0") and len(set(ids)) == 4
    # Order changes the counter only, a file's name nothing.
    assert read_preferences(write_rows([ROW | {"chosen": " d"}], "other.jsonl"))["id"][0] == ids[1]


NAMES = [
    (7, "7"), (7.0, "7"), (True, "True"), (b"x", "x"), (Decimal("1.50"), "1.50"),
    (datetime(2024, 5, 6, 7), "2024-05-06 07:00:00"), (UUID(int=1), str(UUID(int=1))),
]  # fmt: skip


def test_ids_and_categories_of_any_type(tmp_path):
    for value, text in NAMES:
        row = ROW | {"id": value, "category": value, "annotator": value}
        [found] = pairs(row)
        assert (found["id"], found["category"], found["annotator"]) == (text, text, text)
        with pytest.raises(UserError, match=f"row 2 has the id '{text}' of test, row 1"):
            pairs(row, ROW | {"id": text})
    [plain] = pairs(ROW)
    for rows in ([ROW, plain["id"]], [plain["id"], ROW]):  # a made id is another row's own
        with pytest.raises(UserError, match=f"row 2 has the id '{plain['id']}' of test, row 1"):
            pairs(*(ROW | {"id": row} if isinstance(row, str) else row for row in rows))
    [found] = pairs(ROW | {"category": float("nan"), "weight": pd.Series([2]).iloc[0]})
    assert found["category"] is None and found["weight"] == 2 and found["unread"] is None
    for value in ([1], {"a": 1}, 1.5, 2.0**60):
        with pytest.raises(UserError, match=r"row 1: 'id' is .*a whole number or a date"):
            pairs(ROW | {"id": value})
    # Numbers beside a gap are floats in pandas.
    pd.DataFrame([ROW | {"id": 3, "category": 1}, ROW]).to_parquet(tmp_path / "rows.parquet")
    first, second = read_preferences(tmp_path / "rows.parquet")
    assert (first["id"], first["category"], second["category"]) == ("3", "1", None)
    assert len(second["id"]) > 10


PAIR = {"chosen": "It is calm and blue.", "rejected": "It is calm and red."}
LONE = {side: [{"role": "assistant", "content": side}] for side in PAIR}


@pytest.mark.parametrize("sides", [PAIR, LONE], ids=["texts", "messages"])
def test_no_prompt_is_guessed_beside_one(sides):
    names = ("question", "instruction", "query", "input", "Prompt", "prompt_text", "userPrompt", "messages")
    for name in names:
        value = [{"role": "user", "content": "a"}] if name == "messages" else "What is the sea?"
        for row in (sides, sides | {"prompt": None}):
            with pytest.raises(UserError, match=f"row 1 has no 'prompt', but a column '{name}', which"):
                pairs(row | {name: value})
        [found] = pairs(sides | {"prompt": "Which?", name: value})
        assert found["unread"] == name
    talk = {side: f"\n\nHuman: a\n\nAssistant: {side}" for side in PAIR}
    [found] = pairs(talk | {name: value})
    assert found["prompt"] == "\n\nHuman: a\n\nAssistant:", "transcripts hold their prompt"
    for name in ("prompt_id", "question_type", "input_tokens", "system_prompt", "chosen_input"):
        [found] = pairs(PAIR | {name: "x"})
        assert found["unread"] == name, "it is about a prompt"


def test_a_null_prompt_among_prompts(write_rows):
    rows = [PAIR | {"prompt": "What is the sea?"}, PAIR | {"prompt": None}]
    for found in (rows, rows[::-1], [rows[0], PAIR]):
        with pytest.raises(UserError, match=r"line \d has no 'prompt', but .*line \d has one; give each row"):
            read_preferences(write_rows(found))
    assert len(read_preferences(write_rows([rows[1]] * 2))) == 2, "all of them are implicit"


def test_sft_rows(write_rows):
    rows = [{"prompt": "a", "completion": "  b"}, {"prompt": "", "completion": "c", "id": "i"}]
    rows = read_rows(write_rows(rows), SFT)
    assert rows["completion"][:] == ["  b", "c"] and rows["id"][1] == "i"
    with pytest.raises(UserError, match=r"line 1 has no 'completion' .*'prompt', 'chosen', 'rejected'"):
        read_rows(write_rows([ROW]), SFT)


def test_a_changed_file_is_read_again(write_rows):
    path = write_rows([ROW])
    assert len(read_preferences(path)) == 1
    write_rows([ROW, ROW])
    assert len(read_preferences(path)) == 2
    before = os.stat(path)
    write_rows([ROW, ROW | {"chosen": " c", "rejected": " b"}])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_size == before.st_size
    assert read_preferences(path)["chosen"][1] == " c"


SIDES = b'{"chosen": "a", "rejected": "c", "%s": %s}'
BAD_LINES = [
    (b"[1, 2]", "line 3 is a JSON list and not an object"),
    (b'{"prompt": "a", "rejected": "c"}', r"line 3 has no 'chosen' .*'prompt', 'rejected'"),
    (b'{"chosen": "a", "rejected": null}', "line 3 has no 'rejected'"),
    (b'{"chosen": 3, "rejected": "c"}', "line 3: 'chosen' is 3, but it must be a string"),
    (SIDES % (b"flipped", b'"yes"'), "'flipped' is 'yes'"),
    (SIDES % (b"eta", b"1.5"), "'eta' is 1.5"),
    (SIDES % (b"eta", b"NaN"), "'eta' is nan"),
    (SIDES % (b"tools", b'[{"name": "\\ud83d"}]'), "'tools' is half of a surrogate pair"),
    (b'{"chosen": "\\ud83d", "rejected": "c"}', "half of a surrogate pair"),
    (SIDES % (b"n", b"1" * 5000), "line 3 cannot be read .*digit"),
    (
        SIDES % (b"n", b"[" * 100_000 + b"]" * 100_000),
        r"line 3 cannot be read \(.*\); write that value as a text, or remove it",
    ),
    (b'{"chosen": "\xe9", "rejected": "c"}', "not UTF-8"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=[message for _, message in BAD_LINES])
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    # A byte order mark and a blank line are harmless.
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROW).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(UserError, match=message) as caught:
        read_preferences(path)
    assert "bad.jsonl" in str(caught.value) and "\n" not in str(caught.value)
    # Nothing of datasets' own error is shown beside it.
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_files_that_cannot_be_read(tmp_path, write_rows):
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(json.dumps(ROW).encode())[:-12])
    (tmp_path / "plain.jsonl.gz").write_text(json.dumps(ROW))
    for path, said in (
        (tmp_path / "none.jsonl", r"There is no file .*none\.jsonl"),
        (tmp_path, "is a folder"),
        (write_rows([ROW], "rows.csv"), r"rows\.csv is neither JSON Lines nor Parquet"),
        (write_rows([ROW], "rows.parquet"), r"rows\.parquet cannot be read as Parquet"),
        (broken, "broken as a gzip file"),
        (tmp_path / "plain.jsonl.gz", "broken as a gzip file"),
    ):
        with pytest.raises(UserError, match=said):
            read_preferences(path)


@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip", "none"])
def test_damaged_parquet(tmp_path, compression):
    path = tmp_path / "rows.parquet"
    rows = [{"chosen": f"same {i} a", "rejected": f"same {i} b"} for i in range(2000)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, path, compression=compression, use_dictionary=False, row_group_size=1500)
    with pq.ParquetFile(path) as file:
        start = file.metadata.row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    # Without compression only a text is damaged, else all that follows.
    place = data.index(b"same 1600 a", start) if compression == "none" else start + 60
    data[place : place + 4] = b"\xff" * 4
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"rows\.parquet cannot be read as Parquet after \d+ rows \(.+\); "):
        read_preferences(path)
