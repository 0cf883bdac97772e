"""Which responses of two files belong together, and what is said where they do not."""

import json

import pytest

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.response_files import pair_rows, read_responses


def rows(count, word="a", **more):
    return [{"id": f"p{i}", "prompt": f"Post {i}", "response": f"{word} {i}", **more} for i in range(count)]


def test_ids_may_be_numbers_and_prompts_chats():
    """Rows may have further columns. That ids decide and not the order: test_judge.py."""
    chat = [{"role": "user", "content": "Hello?"}]
    one = {"id": 7, "prompt": chat, "response": "a", "response_tokens": 3, "finish_reason": "stop"}
    [pair] = pair_rows([one], [{"id": "7", "prompt": chat, "response": "", "response_tokens": None}])
    assert (pair.id, pair.prompt, pair.first, pair.second) == ("7", chat, "a", "")


def test_without_ids_by_prompt_and_order():
    first = [{"prompt": p, "response": f"a {i}"} for i, p in enumerate("xyxzx")]
    second = [{"prompt": p, "response": f"b {i}"} for i, p in enumerate("zxxyx")]
    pairs = pair_rows(first, second)
    assert [(p.prompt, p.first, p.second) for p in pairs] == [
        ("x", "a 0", "b 1"),
        ("y", "a 1", "b 3"),
        ("x", "a 2", "b 2"),
        ("z", "a 3", "b 0"),
        ("x", "a 4", "b 4"),
    ]
    assert len({p.id for p in pairs}) == 5
    # The same ids for the same prompts, whichever the other file is.
    assert [p.id for p in pairs] == [p.id for p in pair_rows(first, first)]
    with pytest.raises(UserError, match=r"B lacks 1 of the 5 responses of A, such as that of the prompt 'x'"):
        pair_rows(first, second[:-1], ("A", "B"))


def change(i, **values):
    changed = rows(5, "b")
    changed[i] |= values
    return changed


NO_IDS = [{"prompt": p, "response": "a"} for p in "xxy"]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (rows(7), r"^A lacks 2 of the 7 ids of B, such .* the id 'p5'; generate both from the same prompts"),
        (change(1, id="p0"), r"B, row 2 has the id 'p0' of an earlier row"),
        (change(1, prompt="Post 1 "), r"A and B have different prompts under 1 of 5 ids, such as 'p1'"),
        (change(1, id=None), "B, row 2 and row 1 do not both have an id"),
        (NO_IDS, "The rows of A have ids and those of B have none"),
        ([], "B is empty"),
        ([{"id": "p", "prompt": "p", "text": ""}], "B, row 1: the response is None, but it must be a text"),
        (change(1, prompt=[]), r"B, row 2: the prompt is \[\], but"),
        (change(1, response="\ud83d"), "B, row 2: prompt or response has half of a surrogate pair"),
        (change(1, prompt=[{"role": "user", "content": "\ud83d"}]), "half of a surrogate pair"),
        (change(1, prompt=[{"role": "user"}]), "B, row 2: the prompt is .* a text or chat messages"),
    ],
)
def test_bad_rows(second, sentence):
    with pytest.raises(UserError, match=sentence):
        pair_rows(rows(5), second, ("A", "B"))


def test_files(tmp_path):
    path = tmp_path / "generations.jsonl"
    # Characters at which str.splitlines would break a line.
    told = [
        {"prompt": "p", "response": "one\u2028two\x85three\x0cfour\nfive"},
        {"prompt": "q", "response": ""},
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in told]
    path.write_text("\ufeff" + "\n\n".join(lines) + "\n\n", encoding="utf-8")
    assert read_responses(path) == told
