"""``pacmr clean-meta``: judges on a real HTTP server, and its file, also in training."""

import re

import pytest
import yaml

from pacmr_lightning import cli
from pacmr_lightning.commands.clean_meta import clean_meta
from pacmr_lightning.datamodules import Files
from pacmr_lightning.datamodules.reading import read_preferences
from pacmr_lightning.datamodules.sampling import stratified_sample
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.judging import EndpointJudge

from ...conftest import read_lines as read
from ..evaluation.faulty_server import prefer_longer, prefer_position_a

SIDES = ("chosen", "rejected")

reply = prefer_longer


@pytest.fixture
def judge(server):
    return lambda model="judge": EndpointJudge("summary", model=model, base_url=server.url)


@pytest.fixture
def pairs(write_rows):
    """30 usable pairs, those with an odd number with the longer response as rejected, and 4 others."""
    rows = []
    for i in range(30):
        better, worse = ("rejected", "chosen") if i % 2 else ("chosen", "rejected")
        row = {"id": i, "prompt": f"Post {i}", better: f" {i} words and more", worse: f" {i}"}
        rows.append(row | {"category": "abc"[(i >= 15) + (i >= 24)]})
    odd = {"prompt": "Post", "chosen": " one", "rejected": " other", "category": "odd"}
    rows += [
        odd | {"prompt": " "},
        odd | {"chosen": " \n"},
        odd | {"rejected": " one "},
        {"chosen": "\n\nHuman: no", "rejected": "\n\nHuman: turn", "category": "odd"},
    ]
    path = write_rows(rows)
    return Files(path, path)


def test_all_judges_in_both_orders(pairs, server, judge, tmp_path, capsys):
    server.replies["first"] = prefer_position_a
    server.replies["unsure"] = lambda messages: (
        "Hard to say." if "Post: Post 1" in messages[-1]["content"] else prefer_longer(messages)
    )

    def run(*models):
        output = tmp_path / f"{'-'.join(models)}.jsonl"
        clean_meta(pairs, str(output), [judge(model) for model in models], n=12, seed=1)
        return read(output)

    rows = run("length", "same", "unsure")
    found = {row["id"]: row for row in pairs.load("train")}
    assert len(rows) == 12 and {row["category"] for row in rows} == set("abc")
    usable = [str(i) for i in range(30)]
    names = [f"clean {name}" for name in usable]  # noise draws by the plain ids
    sample = stratified_sample(names, [found[name]["category"] for name in usable], 12, 1)
    assert [row["id"] for row in rows] == [usable[i] for i in sample]
    for row in rows:
        odd, unsure = int(row["id"]) % 2 == 1, row["prompt"].startswith("Post 1")
        assert row["corrected"] == (odd and not unsure)
        responses = [found[row["id"]][side] for side in ("chosen", "rejected")]
        assert [row["chosen"], row["rejected"]] == responses[:: -1 if row["corrected"] else 1]
        label = "wrong" if odd else "right"
        assert [v["judge"] for v in row["verdicts"]] == ["length", "same", "unsure"]
        assert [v["verdict"] for v in row["verdicts"]] == [label, label, "none" if unsure else label]
        orders = row["verdicts"][2]["orders"]
        problem = "the answer does not end in a verdict" if unsure else None
        assert [(o["verdict"], o["problem"]) for o in orders] == [("none" if unsure else label, problem)] * 2
        letters = [re.search(r"Preferred: (.)", o["answer"])[1] for o in row["verdicts"][0]["orders"]]
        assert letters == (["B", "A"] if odd else ["A", "B"])
    wrong = sum(int(row["id"]) % 2 for row in rows)
    corrected = sum(row["corrected"] for row in rows)
    assert 0 < corrected < wrong
    text = capsys.readouterr().out
    assert f"12 of 30 usable pairs of rows.jsonl, {corrected} labels corrected." in text.replace("\n", " ")
    assert "unsure: invalid answers: " in text and "length: invalid" not in text
    server.replies["dumb"] = lambda messages: "Hard to say."
    with pytest.raises(UserError, match="The judge dumb gave no verdict on any of 12 pairs"):
        run("length", "dumb")
    assert not (tmp_path / "length-dumb.jsonl").exists()

    # A judge that goes by position never finds a label wrong, and so nothing is corrected.
    rows = run("length", "first")
    assert not any(row["corrected"] for row in rows)
    assert {row["verdicts"][1]["verdict"] for row in rows} == {"none"}


