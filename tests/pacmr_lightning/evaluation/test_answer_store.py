"""The store of answers through kills, other processes, full disks and broken files."""

import os
import signal
import sqlite3
import textwrap

import pytest

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.answer_store import AnswerStore, content_key


def test_values_come_back(tmp_path):
    path = tmp_path / "new" / "folder" / "answers.sqlite"
    values = {f"key {i}": {"text": f"é\ud800 \0 {i}", "n": [i, 0.1, None, True]} for i in range(1234)}
    with AnswerStore(path) as store:
        assert store.get([]) == {} and store.get(["key 0"]) == {}
        store.put({})
        store.put(values)
        assert store.get([*values, "unknown"]) == values
        store.put({"key 3": "other"})
    with AnswerStore(str(path)) as store:
        assert store.get(list(values)) == values | {"key 3": "other"}
        assert store.get(["key 5"]) == {"key 5": values["key 5"]}


def test_content_keys():
    pairs = [("a", other) for other in ("b", ["b"], None, "None", 1, "1")]
    singles = [(one,) for one in ("ab", ["a", "b"], {"x": 1, "y": 2}, {"x": 2, "y": 1})]
    keys = [content_key(*each) for each in (*pairs, *singles)]
    assert len(set(keys)) == len(keys)
    assert content_key({"x": 1, "y": [2]}) == content_key({"y": [2], "x": 1})
    # The same in every version, or everything would be asked again: the SHA-256 of ["a", {"b": "\u00e9"}].
    assert content_key("a", {"b": "é"}) == "b72e855f74ee92c747739dbea489a6f006874289e2c0c85632a8e80d6f4d927d"


WRITER = textwrap.dedent("""
    import sys
    from pacmr_lightning.evaluation.answer_store import AnswerStore

    path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with AnswerStore(path) as store:
        for i in range(count):
            # Two keys at once: both are there, or none.
            store.put({f"{name} {i} a": "x" * 3000, f"{name} {i} b": i})
            print(i, flush=True)
""")


def test_a_kill_loses_nothing_that_was_put(tmp_path, forked, written=7):
    path = tmp_path / "answers.sqlite"
    writer = forked(WRITER, path, "w", 100_000)
    for _ in range(written):
        last = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    last = max([last, *map(int, writer.stdout.read().split())])
    assert writer.wait() == -signal.SIGKILL
    with AnswerStore(path) as store:
        pairs = [store.get([f"w {i} a", f"w {i} b"]) for i in range(last + 3)]
        assert all(pairs[i] == {f"w {i} a": "x" * 3000, f"w {i} b": i} for i in range(last + 1))
        assert {len(pair) for pair in pairs[last + 1 :]} <= {0, 2}
        store.put({"and": "on"})


def test_two_processes_at_once(tmp_path, forked):
    path = tmp_path / "answers.sqlite"
    writers = [forked(WRITER, path, name, 60) for name in ("one", "two")]
    for writer in writers:
        assert writer.communicate()[1] == "" and writer.returncode == 0
    with AnswerStore(path) as store:
        keys = [f"{name} {i} {part}" for name in ("one", "two") for i in range(60) for part in "ab"]
        assert len(store.get(keys)) == 240


def test_files_that_cannot_be_used(tmp_path):
    path = tmp_path / "answers.sqlite"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(UserError, match=r"answers.sqlite cannot be used \(.*delete it to begin anew"):
        AnswerStore(path).get(["key"])
    assert path.read_bytes() == b"no database at all" * 100
    path.unlink()
    with AnswerStore(path) as store:
        store.put({f"key {i}": "x" * 1000 for i in range(100)})
    path.write_bytes(path.read_bytes()[:8192] + os.urandom(100_000))  # broken later
    with pytest.raises(UserError, match="cannot be used"), AnswerStore(path) as store:
        store.get([f"key {i}" for i in range(100)])
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, value TEXT)")
        database.execute("INSERT INTO answers VALUES ('key', 'no JSON')")
    database.close()
    with AnswerStore(other) as store, pytest.raises(UserError, match=r"cannot be used \(Expecting value"):
        store.get(["key"])
    with pytest.raises(UserError, match="cannot be used"):
        AnswerStore(tmp_path)
