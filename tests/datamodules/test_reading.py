import gzip
import json
import os

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pacmr_lightning.datamodules.reading import read_preferences, read_sft
from pacmr_lightning.errors import UserError

ROW = {"prompt": "a", "chosen": " b", "rejected": " c"}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json"])
def test_json_lines(write_rows, name):
    extras = {"id": 7, "category": "x", "augmented_prompt": "A", "flipped": True, "eta": 0.25, "unused": [1]}
    extras["annotator"] = 3
    first, second = read_preferences(write_rows([ROW | extras, ROW], name))
    assert {k: first[k] for k in ROW} == ROW
    assert (first["id"], first["category"], first["augmented_prompt"]) == ("7", "x", "A")
    assert (first["flipped"], first["eta"], first["annotator"]) == (True, 0.25, "3")
    assert all(second[name] is None for name in ("category", "flipped", "eta", "annotator"))


def test_parquet_gives_the_same_rows(write_rows, tmp_path):
    rows = [ROW | {"flipped": False}, {"chosen": "x y", "rejected": "x z", "eta": 1}]
    path = tmp_path / "rows.parquet"
    pd.DataFrame(rows).astype({"flipped": "boolean"}).to_parquet(path)
    assert read_preferences(path)[:] == read_preferences(write_rows(rows))[:]


def test_missing_ids_are_hashes_with_a_counter(write_rows):
    ids = read_preferences(write_rows([ROW, ROW | {"chosen": " d"}, ROW, ROW]))["id"][:]
    assert [ids[2], ids[3]] == [ids[0][:-1] + "1", ids[0][:-1] + "2"]
    assert ids[1].endswith("-0") and len(set(ids)) == 4
    # Order changes the counter only, a file's name nothing.
    assert read_preferences(write_rows([ROW | {"chosen": " d"}], "other.jsonl"))["id"][0] == ids[1]


def test_sft_rows(write_rows):
    rows = read_sft(
        write_rows([{"prompt": "a", "completion": "  b"}, {"prompt": "", "completion": "c", "id": "i"}])
    )
    assert set(rows.column_names) == {"id", "prompt", "completion", "chat"}
    assert rows["completion"][:] == ["  b", "c"] and rows["id"][1] == "i"


def test_a_changed_file_is_read_again(write_rows):
    path = write_rows([ROW])
    assert len(read_preferences(path)) == 1
    assert len(read_preferences(path)) == 1
    write_rows([ROW, ROW])
    assert len(read_preferences(path)) == 2
    before = os.stat(path)
    write_rows([ROW, ROW | {"chosen": " c", "rejected": " b"}])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_size == before.st_size
    assert read_preferences(path)["chosen"][1] == " c"


def test_blank_lines_and_byte_order_marks_are_harmless(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROW).encode() + b"\n\n")
    assert len(read_preferences(path)) == 1


BAD_LINES = {
    "not JSON": (b'{"prompt": ', "line 2 is not JSON"),
    "not an object": (b"[1, 2]", "line 2 is a JSON list and not an object"),
    "no chosen": (b'{"prompt": "a", "rejected": "c"}', r"line 2 has no 'chosen' .*'prompt', 'rejected'"),
    "null rejected": (b'{"chosen": "a", "rejected": null}', "line 2 has no 'rejected'"),
    "number": (b'{"chosen": 3, "rejected": "c"}', "line 2: 'chosen' is 3, but it must be a string"),
    "messages": (
        b'{"chosen": [{"role": "user", "content": "a"}], "rejected": "c"}',
        "line 2: 'rejected' is a text, but 'chosen' is a list of chat messages",
    ),
    "no message": (
        b'{"chosen": [{"role": "user"}], "rejected": []}',
        "line 2: 'chosen' is a list with .*'role': 'user'.*two texts, 'role' and 'content'",
    ),
    "prompt list": (b'{"prompt": [], "chosen": "a", "rejected": "c"}', "'prompt' is a list"),
    "flag": (b'{"chosen": "a", "rejected": "c", "flipped": "yes"}', "'flipped' is 'yes'"),
    "eta": (b'{"chosen": "a", "rejected": "c", "eta": 1.5}', "'eta' is 1.5"),
    "eta NaN": (b'{"chosen": "a", "rejected": "c", "eta": NaN}', "'eta' is nan"),
    "category": (b'{"chosen": "a", "rejected": "c", "category": 1.5}', "'category' is 1.5"),
    "surrogate": (b'{"chosen": "\\ud83d", "rejected": "c"}', "half of a surrogate pair"),
    "long number": (
        b'{"chosen": "a", "rejected": "c", "n": %s}' % (b"1" * 5000),
        "line 2 cannot be read .*digit",
    ),
    "deep": (
        b'{"chosen": "a", "rejected": "c", "n": %s}' % (b"[" * 100_000 + b"]" * 100_000),
        r"line 2 cannot be read \(.*\); write that value as a text, or remove it",
    ),
    "latin-1": (b'{"chosen": "\xe9", "rejected": "c"}', "not UTF-8"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_lines_are_named(tmp_path, case):
    line, message = BAD_LINES[case]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b"\n" + line + b"\n")
    with pytest.raises(UserError, match=message) as caught:
        read_preferences(path)
    assert "bad.jsonl" in str(caught.value) and "\n" not in str(caught.value)
    # Nothing of datasets' own error is shown beside it.
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_duplicate_ids_are_named(write_rows):
    rows = [ROW | {"id": i} for i in ("a", "b", "a")]
    with pytest.raises(UserError, match=r"line 3 has the id 'a' of .*line 1"):
        read_preferences(write_rows(rows))


def test_files_that_cannot_be_read(tmp_path, write_rows):
    with pytest.raises(UserError, match=r"There is no file .*none\.jsonl"):
        read_preferences(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is a folder"):
        read_preferences(tmp_path)
    with pytest.raises(UserError, match=r"rows\.csv is neither JSON Lines nor Parquet"):
        read_preferences(write_rows([ROW], "rows.csv"))
    with pytest.raises(UserError, match=r"empty\.jsonl is empty"):
        read_preferences(write_rows([], "empty.jsonl"))
    with pytest.raises(UserError, match=r"rows\.parquet cannot be read as Parquet"):
        read_preferences(write_rows([ROW], "rows.parquet"))
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(json.dumps(ROW).encode())[:-12])
    with pytest.raises(UserError, match="broken as a gzip file"):
        read_preferences(broken)
    (tmp_path / "plain.jsonl.gz").write_text(json.dumps(ROW))
    with pytest.raises(UserError, match="broken as a gzip file"):
        read_preferences(tmp_path / "plain.jsonl.gz")


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


def test_parquet_rows_are_named(tmp_path):
    path = tmp_path / "rows.parquet"
    pd.DataFrame([ROW, ROW | {"chosen": None}]).to_parquet(path)
    with pytest.raises(UserError, match=r"rows\.parquet, row 2 has no 'chosen'"):
        read_preferences(path)


def test_sft_errors(write_rows):
    with pytest.raises(UserError, match=r"line 1 has no 'completion' .*'prompt', 'chosen', 'rejected'"):
        read_sft(write_rows([ROW]))


def test_real_files(shared_data):
    rows = read_preferences(shared_data / "tldr" / "validation.jsonl.gz")
    assert len(rows) == 1155 and len(set(rows["id"])) == 1155
    assert len(read_sft(shared_data / "tldr" / "sft.jsonl.gz")) == 1945
