"""Cleaned data: the input's format, order and columns, with suspected errors dropped or exchanged."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pacmr_lightning.datamodules import AnthropicHH, Files, HubPreferences
from pacmr_lightning.datamodules.reading import read_preferences
from pacmr_lightning.errors import UserError

from ..conftest import read_lines, write_lines

USER = {"role": "user", "content": "q"}
CHAT = {side: [USER, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
ROWS = [
    {"meta": {"n": 1.5, "x": None}, "prompt": "é 1", "chosen": " a", "rejected": " b", "\ud800": "\ud800"},
    {"prompt": "2", "chosen": " a", "rejected": " b", "flipped": True, "eta": 0.25, "score": [1, 2]},
    {"prompt": "2", "chosen": " a", "rejected": " b", "flipped": 0},
    {"id": "a", "prompt": "p", "chosen": "x", "rejected": "y", "score_chosen": 1, "margin": None},
    {"id": "b", "prompt": "p", "chosen": "x", "rejected": "y", "score_rejected": 2, "margin": 1},
    {"id": "chat", **CHAT},
    {"id": "talk"} | {side: f"\n\nHuman: q\n\nAssistant: {side}" for side in CHAT},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json"])
def test_json_lines(name, write_rows, tmp_path):
    path = write_rows(ROWS, name)
    first, *others = read_preferences(path)["id"]
    output = tmp_path / f"out-{name}"
    assert Files(path).write_cleaned(str(output), drop={first}, flip={*others}) == 6
    sides = {"chosen": "y", "rejected": "x"}
    assert read_lines(output) == [
        {"prompt": "2", "chosen": " b", "rejected": " a", "flipped": False, "eta": 0.75, "score": [1, 2]},
        {"prompt": "2", "chosen": " b", "rejected": " a", "flipped": 1},
        {"id": "a", "prompt": "p", **sides, "score_rejected": 1, "margin": None},
        {"id": "b", "prompt": "p", **sides, "score_chosen": 2, "margin": -1},
        *({"id": row["id"], "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS[5:]),
    ]
    assert Files(path).write_cleaned(str(output), set(), set()) == 7
    assert read_lines(output) == ROWS, "nothing to clean, nothing changed, no ids added"


def test_parquet(tmp_path):
    columns = {
        "when": pa.array([1, 2**60 + 1, 3], pa.timestamp("ns")),
        "chosen": pa.array([" a", " b", " c"], pa.large_string()),
        "rejected": pa.array([" x", " y", " z"]),
        "prompt": pa.array(["p", "q", "p"], pa.dictionary(pa.int32(), pa.string())),
        "eta": pa.array([0.5, None, 0.25], pa.float32()),
        "id": pa.array([7, 8, 9]),
    }
    table, output = pa.table(columns, metadata={"who": "me"}), tmp_path / "out.parquet"
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    source = Files(str(tmp_path / "in.parquet"))
    assert source.write_cleaned(str(output), drop={"7"}, flip=set()) == 2
    found = pq.read_table(output)
    assert found.schema.equals(table.schema) and found.to_pylist() == table.slice(1).to_pylist()
    assert source.write_cleaned(str(output), drop={"7"}, flip={"9"}) == 2
    found = pq.read_table(output)
    place = table.schema.get_field_index("rejected")
    assert found.schema.equals(table.schema.set(place, pa.field("rejected", pa.large_string())))
    assert found.schema.metadata[b"who"] == b"me"
    assert found["when"].equals(table["when"].slice(1)) and found["id"].to_pylist() == [8, 9]
    assert found["chosen"].to_pylist() == [" b", " z"] and found["rejected"].to_pylist() == [" y", " c"]
    assert found["eta"].to_pylist() == [None, 0.75]


SIDED = {
    "score_chosen": 8.5, "score_rejected": 2, "chosen_model": "a", "rejected_model": "b", "chosenTime": [1],
    "rejectedTime": [2], "response-CHOSEN": None, "response-REJECTED": "x", "margin": 6.5, "a_diff": "+.5",
    "meta": {"chosen_score": 1.5, "rejected_score": 2, "margin": -0.5, "eta": 0.9, "source": "s"},
    "winner": "A", "chosen_index": 0, "label": 1, "note_margin": "wide", "tokens": 7, "difficulty": 2,
}  # fmt: skip
SWAPPED = SIDED | {
    "score_chosen": 2, "score_rejected": 8.5, "chosen_model": "b", "rejected_model": "a", "chosenTime": [2],
    "rejectedTime": [1], "response-CHOSEN": "x", "response-REJECTED": None, "margin": -6.5, "a_diff": "-.5",
}  # fmt: skip


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "folder"])
def test_columns_that_speak_of_a_side(ending, write_rows, tmp_path, capsys):
    rows = [{"id": str(i), "prompt": "p", "chosen": f"a{i}", "rejected": f"b{i}", **SIDED} for i in range(3)]
    source, output = Files(write_rows(rows)), tmp_path / f"out.{ending.replace('folder', 'jsonl')}"
    if ending == "folder":
        (tmp_path / "set").mkdir()
        write_rows(rows, "set/train.jsonl")
        source = HubPreferences(str(tmp_path / "set"))
    if ending == "parquet":
        source = Files(str(tmp_path / "rows.parquet"))
        pq.write_table(pa.Table.from_pylist(rows), source.files[0])
    source.write_cleaned(str(output), drop={"0"}, flip={"1"})
    found = read_lines(output) if ending != "parquet" else pq.read_table(output).to_pylist()
    assert found == [rows[1] | SWAPPED | {"chosen": "b1", "rejected": "a1"}, rows[2]]
    assert capsys.readouterr().out.splitlines() == [
        "Columns that are exchanged where a label is swapped: chosen, rejected, score_chosen, "
        "score_rejected, chosen_model, rejected_model, chosenTime, rejectedTime, response-CHOSEN, "
        "response-REJECTED.",
        "Columns whose numbers change their sign where a label is swapped: margin, a_diff, note_margin.",
        "Columns that are not changed where a label is swapped; check those that describe a side: "
        "meta, winner, chosen_index, label, tokens, difficulty.",
    ]
    source.write_cleaned(str(output), drop={"0"}, flip=set())
    assert capsys.readouterr().out == "", "nothing was swapped"


def test_parquet_sides_of_several_types(tmp_path):
    call = {"role": "assistant", "content": "x", "tool": {"n": 1}}
    columns = {
        "id": pa.array(["a", "b"]),
        "chosen": pa.array([[USER, call]] * 2),
        "rejected": pa.array([[USER, {"role": "assistant", "content": "y"}]] * 2),
        "chosen_n": pa.array([1, 2]),
        "rejected_n": pa.array([1.5, None]),
        "chosen_at": pa.array([2**60 + 1, 7], pa.timestamp("ns")),
        "rejected_at": pa.array([2**60 + 3, 8], pa.timestamp("ns")),
        "rejected_note": pa.array([None, None]),
        "chosen_note": pa.array(["n", "m"]),
    }
    path, output = str(tmp_path / "in.parquet"), tmp_path / "out.parquet"
    pq.write_table(pa.table(columns), path)
    Files(path).write_cleaned(str(output), set(), {"b"})
    found = pq.read_table(output)
    assert found["chosen_n"].to_pylist() == [1, None] and found["rejected_n"].to_pylist() == [1.5, 2]
    times = [found[name].cast(pa.int64()).to_pylist() for name in ("chosen_at", "rejected_at")]
    assert times == [[2**60 + 1, 8], [2**60 + 3, 7]]
    notes = [found[name].to_pylist() for name in ("rejected_note", "chosen_note")]
    assert notes == [[None, "m"], ["n", None]]
    assert found["rejected"].to_pylist()[1] == [USER | {"tool": None}, call]
    assert read_preferences(output)["rejected"][1] == read_preferences(path)["chosen"][1]
    for wrong, said in (
        ({"chosen_n": pa.array(["1", "2"])}, "string|double"),
        ({"margin": pa.array([1, 2], pa.uint8())}, "unsigned"),
    ):
        pq.write_table(pa.table(columns | wrong), path)
        with pytest.raises(UserError, match=rf"cannot hold its values where a label is swapped \(.*({said})"):
            Files(path).write_cleaned(str(output), set(), {"b"})
        assert Files(path).write_cleaned(str(output), {"a"}, set()) == 1


def test_messages_and_tools_of_a_hub_dataset(tmp_path):
    call = {"tool_calls": [{"function": {"name": "f", "arguments": {"n": 1}}}], "reasoning_content": "r"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": {"enum": ["x", None]}}}}]
    more = {"tools": json.dumps(tools), "chat_template_kwargs": {"enable_thinking": False}}
    more |= {"eta": 0.25, "augmented_prompt": [USER | {"content": "again"}]}
    sides = {"chosen": {"content": None, **call}, "rejected": {"content": "y"}}
    sides = {side: [{"role": "assistant", **message}] for side, message in sides.items()}
    (tmp_path / "set").mkdir()
    rows = [{"prompt": [USER | {"content": f"q{i}"}], **sides, **more} for i in range(3)]
    write_lines(tmp_path / "set" / "train.jsonl", rows)
    source, path = HubPreferences(str(tmp_path / "set")), tmp_path / "out.jsonl.gz"
    with pytest.raises(UserError, match="the source's own rows are"):
        source.write_cleaned(str(tmp_path / "set" / "more.jsonl"), set(), set())
    known = source.load_all()
    assert known["template_fields"][0] == "enable_thinking reasoning_content tool_calls tools"
    assert source.write_cleaned(str(path), set(), set()) == 3
    assert read_preferences(path)[:] == known[:]
    assert source.write_cleaned(str(path), {known["id"][0]}, {known["id"][1]}) == 2
    found = read_preferences(path)
    assert found["id"][1] == known["id"][2] and found["eta"][:] == [0.75, 0.25]
    assert [found[side][0] for side in sides] == [known[side][1] for side in ("rejected", "chosen")]
    assert found["tools"][0] == known["tools"][1] and found["chosen"][1] == known["chosen"][2]


def test_rows_that_training_cannot_use(tmp_path, write_rows, capsys):
    """A file has a prompt in each row, or in none; numbers and truth values may be texts."""
    rows = [{side: f"\n\nHuman: {i}\n\nAssistant: {side}" for side in CHAT} for i in range(3)]
    rows += [dict.fromkeys(CHAT, "\n\nHuman: a"), rows[0] | {"rejected": rows[1]["rejected"]}]
    folder, path = tmp_path / "set.parquet", str(tmp_path / "out.jsonl")  # as Spark names a folder
    (folder / "harmless-base").mkdir(parents=True)
    write_lines(folder / "harmless-base" / "train.jsonl", rows)
    assert HubPreferences(str(folder)).write_cleaned(path, set(), set()) == 5 and read_lines(path) == rows
    source = AnthropicHH(str(folder), ["harmless-base"])
    assert source.write_cleaned(path, set(), set()) == len(read_preferences(path)) == 3
    assert "2 rows without a common prompt are left out" in capsys.readouterr().out
    source = Files(write_rows([ROWS[1] | {"id": "a", "eta": "0.25", "flipped": "false"}]))
    assert source.write_cleaned(path, set(), {"a"}) == 1
    assert [(row["eta"], row["flipped"]) for row in read_lines(tmp_path / "out.jsonl")] == [(0.75, True)]


def test_bad_input(write_rows, tmp_path):
    path, held = write_rows(ROWS[1:]), str(tmp_path / "held.jsonl")
    with pytest.raises(UserError, match="the source's own rows are; name"):
        Files(path, validation=held).check_output(held)
    for output, drop, said in (
        (path, set(), "the source's own rows are; name another file"),
        (str(tmp_path / "out.jsonl"), {"gone"}, r"no row 'gone' any more \(1 of 1"),
    ):
        with pytest.raises(UserError, match=said):
            Files(path).write_cleaned(output, drop, set())
    assert not (tmp_path / "out.jsonl").exists()
