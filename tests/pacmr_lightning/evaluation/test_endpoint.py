"""The endpoint against a real HTTP server that misbehaves."""

import asyncio
import logging
import random
import re
import sys
import time

import pytest

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.answer_store import AnswerStore
from pacmr_lightning.evaluation.chat_completion import Tokens, without_thoughts
from pacmr_lightning.evaluation.endpoint import Endpoint

from .faulty_server import SECRET, message

HANG = 2
"""Seconds after which a client gives up; good answers of the same server must be there before."""


def reply(messages):
    return f"You said: {messages[-1]['content']}"


def said(count, start=0):
    return [[{"role": "user", "content": f"word {i}"}] for i in range(start, start + count)]


def is_stored(answer):
    return answer.now == Tokens()


def test_answers_in_order_each_asked_once_and_kept(server, store):
    pauses = random.Random(1)

    def later(messages):
        time.sleep(0.02 * pauses.random())
        return reply(messages)

    server.reply, server.together = later, 3
    endpoint = Endpoint("judge", base_url=server.url, concurrency=3)
    conversations = [*said(8), *said(4), *said(2)]
    answers = endpoint.ask(conversations, store)
    assert [a.text for a in answers] == [reply(c) for c in conversations]
    # The six that came twice were billed once.
    assert [a.billed for a in answers] == [Tokens(100, 10)] * 8 + [Tokens()] * 6
    assert all((a.now, a.problem) == (a.billed, None) for a in answers)
    assert len(server.requests) == 8 and server.most_at_once == 3
    sent = [(r["model"], r["max_tokens"], r["temperature"]) for r in server.requests]
    assert sent == [("judge", 96, 0.0)] * 8

    again = endpoint.ask(said(9), store)
    assert [*map(is_stored, again)] == [True] * 8 + [False] and len(server.requests) == 9
    assert (again[0].text, again[0].billed, again[0].now) == ("You said: word 0", Tokens(100, 10), Tokens())
    # Whatever changes an answer asks anew.
    for options in ({"model": "other"}, {"temperature": 0.5}, {"max_tokens": 5}):
        other = Endpoint(**{"model": "judge", "base_url": server.url, **options})
        before = len(server.requests)
        assert not is_stored(other.ask(said(1), store)[0]) and len(server.requests) == before + 1


@pytest.mark.parametrize("fault", [500, 429, "html", message(" \n"), "cut", "truncated body", "hang"])
def test_faults_are_retried(fault, server, store):
    server.script = [fault]
    endpoint = Endpoint("judge", base_url=server.url, retries=1, timeout=HANG if fault == "hang" else 60)
    [answer] = endpoint.ask(said(1), store)
    assert answer.text == "You said: word 0" and len(server.requests) == 2


def test_the_server_says_how_long_to_wait(server, store):
    server.script = ["status 429, retry after 1 s"]
    start = time.monotonic()
    [answer] = Endpoint("judge", base_url=server.url, retries=1).ask(said(1), store)
    # At most a few seconds more on any machine: without the server's word it would be half a second.
    assert answer.text == "You said: word 0" and 1 <= time.monotonic() - start < 30


@pytest.mark.parametrize(("fault", "good"), [("hang", 0), ("html", 0), (503, 0), (503, 10)])
def test_a_server_that_breaks_down_stops_early(fault, good, server, store):
    server.script, server.always = [None] * good, fault
    limit = 0.3 if fault == "hang" else 60  # nothing that is in time is expected of a server that hangs
    endpoint = Endpoint("judge", base_url=server.url, retries=0, timeout=limit, concurrency=4)
    with pytest.raises(UserError, match=r"judge'\) failed 4 requests in a row \(.*see to the server"):
        endpoint.ask(said(100), store)
    assert len(server.requests) < 9 + 2 * good
    server.always = None
    answers = Endpoint("judge", base_url=server.url).ask(said(20), store)
    assert sum(map(is_stored, answers)) == good and all(a.text for a in answers)


