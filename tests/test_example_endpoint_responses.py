"""examples/endpoint_responses.py: a model on a real server answers, in a file like pacmr predict's."""

import pytest

from examples.endpoint_responses import endpoint_responses
from pacmr_lightning.command_line.parser import run_tool
from pacmr_lightning.datamodules import Files
from pacmr_lightning.datamodules.evaluation_prompts import draw_prompts
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.endpoint import Endpoint

from .conftest import read_lines as rows_of
from .pacmr_lightning.evaluation.faulty_server import SECRET, message


def reply(messages):
    return f" You said: {messages[-1]['content']}"


@pytest.fixture
def endpoint(server):
    return lambda **options: Endpoint("tiny", server.url, **{"concurrency": 1, "retries": 0, **options})


QUESTION = [{"role": "system", "content": "Be calm."}, {"role": "user", "content": "What is the sea?"}]
SIDES = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
TURNS = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Why?\n\nAssistant:"
ROWS = [
    {"id": "post", "prompt": "POST: rain\n\nTL;DR:", "chosen": " a", "rejected": " b"},
    {"id": "transcript", "prompt": TURNS, "chosen": " a", "rejected": " b"},
    {"id": "chat", "prompt": QUESTION, "chat_template_kwargs": {"think": False}, **SIDES},
]


def test_each_kind_of_prompt(server, endpoint, write_rows, tmp_path, capsys):
    path, output = write_rows(ROWS), tmp_path / "new" / "out.jsonl"
    endpoint_responses(Files(path, path), str(output), endpoint(max_tokens=7, temperature=0.5))
    assert [(r["max_tokens"], r["temperature"]) for r in server.requests] == [(7, 0.5)] * 3
    user, assistant = ({"role": role} for role in ("user", "assistant"))
    assert [r["messages"] for r in server.requests] == [
        [user | {"content": "POST: rain\n\nTL;DR:"}],
        [user | {"content": "Hi"}, assistant | {"content": "Yes?"}, user | {"content": "Why?"}],
        QUESTION,
    ]
    rows = rows_of(output)
    assert [(row["id"], row["prompt"]) for row in rows] == [(row["id"], row["prompt"]) for row in ROWS]
    counts = {"finish_reason": "stop", "prompt_tokens": None, "response_tokens": None}
    answer = {"response": " You said: What is the sea?", "chat_template_kwargs": {"think": False}}
    assert rows[2] == rows[2] | answer | counts and len(rows[2]) == 7
    said = capsys.readouterr().out
    assert "3 responses of tiny, 0 of them truncated." in said
    assert "Not sent to the endpoint: the columns chat_template_kwargs; they are in the file." in said


def test_reasons_and_failures(server, endpoint, write_rows, tmp_path, capsys):
    rows = [{"id": i, "prompt": f"p {i}", "chosen": " a", "rejected": " b"} for i in range(5)]
    path, output = write_rows(rows), tmp_path / "out.jsonl"
    odd = [message("half an", "length"), message("whole", None), message(None, "content_filter")]
    server.script = [None, *odd, (400, {"message": "too long"})]
    endpoint_responses(Files(path, path), str(output), endpoint(max_tokens=11))
    assert [(row["id"], row["response"], row["finish_reason"]) for row in rows_of(output)] == [
        ("0", " You said: p 0", "stop"),
        ("1", "half an", "length"),
        ("2", "whole", "stop"),
    ]
    said = capsys.readouterr().out
    assert "2 requests failed (mostly: the answer broke off (finish_reason content_filter))" in said
    assert "3 responses of tiny, 1 of them truncated." in said
    endpoint_responses(Files(path, path), str(output), endpoint(max_tokens=11))
    assert len(server.requests) == 7 and [row["id"] for row in rows_of(output)] == list("01234")
    # The stored reason is kept.
    assert [row["finish_reason"] for row in rows_of(output)] == ["stop", "length", "stop", "stop", "stop"]
    server.always, none = odd[-1], tmp_path / "none.jsonl"
    for n, sentence in (
        (5, r"failed 3 requests in a row .*content_filter"),
        (0, "n is 0, but it must be at least 1, or null for all prompts"),
    ):
        with pytest.raises(UserError, match=sentence):
            endpoint_responses(Files(path, path), str(none), endpoint(max_tokens=12), n)
    assert not none.exists()


def test_from_the_command_line(server, write_rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    path, output = write_rows(ROWS), tmp_path / "out.jsonl"
    options = ["--source", "Files", "--source.train", path, "--source.validation", path]
    options += ["--output", str(output), "--endpoint.base_url", server.url]
    options += ["--endpoint.key_variable", "MY_KEY"]
    run_tool("endpoint_responses", endpoint_responses, [*options, "--endpoint.model", "m", "--n", "2"])
    drawn = draw_prompts(Files(path, path), 2, 42)  # as those of pacmr predict
    assert [row["id"] for row in rows_of(output)] == [prompt.id for prompt in drawn]
    assert len(drawn) == 2 and server.keys == {f"Bearer {SECRET}"}
    assert {(r["model"], r["max_tokens"], r["temperature"]) for r in server.requests} == {("m", 128, 0.0)}
    texts = [path.read_bytes().decode(errors="replace") for path in tmp_path.iterdir() if path.is_file()]
    assert not any(SECRET in text for text in [*texts, *capsys.readouterr()])
