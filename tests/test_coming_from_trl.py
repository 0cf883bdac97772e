"""docs/coming_from_trl.md: both sides of its table exist."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from pacmr_lightning import cli

TABLE = [
    line.split("|")[1:3]
    for line in (Path(__file__).parents[1] / "docs/coming_from_trl.md").read_text().splitlines()
    if line.startswith("| `")
]


def test_the_names_of_trl():
    trl = pytest.importorskip("trl", reason="TRL is in the extra oracle")
    known = {field.name for field in dataclasses.fields(trl.DPOConfig)}
    named = {name for theirs, _ in TABLE for name in re.findall(r"`(\w+)`", theirs)}
    assert len(named) > 20 and named <= known


def test_our_options(tmp_path, monkeypatch, capsys):
    """Each stands in the config that is printed, with the value that the table gives it."""
    options = {n: v for _, ours in TABLE for n, v in re.findall(r"--([\w.]+)(?: (\w+))?", ours)}
    assert len(options) > 20
    monkeypatch.chdir(tmp_path)
    base = ["--config", "preference", "--model.policy.model", "m", "--data.source.train", "pairs.jsonl"]
    values = {name: value for name, value in options.items() if value} | {"model.objective": "RDPO"}
    given = [word for name, value in values.items() for word in (f"--{name}", value)]
    found = []
    for words in (given, ["--model.objective", "IPO"], ["--model.objective", "CDPO"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(["fit", *base, *words, "--print_config"])
        assert stop.value.code == 0
        # The first line names the file that --config's short name stands for.
        printed = capsys.readouterr().out.partition("\n")[2]
        found.append(yaml.safe_load(printed))
    for name, value in options.items():
        node = found[0]
        for key in name.split("."):
            node = node.get("init_args", node)
            assert key in node, name
            node = node[key]
        assert name == "model.objective" or not value or node == value, name
    for config, name in ((found[1], "length_normalize"), (found[2], "label_noise")):
        assert name in config["model"]["init_args"]["objective"]["init_args"]
