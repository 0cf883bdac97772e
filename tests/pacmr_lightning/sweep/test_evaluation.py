"""A real sweep of a tiny model is predicted, judged by a server with faults, killed, and judged on."""

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml

from pacmr_lightning.embedded_world import World
from pacmr_lightning.sweep.cells import Cell, cells
from pacmr_lightning.sweep.spec import read_sweep
from pacmr_lightning.sweep.state import end as end_of
from pacmr_lightning.sweep.state import prepare, state_of

from ...conftest import fails, write_lines
from ..evaluation.faulty_server import FaultyServer, prefer_longer, prefer_position_a
from ..tables import texts
from .conftest import OPTIONS, end
from .test_runner import sweep as run

PROMPTS = 12


def write_prompts(count: int = PROMPTS) -> str:
    rows = [{"prompt": prompt, "reference": "unused"} for prompt in World(0).prompts()[:count]]
    return write_lines("prompts.jsonl", rows)


def evaluation(url: str | None = None, **changes: object) -> dict:
    judge = {"class_path": "EndpointJudge", "init_args": {"task": "tldr", "model": "m", "base_url": url}}
    predict = {"data.source": "Prompts", "data.source.file": "prompts.jsonl"}
    predict |= {"model.max_new_tokens": 6, "data.predict_prompts": 200}
    return {"judge": judge, "predict": predict} | changes


def asked(server: FaultyServer) -> list[str]:
    """Questions of the judge that were sent, without those that only try the address."""
    texts = [request["messages"][-1]["content"] for request in server.requests]
    return [text for text in texts if "It rained all day" not in text]


BAD_EVALUATIONS = """
anchor:
    evaluate compares with the anchor, but anchor is null
methods: {dpo: }
    of the same noise rate, seed and varied values, but there is no other
methods: {dpo: {vary: {model.objective.beta: [0.1, 0.2]}}, pacmr: }
    but pacmr-noise30-seed0 has no baseline
evaluate: {seed: -1}
    the seed of evaluate is -1, but it must be at least 0
evaluate: {judge: {class_path: EndpointJugde}}
    evaluate.judge: Expected a dot import path string: EndpointJugde; did you mean EndpointJudge?
evaluate: {prompt_price: 1.0}
    prompt_price is 1.0 and completion_price is None
evaluate: {predict: {generation.output: x.jsonl}}
    generation.output is the cell's own file
evaluate: {predict: {generation.temperature: -1}}
    cannot predict: temperature is -1
evaluate: {predict: {data.source: Prompts, data.source.file: nowhere.jsonl}}
    nowhere.jsonl
"""


@pytest.mark.parametrize(("text", "message"), texts(BAD_EVALUATIONS))
def test_bad_evaluations(text, message, write_sweep, capsys):
    """One sentence before anything is trained, and nothing is written."""
    write_prompts()
    changes = yaml.safe_load(text)
    changes["evaluate"] = evaluation("http://127.0.0.1:9/v1") | changes.get("evaluate", {})
    assert message in fails(capsys, ["sweep", write_sweep(**changes), "--jobs", "1"])
    assert not Path("out").exists()