def test_a_rerun_costs_nothing(pairs, server, judge, tmp_path):
    output = tmp_path / "clean.jsonl"
    contents = set()
    for _ in range(2):
        clean_meta(pairs, str(output), [judge()], n=10)
        contents.add(output.read_bytes())
        assert len(server.requests) == 20 and len(contents) == 1
    # A larger sample asks for what is new only.
    clean_meta(pairs, str(output), [judge()], n=30)
    assert len(server.requests) == 60
    names = {"clean.jsonl", "clean.jsonl.answers.sqlite", "rows.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names


TALK = "\n\nHuman: a {0}?\n\nAssistant: b\n\nHuman: c {0}?\n\nAssistant: ".format
# Ids are hashes of prompt and responses.
ROWS = [{"chosen": TALK(i) + "yes " * (2 + i % 2), "rejected": TALK(i) + "longer no"} for i in range(6)]
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
ROWS += [
    {side: [*ASKED, {"role": "assistant", "content": text}] for side, text in zip(SIDES, texts, strict=True)}
    for texts in (("yes", "no, not at all"), ("yes, of course", "no"))
]


def test_the_file_is_read_again(write_rows, server, tmp_path):
    path = write_rows(ROWS)
    source, output = Files(path, path), str(tmp_path / "clean.jsonl")
    judges = [EndpointJudge(model=model, base_url=server.url) for model in "abc"]
    clean_meta(source, output, judges, n=8)

    found = {row["id"]: row for row in source.load("train")}
    clean, written = read_preferences(output), read(output)
    assert len(clean) == 8 and set(clean["id"]) == set(found)
    for row, flags in zip(clean, written, strict=True):
        before = found[row["id"]]
        assert (row["reason"], row["chat"], row["prompt"]) == (None, before["chat"], before["prompt"])
        assert {row["chosen"], row["rejected"]} == {before["chosen"], before["rejected"]}
        # What the judges like, for this is what they all found.
        assert len(row["chosen"]) > len(row["rejected"])
        assert flags["corrected"] == (row["chosen"] != before["chosen"]) and "flipped" not in flags
    assert {flags["corrected"] for flags in written} == {True, False}


def test_bad_input(pairs, judge, server, tmp_path):
    def fails(sentence, source=pairs, output="clean.jsonl", **options):
        with pytest.raises(UserError, match=sentence):
            clean_meta(source, str(tmp_path / output), **options)

    before = sorted(tmp_path.iterdir())
    fails("judges is missing; give one or more, such as", judges=[], n=3)
    fails(r"clean.parquet, but it must be a file ending in .jsonl", output="clean.parquet", judges=[judge()])
    fails("n is 31, but a sample of the 30 rows", judges=[judge()], n=31)
    fails("where the source's own rows are", output=pairs.splits.train, judges=[judge()], n=3)
    fails("judges holds judge twice", judges=[judge(), judge("other"), judge()], n=3)
    assert sorted(tmp_path.iterdir()) == before and not server.requests


def test_from_the_command_line(pairs, server, tmp_path):
    first = {"task": "summary", "model": "one", "base_url": server.url, "temperature": None}
    judges = [{"class_path": "EndpointJudge", "init_args": first}]
    (tmp_path / "judges.yaml").write_text(yaml.safe_dump({"judges": judges}))
    words = ["--config", str(tmp_path / "judges.yaml"), "--source", "Files", "--n", "6"]
    words += ["--source.train", pairs.splits.train, "--output", str(tmp_path / "clean.jsonl")]
    for model in ("two", "three"):
        words += ["--judges+=EndpointJudge", "--judges.task=summary", f"--judges.model={model}"]
        words += [f"--judges.base_url={server.url}"]
    cli.main(["clean-meta", *words])
    asked = [(request["model"], "temperature" in request) for request in server.requests]
    assert set(asked) == {("one", False), ("two", True), ("three", True)} and len(asked) == 36
    assert all(len(row["verdicts"]) == 3 for row in read(tmp_path / "clean.jsonl"))
