"""A real sweep of a tiny model is predicted, judged by a server with faults, killed, and judged on."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import mean, stdev

import pandas as pd
import pytest

from pacmr_lightning import cli
from pacmr_lightning.embedded_world import World

from ..evaluation.faulty_server import FaultyServer, prefer_longer
from .conftest import OPTIONS
from .test_runner import CELLS

PROMPTS = 12


def run(path: str, *options: str) -> int:
    """The command's exit status."""
    try:
        cli.main(["sweep", path, *options])
    except SystemExit as stop:
        return stop.code
    return 0


def write_prompts(count: int = PROMPTS) -> str:
    rows = [{"prompt": prompt, "reference": "unused"} for prompt in World(0).prompts()[:count]]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "prompts.jsonl"


def evaluation(url: str | None = None, **changes: object) -> dict:
    judge = {"class_path": "EndpointJudge", "init_args": {"task": "tldr", "model": "m", "base_url": url}}
    predict = {"data.source": "Prompts", "data.source.file": "prompts.jsonl"}
    predict |= {"model.max_new_tokens": 6, "data.predict_prompts": 200}
    return {"judge": judge, "predict": predict} | changes


def asked(server: FaultyServer) -> list[str]:
    """Questions of the judge that were sent, without those that only try the address."""
    texts = [request["messages"][-1]["content"] for request in server.requests]
    return [text for text in texts if "It rained all day" not in text]


def judged(folder: str) -> dict:
    return json.loads(Path(folder, "summary.json").read_text())


@pytest.mark.slow
def test_a_sweep_that_is_judged(write_sweep, capsys):
    """Trained, predicted, judged by a server that fails now and then, killed while judging, and judged on."""
    write_prompts()
    method = {"label": "PACMR-DPO", "options": {"model.weighting.every": 2, "model.weighting.outer.tau": 0.5}}
    with FaultyServer(prefer_longer) as server:
        part = evaluation(server.url, prompt_price=1.0, completion_price=2.0)
        part["judge"]["init_args"]["concurrency"] = 1
        options = OPTIONS | {"model.learning_rate": 0.05}
        path = write_sweep(methods={"dpo": {"label": "DPO"}, "pacmr": method}, options=options, evaluate=part)
        # The first request only tries the address; the 30th question is not answered before the kill.
        server.script = [None, "broken json", 500, "cut", *[None] * 30, "hang"]
        command = [sys.executable, "-m", "pacmr_lightning", "sweep", path]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        server.wait_for(len(server.script))
        process.kill()
        said = process.communicate()[1]
        assert "Judging 2 comparisons of 24 pairs in all with m: 48 calls, about " in said
        assert "at most 4,608 out, cost about 0.02; 0 pairs are identical, 0 answers stored" in said
        assert not Path("out/tables.md").exists() and len(set(asked(server))) == 31

        written = [Path(f"out/{name}/generations.jsonl").stat().st_mtime_ns for name in CELLS]
        assert run(path) == 0
        said = capsys.readouterr().err
        assert "Judging 1 comparisons of 12 pairs" in said and " 18 calls" in said
        assert written == [Path(f"out/{name}/generations.jsonl").stat().st_mtime_ns for name in CELLS]
        counts = Counter(asked(server))
        assert len(counts) == 48
        # The three that failed, of which two may be one question, and the one that the kill has met.
        assert counts.total() == 48 + 4

        requests = len(server.requests)
        assert run(path) == 0 and run(path, "--tables_only") == 0
        assert len(server.requests) == requests, "all was known"

        # The same by hand.
        judge = ["--judge", "EndpointJudge", "--judge.task", "tldr", "--judge.model", "m"]
        judge += ["--judge.base_url", server.url, "--store", "out/judge-answers.sqlite"]
        rates, scores = [], []
        for seed in (0, 1):
            cell, baseline = (f"out/{name}-noise30-seed{seed}" for name in ("pacmr", "dpo"))
            files = [f"{folder}/generations.jsonl" for folder in (cell, baseline)]
            cli.main(["judge", *files, *judge, "--output", f"by-hand-{seed}"])
            found, expected = judged(f"{cell}/judge"), judged(f"by-hand-{seed}")
            for key in ("tokens", "cost"):  # of them now, and the prices
                del found[key], expected[key]
            assert found == expected and found["pairs"] == PROMPTS
            rates.append(100 * found["win_rate"]["value"])
            scores.append(found["win_score"]["value"])
        assert len(server.requests) == requests
    assert rates[0] != rates[1]
    table = pd.read_csv("out/tables/main.csv", index_col="Method").loc["PACMR-DPO"]
    expected = [mean(rates), stdev(rates) / 2**0.5, mean(scores), stdev(scores) / 2**0.5]
    assert table.tolist() == pytest.approx(expected)
    text = Path("out/tables.md").read_text()
    assert "### Pairwise evaluation against DPO by m in both orders; mean ± standard error" in text
    assert len(Path("out/pacmr-noise30-seed0/generations.jsonl").read_text().splitlines()) == PROMPTS