def test_faults_of_single_conversations_never_stop(server, store):
    endpoint = Endpoint("judge", base_url=server.url, retries=0, concurrency=2)
    too_long = (400, {"message": "'max_tokens' is too large: the maximum context length is 512 tokens"})
    flagged = (403, {"message": "your input was flagged"})
    server.script = [None]
    for fault in (too_long, flagged, message(None, "content_filter"), message(" \n"), "html"):
        server.always = fault
        answers = endpoint.ask(said(10), store)
        # Of two that are asked at once, either may come first; what has been answered stays so.
        assert [a.text is None for a in answers].count(False) == 1
        assert all(a.problem for a in answers if a.text is None)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (404, "status 404: no 404"),
        ({"error": {"message": "No credits", "code": 402}}, "No credits"),
        ((429, {"message": "Your quota", "code": "insufficient_quota"}), "Your quota"),
    ],
)
def test_what_no_retry_mends_stops_at_once(fault, reason, server, store, monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    endpoint = Endpoint("judge", base_url=server.url, key_variable="MY_KEY", concurrency=2, retries=1)
    server.script = [message(" \n"), None, *[None] * 5]
    server.always = fault
    told = rf"{server.url} .* refuses all requests \(.*{reason}.*variable MY_KEY.*base_url"
    with pytest.raises(UserError, match=told):
        endpoint.ask(said(50), store)
    assert len(server.requests) <= 7 + 2 * 2 * 2
    server.always = None
    answers = endpoint.ask(said(50), store)
    assert sum(map(is_stored, answers)) == 6
    # The stopped call has kept its bill, of the answer that was thrown away too.
    assert fault != 404 or sum(a.billed.prompt for a in answers) == 5100


NO_CHOICE = {"choices": None, "usage": None}
NO_CHAT = "the server's answer is no chat completion"
FREE, ALL, UNCOUNTED = Tokens(), Tokens(100, 10), Tokens(uncounted=1)
RAW = {"message": "Provider returned error", "metadata": {"raw": "busy", "provider_name": "P"}}
PARTS = [{"type": "thinking", "thinking": [{"type": "text", "text": "no"}]}, {"type": "text", "text": "yes"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
TEXTS = ("whole", "half", "yes")
SENT = [
    # Errors of providers inside a 200, as gateways pass them on: what is sent, its text or problem, its bill.
    (NO_CHOICE | {"error": RAW}, 'status 502: {"message": "Provider returned error", "metadata"', FREE),
    (NO_CHOICE | {"code": "daily", "message": "later"}, "status 502: later", FREE),
    (NO_CHOICE, NO_CHAT, UNCOUNTED),
    ({"error": None}, "whole", ALL),
    ([{"error": {"code": 503, "message": "loading"}}], "status 503: loading", FREE),
    (message("half", error={"code": 429, "message": "slow down"}), "status 429: slow down", ALL),
    ([1], f"{NO_CHAT}: '[1]'", UNCOUNTED),
    # Finish reasons of several providers.
    (message("<think>Hm.\nA", "length"), "no text within max_tokens; the model may need more", ALL),
    (message("half", "network_error"), "the answer broke off (finish_reason network_error)", ALL),
    (message("half", "end_turn"), "half", ALL),
    # Statuses, and connections that break.
    ((400, {"message": "no \ud800"}), "status 400: no ?", FREE),
    (500, "status 500: no 500 for Bearer none", FREE),
    ("cut", "the connection was cut", UNCOUNTED),
    ("html", f"{NO_CHAT}: 'Welcome to the proxy'", UNCOUNTED),
    # Contents in parts, and what stands in the place of a content.
    (message(PARTS), "yes", ALL),
    ("hang", f"no answer within {HANG} s", UNCOUNTED),
    (message(None, reasoning="Hm."), "the answer has no text", ALL),
    (message(None, tool_calls=TOOLS), "the answer has no text", ALL),
    (message({"text": "x"}), NO_CHAT, ALL),
    (message("\ud800"), NO_CHAT, ALL),
    # Counts of reasoning in the total only, and none.
    ({"usage": {"prompt_tokens": 21, "completion_tokens": 0, "total_tokens": 81}}, "whole", Tokens(21, 60)),
    ({"usage": {"prompt_tokens": 21, "completion_tokens": None}}, "whole", Tokens(21, 0)),
    ({"usage": None}, "whole", UNCOUNTED),
]


def test_what_servers_send(server, store):
    endpoint = Endpoint("judge", base_url=server.url, retries=0, concurrency=1, timeout=HANG)
    server.script = [None, *(body for body, *_ in SENT)]
    answers = endpoint.ask(said(1 + len(SENT)), store)[1:]
    for answer, (body, told, billed) in zip(answers, SENT, strict=True):
        assert (answer.text or answer.problem).startswith(told) and answer.billed == billed, body
        assert (answer.problem is None) == (answer.text is not None) == (told in TEXTS), body
    # What is no answer is asked again by the next call, which adds to the bill, and an answer never.
    again = endpoint.ask(said(1 + len(SENT)), store)[1:]
    for i, (answer, (body, told, billed)) in enumerate(zip(again, SENT, strict=True), 1):
        assert answer.text == (told if told in TEXTS else f"You said: word {i}"), body
        assert (answer.now, answer.billed) == ((FREE, billed) if told in TEXTS else (ALL, billed + ALL))
    assert len(server.requests) == 1 + len(SENT) + sum(told not in TEXTS for _, told, _ in SENT)
    assert str(Tokens(1234, 5, 2)) == "1,234 in, 5 out, 2 requests without a count"


@pytest.mark.parametrize("fault", [401, "html"])
def test_the_key_is_nowhere_though_the_server_repeats_it(fault, server, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("MY_KEY", f"{SECRET}\n")
    caplog.set_level(logging.DEBUG)
    endpoint = Endpoint("judge", base_url=server.url, key_variable="MY_KEY", concurrency=1, retries=1)
    server.script = [None, *[fault] * 2, None]
    with AnswerStore(tmp_path / "answers.sqlite") as store:
        try:
            sentence = str([a.problem for a in endpoint.ask(said(3), store)])
        except UserError as error:
            sentence = str(error)
    assert server.keys == {f"Bearer {SECRET}"}
    assert fault == "html" or "for Bearer ***" in sentence
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    output = "".join(capfd.readouterr())
    assert b"You said: word 0" in files
    for text in (sentence, files.decode(errors="replace"), caplog.text, output, str(endpoint.settings)):
        assert SECRET not in text
    assert caplog.records  # something was logged that could have held it


def test_without_a_key(store, monkeypatch):
    monkeypatch.setenv("MY_KEY", "“secret”")
    endpoint = Endpoint("judge", base_url="https://api.example.com/v1", key_variable="MY_KEY")
    with pytest.raises(UserError, match="characters that no API key has") as caught:
        endpoint.ask(said(1), store)
    assert "secret" not in str(caught.value)


def test_without_the_package(server, store, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match=re.escape("pip install 'pacmr-lightning[judge]'")):
        Endpoint("judge", base_url=server.url).ask(said(1), store)


def test_in_a_notebook(server, store):
    async def cell():
        return Endpoint("judge", base_url=server.url).ask(said(2), store)

    assert [a.text for a in asyncio.run(cell())] == ["You said: word 0", "You said: word 1"]


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("base_url", "http://localhost:8000v1", "base_url is 'http://localhost:8000v1', but it must look"),
        ("base_url", "localhost:8000", "base_url is 'localhost:8000', but it must look like http"),
        ("base_url", "https://me:pass@api.example.com/v1", "base_url holds a password for api.example.com"),
        *((name, 0, f"{name} is 0") for name in ("max_tokens", "concurrency", "timeout")),
        *((name, -1, f"{name} is -1") for name in ("temperature", "retries")),
    ],
)
def test_bad_options(option, value, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        Endpoint(**{option: value})
    assert "pass@" not in str(caught.value)


ANSWER = "Comparison: clear.\nPreferred: B"
REASONED = {
    f"<think>Either\nPreferred: A\nor not</think>\n\n{ANSWER}": ANSWER,
    f"\n<Thinking>\nPreferred: A\n</thinking>{ANSWER}\n": ANSWER,
    f"<reasoning>x</reasoning>\n<thought>y</thought>{ANSWER}": ANSWER,
    f"[THINK]x[/THINK]{ANSWER}": ANSWER,
    f"the beginning stood in the prompt\nPreferred: A</think>{ANSWER}": ANSWER,
    f"<mm:think>one <think>in</think> the other</mm:think>{ANSWER}": ANSWER,
    f"<think>x</think>{ANSWER}\n<think>cut off": ANSWER,
    "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final"
    f"<|message|>{ANSWER}<|return|>": ANSWER,
    f"analysisThe user wants Preferred: Aassistantfinal{ANSWER}": ANSWER,
    **dict.fromkeys(("<think>x\nPreferred: A", "<think>nothing after it</think>"), ""),
    "<|channel|>analysis<|message|>cut": "",
}
OTHER = (f" {ANSWER}\n", "A leaks its <think> tag.\nPreferred: B", "analysis of both", "a < b, <b>B</b>")
OTHER += ("<o>\n<reason>late</reason></o>", "Its\n<reasoning>x</reasoning>\nis B", "late</reason>, so B")
REASONED |= {f"<think>x</think>{text}": text.strip() for text in OTHER}


def test_reasoning_is_no_answer():
    for text, answer in (REASONED | {text: text for text in OTHER}).items():
        assert without_thoughts(text) == answer, text


def test_long_text_takes_no_time():
    began = time.monotonic()
    for text in ("<think>" + "a <think> " * 10_000, "x </think>" * 10_000, "<|channel|>" * 10_000):
        without_thoughts(text)
    assert time.monotonic() - began < 5