def test_judges_that_cannot_be_asked(write_sweep, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    write_prompts()
    absent = evaluation("http://127.0.0.1:9/v1")
    absent["judge"]["init_args"]["retries"] = 0  # each comes after a pause
    said = fails(capsys, ["sweep", write_sweep(evaluate=absent)])
    assert "http://127.0.0.1:9/v1 (model 'm') cannot be reached" in said and "or check base_url." in said
    assert "OPENAI_API_KEY holds no API key" in fails(capsys, ["sweep", write_sweep(evaluate=evaluation())])
    judge = {"class_path": "RewardModelJudge", "init_args": {"model": "./nowhere"}}
    path = write_sweep(evaluate=evaluation(judge=judge))
    assert "The model folder ./nowhere does not exist" in fails(capsys, ["sweep", path])
    assert not Path("out").exists()


def test_a_judge_and_a_cell_that_fail_are_both_told(answered, capsys):
    path, found = answered
    (found[-1].folder / "summary.json").unlink()
    record = json.loads((found[-1].folder / "cell.json").read_text())
    (found[-1].folder / "cell.json").write_text(json.dumps(record | {"exit": 1}))
    assert run(path) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"1 of {len(found)} cells failed" in said and "cannot be reached" in said


@pytest.fixture
def answered(write_sweep) -> tuple[str, list[Cell]]:
    """A sweep file with prices, whose cells have ended and answered; in the first seed both say the same."""
    write_prompts()
    path = write_sweep(evaluate=evaluation("http://127.0.0.1:9/v1", prompt_price=1.0, completion_price=10.0))
    found = cells(read_sweep(path))
    for number, cell in enumerate(found):
        end(cell, {})
        answer(cell, "abc"[: 1 if number < 2 else number])
    return path, found


def answer(cell: Cell, text: str) -> None:
    """What ``pacmr predict`` would leave."""
    assert prepare(cell) == [cell.prediction]
    rows = [{"id": f"p{i}", "prompt": f"Post {i}", "response": f"{i} {text}"} for i in range(PROMPTS)]
    write_lines(cell.responses, rows)
    assert end_of(cell, 0)


def test_states(answered):
    """A trained cell only predicts, and does so again for other options or prompts."""
    _, found = answered
    assert {state_of(cell) for cell in found} == {"done"}
    write_prompts(PROMPTS - 1)
    assert {state_of(cell) for cell in found} == {"waiting"}
    assert prepare(found[0]) == [found[0].prediction] and (found[0].folder / "summary.json").exists()
    assert end_of(found[0], 1) and state_of(found[0]) == "failed"
    write_prompts()
    answer(found[0], "a")
    assert state_of(found[0]) == "done"
    found[0].responses.unlink()
    assert state_of(found[0]) == "waiting"
    assert found[0].prediction[:3] == ["predict", "--config", "out/dpo-noise30-seed0/config.yaml"]


def test_what_a_judge_costs_and_says(answered, capsys):
    """Identical responses and known answers are not asked about; a judge that fails leaves the tables."""
    path, _ = answered
    # All of seed 0 is the same; of seed 1 nobody answers.
    path = replace_judge(path, retries=0)
    assert "cannot be reached" in fails(capsys, ["sweep", path])
    table = pd.read_csv("out/tables/judged.csv")
    assert table["Win-score"].tolist() == [1.0] and table["Pairs"].tolist() == [PROMPTS]
    assert "| 1.0000 [1.0000, 1.0000] | - | - |" in Path("out/tables.md").read_text()
    with FaultyServer(prefer_longer) as server:
        path = replace_judge(path, base_url=server.url, retries=6)
        server.script = [(400, {"message": "flagged by the content filter"})]
        assert run(path) == 0
        assert "no answer to 4.2% of the questions, which the next run asks again" in capsys.readouterr().err
        assert len(asked(server)) == 2 * PROMPTS
        table = pd.read_csv("out/tables/judged.csv")  # identical pairs of the first seed are no questions
        assert table["Answers without a verdict (%)"].tolist() == pytest.approx([100 / (2 * PROMPTS)])
        assert run(path) == 0 and len(asked(server)) == 2 * PROMPTS + 1
        assert run(path, "--tables_only") == 0 and len(asked(server)) == 2 * PROMPTS + 1
    both = pd.read_csv("out/tables/judged.csv").iloc[0]
    # Ties of the first seed, wins of the second; prompts are resampled with both.
    ends = ("", ", low", ", high")
    assert [both[f"Win rate (%){end}"] for end in ends] == [50.0] * 3
    assert [both[f"Win-score{end}"] for end in ends] == [1.5] * 3
    assert both["Pairs"] == 2 * PROMPTS and both["Answers without a verdict (%)"] == 0
    main = pd.read_csv("out/tables/main.csv").iloc[0]
    assert main["Win rate (%), 30% flipped"] == 50 and main["Win-score, 30% flipped, standard error"] == 0.5
    assert "50.00 [50.00, 50.00]" in Path("out/tables/judged.tex").read_text()
    with FaultyServer(prefer_position_a) as server:
        server.script = [(400, {"message": "flagged by the content filter"})]
        assert run(replace_judge(path, base_url=server.url)) == 0
    assert pd.read_csv("out/tables/judged.csv")["Flipped with the order (%)"].tolist() == [100]


def test_one_seed_has_intervals(answered):
    """Of what pacmr judge gives, since one seed has no standard error."""
    path, (*_, last) = answered
    rows = [json.loads(line) for line in last.responses.read_text().splitlines()]
    write_lines(last.responses, [row | {"response": ""} for row in rows[:5]] + rows[5:])
    with FaultyServer(prefer_longer) as server:
        assert run(replace_judge(path, base_url=server.url, seeds=[1])) == 0
    rate = json.loads((last.folder / "judge/summary.json").read_text())["win_rate"]
    low, value, high = (f"{100 * rate[name]:.2f}" for name in ("low", "value", "high"))
    assert value == "58.33" and float(low) < 58.33 < float(high)
    text = Path("out/tables.md").read_text()
    assert f"| PACMR-DPO | {value} [{low}, {high}] | 1." in text
    assert "| dpo | 0.500 |" in text, "its validation accuracy"
    assert "one seed" in text and "±" not in text and "nan" not in text


def replace_judge(path: str, seeds: tuple[int, ...] = (0, 1), **options: object) -> str:
    """The sweep file with other options of the judge."""
    sweep = yaml.safe_load(Path(path).read_text()) | {"seeds": [*seeds]}
    sweep["evaluate"]["judge"]["init_args"] |= options
    Path(path).write_text(yaml.safe_dump(sweep, sort_keys=False))
    return path


def test_a_file_like_another(write_sweep, capsys):
    """It has the other's keys and its own; what comes after all cells is made once they are done."""
    judge = {"output": "{output}-judge", "command": "clean-meta --output {output}-judge"}
    pairs = {"data.source": "Files", "data.source.train": "out-judge/pairs.jsonl"}
    write_sweep(prepare=[{"output": "base", "command": "judge a b"}, judge], options=OPTIONS | pairs)
    fits = [{"output": "base", "command": "judge c d"}, {"output": "more", "command": "judge a b"}]
    Path("prepared.yaml").write_text(yaml.safe_dump({"like": "sweep.yaml", "prepare": fits}))
    made = [(one.output, one.command) for one in read_sweep("prepared.yaml").preparations()]
    judge = ("out-judge", "clean-meta --output out-judge")
    assert made == [("base", "judge c d"), judge, ("more", "judge a b")]
    assert run("prepared.yaml", "--dry_run") == 0, "prepare will make the pairs"
    write_sweep()
    other = {"like": "sweep.yaml", "methods": {"dpo": None}, "seeds": [0], "options": None}
    Path("prompts").mkdir()
    command = "judge a.jsonl b.jsonl"  # fails, since the files are missing
    other["afterwards"] = [{"output": "prompts", "command": command}, {"output": "made", "command": command}]
    Path("like.yaml").write_text(yaml.safe_dump(other))
    sweep = read_sweep("like.yaml")
    assert list(sweep.methods) == ["dpo"] and sweep.seeds == [0] and sweep.noise_rates == [0.3]
    assert sweep.options == {}
    (cell,) = cells(sweep)
    end(cell, {})
    assert "did not make made" in fails(capsys, ["sweep", "like.yaml"])
    assert Path("out/tables.md").exists() and Path("out/prepare-2.txt").exists()
    Path("made").touch()
    assert run("like.yaml") == 0
