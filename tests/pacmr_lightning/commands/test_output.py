"""Each command's standard output holds its result alone; what else is said goes to standard error."""

import json
import re
from itertools import cycle
from pathlib import Path

import pytest
import yaml

from pacmr_lightning import cli
from pacmr_lightning.command_line import output
from pacmr_lightning.command_line.output import only_results, print_result
from pacmr_lightning.embedded_world import World
from pacmr_lightning.policy import PolicyModel

from ...conftest import read_lines, write_lines
from ..evaluation.faulty_server import FaultyServer, prefer_longer

CPU = ["--trainer.accelerator", "cpu"]
METHODS = ("dpo", "cdpo", "ipo", "rdpo", "drdpo", "ropo", "mwn", "pacmr")
TABLE = r"( *[─-]+ *\n|.* {2,}.*\n|\n)+"
"""Lines with columns, rules and blanks."""
AUDITED = r"(\d+ of|These) 64 labels .*\nKnown to be wrong: .*\n" + TABLE + r"(.*\n)*"

SAY = "talk of a library\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama):
    """A folder with a model and pairs."""
    folder = tmp_path_factory.mktemp("output")
    tiny_llama(folder / "model", initializer_range=0.2)
    for name, count in (("train", 64), ("validation", 8), ("clean", 10)):
        rows = World().preference_rows(count, len(name))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {name: f"{name}.jsonl" for name in ("train", "validation")}
    config = {
        "model": {
            "class_path": "PreferenceModule",
            "init_args": {
                "policy": {"class_path": "PolicyModel", "init_args": {"model": "model"}},
                "learning_rate": 0.01,
                "weighting": {"class_path": "VNetWeighting", "init_args": {"every": 2, "learning_rate": 0.1}},
                "max_new_tokens": 3,
            },
        },
        "data": {
            "class_path": "PreferenceDataModule",
            "init_args": {
                "source": {"class_path": "Files", "init_args": source},
                "noise_rate": 0.3,
                "global_batch_size": 8,
                "meta_batch_size": 8,
                "predict_prompts": 4,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "limit_val_batches": 1,
            "callbacks": [{"class_path": name} for name in ("WeightRecorder", "RunSummary", "VNetSurfaces")],
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    sweep = {"base": ["config.yaml"], "output": "swept", "noise_rates": [0.3], "seeds": [0]}
    options = {"data.noise_rate": "{noise}", "seed_everything": "{seed}"}
    sweep |= {"options": options, "methods": {"dpo": {"config": "dpo"}}}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    return folder


RUN = ["--config", "run/config.yaml", *CPU, "--ckpt_path", "last"]
WORLD = ["--source", "EmbeddedWorld", "--source.pairs", "24", "--source.validation_pairs", "8"]
ROWS = ["--source", "Files", "--source.train", "train.jsonl"]
PREDICTED = ["generations.jsonl", "other.jsonl"]
JUDGE = ["--judge", "EndpointJudge", "--judge.task", "tldr", "--judge.base_url"]
COMMANDS = {
    "fit": ["--config", "config.yaml", "--trainer.default_root_dir", "run"],
    "validate": RUN,
    "test": RUN,
    "predict": [*RUN, "--generation.output", "generations.jsonl"],
    "judge": [*PREDICTED, *JUDGE, "URL"],
    "inspect": [*ROWS, "--tokenizer", "model", "--output", "numbers.json"],
    "augment": [*WORLD, "--output", "augmented.parquet", "--rewriter", "Rules"],
    "clean-meta": [*WORLD, "--output", "meta.jsonl", "--n", "8"],
    "analyze": ["run"],
    "audit": ["run"],
    "refine": ["run", "--noise_rate", "0.3"],
    "compare": ["run", "--figure", "runs.png"],
    "export": ["run", "exported"],
    "configs": [],
    "sweep": ["sweep.yaml", "--dry_run"],
}
"""Words of commands that succeed in this order."""
RESULTS = {
    "fit": "",
    "validate": TABLE,
    "test": TABLE,
    "predict": "",
    "judge": r"A: generations\.jsonl\nB: other\.jsonl\n" + TABLE,
    "inspect": r"train\.jsonl, tokenizer model.*\n(.*\n)*",
    "augment": r"# Augmented prompts\n\nRules of .*\n(.*\n)*",
    "clean-meta": r"meta\.jsonl: 8 of .*\n",
    "analyze": TABLE,
    "audit": AUDITED,
    "refine": AUDITED + TABLE,
    "compare": TABLE,
    "export": "",
    "configs": r"([\w/]+ +\S.*\n)+",
    "sweep": r"dpo-noise30-seed0 \(waiting\): pacmr fit .*\n1 cells\n",
}
"""What stdout holds, as a whole."""
TALK = {
    "fit": "The run is in run",
    "judge": "Verdicts and summary: ",
    "inspect": "Numbers: numbers.json",
    "augment": "Augmented prompts: augmented.parquet",
    "analyze": "augmented prompts: ",
    "audit": "Report: ",
    "compare": "Figure: runs.png",
    "export": "exported is complete",
    "configs": "(in ",
}
"""Some of what stderr holds."""


@pytest.mark.slow
def test_all_commands(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    build = PolicyModel.build

    def build_and_say(self, *arguments, **options):
        print(SAY)
        build(self, *arguments, **options)

    monkeypatch.setattr(PolicyModel, "build", build_and_say)
    with FaultyServer(prefer_longer) as server:
        for command, words in COMMANDS.items():
            if command == "judge":
                rows = [row | {"response": f"{row['response']} x"} for row in read_lines("generations.jsonl")]
                write_lines("other.jsonl", rows)
            cli.main([command, *(server.url if word == "URL" else word for word in words)])
            said = capsys.readouterr()
            assert re.fullmatch(RESULTS[command], said.out), (command, said.out)
            assert TALK.get(command, "") in " ".join(said.err.split()), (command, said.err)
            assert SAY not in said.out and (command != "fit" or SAY in said.err)


def test_no_command_is_left_out():
    """``quickstart`` prints results by other commands only."""
    assert {*COMMANDS, "quickstart"} == {*cli.RUNS, *cli.TOOLS}
    assert COMMANDS.keys() == RESULTS.keys()


def test_a_printed_config_can_be_given_back(tmp_path, monkeypatch, capsys):
    """Also where its configs are found by name; the module's class is made of it."""
    monkeypatch.chdir(tmp_path)

    def printed(*configs):
        with pytest.raises(SystemExit) as stop:
            cli.main(
                ["fit", *(word for config in configs for word in ("--config", config)), "--print_config"]
            )
        assert stop.value.code == 0
        return capsys.readouterr()

    for method, task in zip(METHODS, cycle(("tldr", "hh"))):  # endless, so not strict
        out, said = printed(f"{task}/preference", f"methods/{method}")
        assert said.count("--config ") == 2 and f"--config methods/{method} is " in said
        Path("printed.yaml").write_text(out)
        assert yaml.safe_load(out)["model"]["init_args"]["method"] == method
        assert printed("printed.yaml") == (out, "")


def test_only_results_pass(capsys):
    with only_results():
        print("talk")
        with only_results():
            print_result("result")
        print_result("x" * 300)
    print("after")
    assert capsys.readouterr() == (f"result\n{'x' * 300}\nafter\n", "talk\n")


def test_an_error_ends_it(capsys):
    with pytest.raises(ValueError), only_results():
        raise ValueError
    print_result("result")
    assert capsys.readouterr().out == "result\n" and output._stdout is None
