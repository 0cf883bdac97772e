"""``pacmr judge``: a real HTTP server with faults, kills, reruns, and bad input."""

import json
import random
import re
from functools import partial

import pytest
from transformers import LlamaForSequenceClassification

from pacmr_lightning import cli
from pacmr_lightning.commands.judge import judge as judge_files
from pacmr_lightning.embedded_world import ATTRIBUTES, World
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation import win_rate
from pacmr_lightning.evaluation.judging import EndpointJudge
from pacmr_lightning.evaluation.win_rate import summarize

from ...conftest import ended, read_lines
from ..evaluation.faulty_server import message, prefer_longer

reply = prefer_longer

PAIRS = 24
"""Of pair i the response of A is longer, where i % 3 is 0, as long as B's (1), or shorter (2)."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    # A logistic regression each, which the tests of the win rate look at.
    monkeypatch.setattr(win_rate, "summarize", partial(summarize, resamples=20))


def rows(side):
    """Of a model; 0 is A, 1 is B."""
    lengths = [(9, 5), (6, 6), (4, 7)]
    counts = {"finish_reason": "stop", "prompt_tokens": 5, "response_tokens": 3}
    texts = (f"{i:02} {'ab'[side] * lengths[i % 3][side]}" for i in range(PAIRS))
    return [{"id": f"p{i}", "prompt": f"Post {i}", "response": t, **counts} for i, t in enumerate(texts)]


@pytest.fixture
def files(write_rows):
    second = rows(1)
    random.Random(0).shuffle(second)
    return write_rows(rows(0), "a.jsonl"), write_rows(second, "b.jsonl")


def read(folder):
    return json.loads((folder / "summary.json").read_text()), read_lines(folder / "verdicts.jsonl")


EXPECTED = ["win", "tie", "loss"] * (PAIRS // 3)


def test_verdicts_summary_table_and_figure(files, server, tmp_path, capsys):
    judge = EndpointJudge("tldr", model="m", base_url=server.url)
    judge_files(*files, judge, str(tmp_path / "out"))
    summary, verdicts = read(tmp_path / "out")
    assert [row["id"] for row in verdicts] == [f"p{i}" for i in range(PAIRS)]
    assert [row["verdict"] for row in verdicts] == EXPECTED
    assert [[order["verdict"] for order in row["orders"]] for row in verdicts[:3]] == [
        ["win", "win"],
        ["loss", "win"],  # of equal lengths the rule takes what it is shown second
        ["loss", "loss"],
    ]
    assert all(order["answer"].startswith("Comparison: ") for row in verdicts for order in row["orders"])
    assert verdicts[2]["responses"] == ["02 aaaa", "02 bbbbbbb"] and verdicts[2]["prompt"] == "Post 2"
    assert (summary["wins"], summary["ties"], summary["losses"], summary["pairs"]) == (8, 8, 8, PAIRS)
    assert (summary["first"], summary["second"]) == files
    assert summary["judge"]["class"] == "EndpointJudge" and summary["judge"]["settings"]["task"] == "summary"
    assert (summary["win_score"]["value"], summary["flipped"]) == (1.0, pytest.approx(1 / 3))
    # In a third of the pairs B is named twice, in the others A and B once.
    assert summary["first_shown"] == pytest.approx(1 / 3)
    # Of "00 aaaa"; the rows' tokens are fewer.
    assert summary["mean_length"] == pytest.approx([28 / 3, 9])
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if line.startswith(" A wins"))
    assert line.split()[4:6] == ["8", "33.3%"]
    assert "mean length of A and B: 9.3 and 9.0 characters" in text
    assert "33.3% of verdicts changed" in text
    assert {(r["model"], r["max_tokens"], r["temperature"]) for r in server.requests} == {("m", 96, 0.0)}
    with pytest.raises(UserError, match="of another comparison; name another folder with --output"):
        judge_files(*files[::-1], judge, str(tmp_path / "out"))


def test_missing_and_invalid_answers_are_ties_and_told(files, server, tmp_path, capsys):
    refused = message(None, refusal="I will not judge this.")
    server.script = [None, 500, None, message("half an", "length"), None, refused]
    judge = EndpointJudge("tldr", base_url=server.url, retries=0, concurrency=1)
    judge_files(*files, judge, str(tmp_path / "out"))
    summary, verdicts = read(tmp_path / "out")
    assert [row["verdict"] for row in verdicts] == ["tie", "tie", "tie", *EXPECTED[3:]]
    assert verdicts[0]["orders"][1]["problem"].startswith("status 500")
    problem = "the answer does not end in a verdict"
    refusal = {"verdict": "none", "answer": "I will not judge this.", "problem": problem}
    assert verdicts[2]["orders"][1] == refusal
    assert (summary["unanswered"], summary["invalid"]) == (1 / 48, 2 / 48)
    said = capsys.readouterr().out
    assert "1 requests failed (mostly: status 500" in said
    cut = "the answer was cut before a verdict; raise max_tokens, now 96"
    assert f"invalid answers: 2 (mostly: {cut})" in said
    # Only the missing one is asked for again.
    judge_files(*files, judge, str(tmp_path / "out"))
    assert len(server.requests) == 2 * PAIRS + 1
    assert [row["verdict"] for row in read(tmp_path / "out")[1]] == ["win", "tie", "tie", *EXPECTED[3:]]
    # Without any verdict there is no result.
    server.reply = lambda messages: "I like both."
    said = f"no verdict on any of {PAIRS} pairs (mostly: {problem}): 'I like both.'"
    with pytest.raises(UserError, match=re.escape(said)):
        judge_files(*files, EndpointJudge("hh", base_url=server.url), str(tmp_path / "none"))
    assert not (tmp_path / "none" / "summary.json").exists()


def test_every_billed_token_counts(files, server, tmp_path, capsys):
    """Of answers that were asked again, of questions without an answer, and of an earlier call."""
    options = ["--judge=EndpointJudge", "--judge.task=tldr", f"--judge.base_url={server.url}"]
    options += ["--judge.retries=1", "--judge.concurrency=1", "--judge.temperature=null"]
    options += ["--prompt_price=10", "--completion_price=100"]
    output = f"--output={tmp_path / 'out'}"
    # One answer at the second request, one question without an answer, and one server error, which is free.
    thought, broken = message(None, reasoning_content="Hm, Preferred: A"), message("half an", "error")
    server.script = [message("", "length"), None, thought, broken, 500, None, {"usage": None}]
    cli.main(["judge", *files, *options, output])
    summary, verdicts = read(tmp_path / "out")
    assert {"max_tokens", "messages", "model"} == set(server.requests[0])
    names = {"answers.sqlite", "summary.json", "verdicts.jsonl"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    answered = 2 * PAIRS - 1
    now = {"prompt": 100 * (answered - 1 + 3), "completion": 10 * (answered - 1 + 3)}
    assert summary["tokens"] == {"all": now, "now": now}
    assert summary["uncounted_requests"] == {"all": 1, "now": 1}
    cost = (10 * now["prompt"] + 100 * now["completion"]) / 1e6
    assert summary["cost"] == {"all": pytest.approx(cost), "now": pytest.approx(cost)}
    assert verdicts[0]["orders"][1]["problem"] == "the answer broke off (finish_reason error)"
    said = capsys.readouterr().out
    tokens = f"tokens: {now['prompt']:,} in, {now['completion']:,} out"
    assert tokens in said and f"cost: {cost:.2f}" in said
    assert "not in these tokens: 1 requests without a count, which the server may bill" in said

    server.script = [message(" \n")]
    cli.main(["judge", *files, *options, output])
    again, verdicts = read(tmp_path / "out")
    assert again["tokens"]["now"] == {"prompt": 200, "completion": 20} and again["unanswered"] == 0
    assert again["cost"]["now"] == pytest.approx((10 * 200 + 100 * 20) / 1e6)
    assert again["tokens"]["all"] == {name: now[name] + again["tokens"]["now"][name] for name in now}
    assert again["uncounted_requests"] == {"all": 1, "now": 0}
    before = (tmp_path / "out" / "verdicts.jsonl").read_bytes()
    cli.main(["judge", *files, *options, output])
    assert (tmp_path / "out" / "verdicts.jsonl").read_bytes() == before
    last, _ = read(tmp_path / "out")
    assert last["tokens"]["now"] == {"prompt": 0, "completion": 0} and last["cost"]["now"] == 0


def test_empty_and_identical_responses(write_rows, server, tmp_path, capsys):
    first, second = (
        [{"id": i, "prompt": "p", "response": t} for i, t in enumerate(texts)]
        for texts in (("", "same", "", "long"), ("text", " same", " ", "x"))
    )
    judge = EndpointJudge("hh", base_url=server.url, concurrency=1)
    judge_files(write_rows(first, "$a_$.jsonl"), write_rows(second, "b.jsonl"), judge, str(tmp_path / "out"))
    summary, verdicts = read(tmp_path / "out")
    assert [row["verdict"] for row in verdicts] == ["loss", "tie", "tie", "win"]
    assert verdicts[1]["orders"] == [] and len(server.requests) == 4
    assert "Response A: \n\nResponse B: text\n\n" in server.requests[0]["messages"][1]["content"]
    assert summary["identical"] == 2 and "an interval of no width" in capsys.readouterr().out


def test_samples_of_two_runs_by_the_gold_reward(write_rows, tmp_path):
    world, rng = World(), random.Random(0)
    prompts = world.prompts()[:5] * 4
    first, second = (
        [{"prompt": p, "response": " " + " ".join(rng.sample(ATTRIBUTES, 4))} for p in prompts] for _ in "ab"
    )
    (tmp_path / "run").mkdir()
    files = write_rows(first, "run/samples.jsonl"), write_rows(second, "b.jsonl")
    cli.main(["judge", *files, "--judge", "GoldJudge"])
    summary, verdicts = read(tmp_path / "run" / "judge")
    better = (world.gold_reward(**a) - world.gold_reward(**b) for a, b in zip(first, second, strict=True))
    expected = ["win" if x > 0 else "loss" if x < 0 else "tie" for x in better]
    assert [row["verdict"] for row in verdicts] == expected
    assert (summary["pairs"], summary["prompts"], summary["judge"]["name"]) == (20, 5, "gold reward")


def test_a_reward_model_judges(files, tiny_llama, tmp_path):
    reward_model = {"model_class": LlamaForSequenceClassification, "num_labels": 1}
    folder = tiny_llama(tmp_path / "rm", **reward_model, initializer_range=0.3)
    cli.main(["judge", *files, "--judge", "RewardModelJudge", "--judge.model", folder])
    summary, verdicts = read(tmp_path / "judge")
    assert {row["verdict"] for row in verdicts} == {"win", "loss"}
    assert all(row["orders"][0]["answer"].startswith("scores ") for row in verdicts)
    assert (summary["flipped"], summary["first_shown"], summary["invalid"]) == (0, 0.5, 0)


def test_one_sentence_and_status_2(files, write_rows, server, tmp_path, capsys):
    def refused(*arguments):
        status, _, said = ended(capsys, ["judge", *arguments])
        assert status == 2
        # Beside it there is the progress bar, and the server's own complaints of clients that hang up.
        (told,) = (line for line in said.splitlines() if line.startswith("pacmr: error: "))
        assert told.endswith(".")
        return told

    endpoint = ["--judge", "EndpointJudge", "--judge.base_url", server.url]
    no_key = "The environment variable OPENAI_API_KEY holds no API key for https://api.openai.com/v1"
    assert no_key in refused(*files, *endpoint[:2])
    assert "Judgge is no class that fits here" in refused(*files, "--judge", "Judgge")
    assert "judge is missing; give --judge EndpointJudge with --judge.task tldr or hh" in refused(*files)
    assert "give both or none" in refused(*files, *endpoint, "--completion_price", "1")
    no_file = "nowhere.jsonl is no file; name a file of responses, such as a run's generations"
    assert no_file in refused(files[0], "nowhere.jsonl", *endpoint)
    assert "have the same 24 responses" in refused(files[0], files[0], *endpoint)
    few = write_rows(rows(1)[:20], "few.jsonl")
    assert "few.jsonl lacks 4 of the 24 ids of" in refused(files[0], few, *endpoint)
    assert "b.jsonl is a file and no folder" in refused(*files, *endpoint, "--output", files[1])
    assert not server.requests
    told = refused(*files, *endpoint, "--judge.task", "neither")
    assert "judge.task: expected 'summary', 'dialogue', 'tldr' or 'hh', but got neither" in told
    server.always = (400, {"message": "'temperature' is not supported with this model"})
    told = refused(*files, *endpoint, "--judge.retries", "0")
    assert "'temperature' is not supported with this model" in told and "temperature (null leaves it" in told
    server.always = 401
    assert "refuses all requests (status 401: no 401" in refused(*files, *endpoint)
    assert "second" in refused(files[0])
    assert "is not of the synthetic benchmark" in refused(*files, "--judge", "GoldJudge")
    assert not (tmp_path / "judge" / "verdicts.jsonl").exists()
    for text in ("{", "[]"):
        (tmp_path / "judge" / "summary.json").write_text(text)
        assert "summary.json is no summary of pacmr judge (" in refused(*files, *endpoint)
