"""The store of answers: values, keys, two at once, and broken files."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.answer_store import AnswerStore, content_key


def test_values_come_back(tmp_path):
    path = tmp_path / "new" / "folder" / "answers.sqlite"
    values = {f"key {i}": {"text": f"é\ud800 \0 {i}", "n": [i, 0.1, None, True]} for i in range(1234)}
    with AnswerStore(path) as store, AnswerStore(str(path)) as other:
        assert store.get([]) == {} and store.get(["key 0"]) == {}
        store.put({})
        store.put(values)
        # They are in the file at once, for other processes and after a kill.
        assert other.get([*values, "unknown"]) == values
        other.put({"key 3": "other"})
        assert store.get(list(values)) == values | {"key 3": "other"}

        def put(each, name):
            for i in range(60):
                each.put({f"{name} {i}": i})

        with ThreadPoolExecutor() as threads:
            threads.map(put, (store, other), "ab")
        assert len(store.get([f"{name} {i}" for name in "ab" for i in range(60)])) == 120


def test_content_keys():
    pairs = [("a", other) for other in ("b", ["b"], None, "None", 1, "1")]
    singles = [(one,) for one in ("ab", ["a", "b"], {"x": 1, "y": 2}, {"x": 2, "y": 1})]
    keys = [content_key(*each) for each in (*pairs, *singles)]
    assert len(set(keys)) == len(keys)
    assert content_key({"x": 1, "y": [2]}) == content_key({"y": [2], "x": 1})
    # The same in every version, or everything would be asked again: the SHA-256 of ["a", {"b": "\u00e9"}].
    assert content_key("a", {"b": "é"}) == "b72e855f74ee92c747739dbea489a6f006874289e2c0c85632a8e80d6f4d927d"


def test_files_that_cannot_be_used(tmp_path):
    path = tmp_path / "answers.sqlite"
    with AnswerStore(path) as store:
        store.put({f"key {i}": "x" * 1000 for i in range(100)})
    whole = path.read_bytes()
    # Another file, one that was broken later, and values that are no JSON.
    for content in (b"no database" * 100, whole[:8192] + os.urandom(100_000), whole.replace(b'"xx', b"xxx")):
        path.write_bytes(content)
        told = pytest.raises(UserError, match=r"answers.sqlite cannot be used \(.*delete it to begin anew")
        with told, AnswerStore(path) as store:
            store.get([f"key {i}" for i in range(100)])
        assert path.read_bytes() == content
    with pytest.raises(UserError, match="cannot be used"):
        AnswerStore(tmp_path)
