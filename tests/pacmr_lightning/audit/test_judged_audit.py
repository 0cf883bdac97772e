"""``pacmr audit`` and ``pacmr refine`` with judges: a real endpoint, kills, faults and reruns."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from pacmr_lightning import cli
from pacmr_lightning.audit import AuditOptions, audit
from pacmr_lightning.commands.refine import refine
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.judging import GoldJudge

from ...conftest import write_lines
from ..evaluation.faulty_server import message, prefer_position_a
from .conftest import refused
from .test_audit_model import by_one_word

N, JUDGED = 240, 40
ANSWERS = "judge-answers.sqlite"


def reply(messages):
    """The golden response, whatever the label says; but the first one of every tenth prompt."""
    text = messages[-1]["content"]
    if "0:" in text:
        return prefer_position_a(messages)
    first = text[text.index("Response A:") : text.index("Response B:")]
    return f'Comparison: by the word.\nMore helpful: "{"A" if "golden" in first else "B"}"'


@pytest.fixture
def words(finished, server, inside):
    """``pacmr audit`` of a base model and pairs, a quarter of them with the golden response as rejected."""
    path = write_lines(inside / "pairs.jsonl", [by_one_word(i, wrong=i % 4 == 0) for i in range(N)])
    model = str(finished.parent / "model")
    judge = ["--judges+=EndpointJudge", "--judges.model", "judge", "--judges.base_url", server.url]
    return ["audit", model, "--data", path, *judge, "--judged_pairs", str(JUDGED)]


def test_votes_through_the_command(words, server, capsys):
    server.script = [message("", "length")]  # asked again, and billed
    cli.main([*words, "--scorer", "judge", "--prompt_price", "2000", "--completion_price", "10000"])
    told = capsys.readouterr()
    out, err = (" ".join(text.split()) for text in told)
    assert f"Judging {JUDGED} of {N} pairs in both orders with judge: {2 * JUDGED} calls, about" in err
    assert "cost about" in err
    billed = len(server.requests)
    assert billed == 2 * JUDGED + 1
    assert " score and judges " in out and " linear probe " in out
    assert f"A second annotator would probably contradict {N // 4} of {N} labels." in out
    table = pd.read_parquet("audit/pairs.parquet").set_index("id")
    votes = table["vote_1"].dropna()
    assert len(votes) == JUDGED
    for name, vote in votes.items():
        number = int(name)
        assert vote == (0 if number % 10 == 0 else -1 if number % 4 == 0 else 1)
    [row] = pd.read_csv("audit/judges.csv").to_dict("records")
    assert (row["judge"], row["pairs"], row["none"]) == ("judge", JUDGED, (votes == 0).sum())
    assert row["for_label"] == (votes == 1).sum() and row["against_label"] == (votes == -1).sum()
    assert 0.8 < row["reliability"] <= row["high"] <= 0.99 and f"{row['reliability']:.1%}" in out
    page = Path("audit/report.html").read_text()
    cost = f"cost {billed * (100 * 2000 + 10 * 10000) / 1e6:,.2f}."
    assert f"judge: tokens {100 * billed:,} in, {10 * billed:,} out; {cost}" in page
    assert "How reliable the judges are" in page and "judges: 0 for the label, 1 against" in page
    assert table["rank"].tolist() == sorted(table["rank"]) and table["judged_u"].is_monotonic_increasing
    wrong = table.index.map(lambda name: int(name) % 4 == 0)
    assert table["judged_u"][wrong].max() < table["judged_u"][~wrong].min()


def test_a_verdict_is_a_vote_on_each_row_of_a_pair(words, server):
    """Of 200 pairs the last 40 are labelled by two annotators, one for each response; ties are not judged."""
    place = [min(i, 160) + max(0, i - 160) // 2 for i in range(N)]
    rows = [by_one_word(place[i], wrong=i % 4 == 0 if i < 160 else i % 2 == 0) for i in range(N)]
    for row in rows[1:160:8]:
        row["label"] = "tie"
    write_lines("pairs.jsonl", [row | {"id": f"{i}", "annotator": "ab"[i % 2]} for i, row in enumerate(rows)])
    cli.main([*words, "--judged_pairs", "50"])
    assert len({json.dumps(body["messages"]) for body in server.requests}) == 100
    assert pd.read_csv("audit/judges.csv")["pairs"].tolist() == [50]
    table = pd.read_parquet("audit/pairs.parquet").set_index("id")
    assert table["vote_1"][[f"{i}" for i in range(1, 160, 8)]].isna().all()
    table = table.loc[[f"{i}" for i in range(160, N)]]
    first, second = table[::2].reset_index(), table[1::2].reset_index()
    assert (first["vote_1"].dropna() == -second["vote_1"].dropna()).sum() > 5
    assert (first["p"] + second["p"]).to_numpy() == pytest.approx(1, abs=1e-6)


def test_the_same_command_asks_for_what_is_new(words, server, capsys):
    server.script = [None, None, "html"]
    one_by_one = ["--judges.retries", "0", "--judges.concurrency", "1"]
    for budget, requests, told in (
        (10, 20, "1 requests failed"),
        (10, 21, "1 calls"),
        (25, 51, "30 calls"),
    ):
        cli.main([*words, *one_by_one, "--judged_pairs", str(budget)])
        assert len(server.requests) == requests and told in capsys.readouterr().err
    assert len({json.dumps(body["messages"]) for body in server.requests}) == 50


def test_a_broken_endpoint_leaves_the_last_audit(words, server, capsys):
    cli.main(words)
    before = {path: path.read_bytes() for path in Path("audit").iterdir() if path.name != ANSWERS}
    server.always = 401
    said = refused(capsys, *words, "--judged_pairs", str(JUDGED + 20), "--judges.concurrency", "1")
    assert "refuses all requests (status 401" in said
    server.always, server.reply = None, lambda messages: "I cannot say."
    said = refused(capsys, *words, "--judges.task", "tldr")
    assert "gave no verdict on any of 40 pairs (mostly: the answer does not end in a verdict)" in said
    assert {path: path.read_bytes() for path in Path("audit").iterdir() if path.name != ANSWERS} == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--scorer", "judge"], "scorer is judge, but judges is missing; add --judges+=EndpointJudge"),
        (["--judged_pairs", "5"], "judged_pairs is 5, but there are no judges; leave it out"),
        (["--judges+=GoldJudge", "--prompt_price", "5"], "completion_price is None; give both"),
        (["--judges+=GoldJudge", "--judges+=GoldJudge"], "judges holds gold reward twice"),
    ],
)
def test_what_does_not_fit(changed, said, finished, capsys):
    assert said in refused(capsys, "audit", str(finished), *changed)
    assert not (finished / "audit" / "report.html").exists()


def test_refine_takes_judges(first, tmp_path, capsys):
    judges = [GoldJudge()]
    options = AuditOptions("policy", judges=judges, judged_pairs=50, noise_rate=0.3)
    audit(str(first), options=options)
    # One file of answers for every audit of a run, wherever its results go.
    audit(str(first), options=replace(options, output=str(tmp_path / "elsewhere")))
    assert (first / "audit" / ANSWERS).exists() and not (tmp_path / "elsewhere" / ANSWERS).exists()
    capsys.readouterr()
    folder = refine(str(first), judges=judges, judged_pairs=50, noise_rate=0.3)
    assert "score and judges" in capsys.readouterr().out
    table = pd.read_parquet(folder / "audit" / "pairs.parquet").set_index("id")
    assert table["vote_1"].notna().sum() == 50 and (folder / "audit" / "judges.csv").exists()
    with pytest.raises(UserError, match="already holds a second pass with judges"):
        refine(str(first), noise_rate=0.3)
    with pytest.raises(UserError, match="judges is given, but labels is easiest"):
        refine(str(first), str(tmp_path / "new"), "easiest", scorer="dpo", judges=judges)
