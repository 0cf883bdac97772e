"""Configs that come with the package are found by name, a file of that path before them."""

from pathlib import Path

import pytest
import yaml

from pacmr_lightning import cli
from pacmr_lightning.runs.shipped_configs import FOLDER, names, resolved, told
from pacmr_lightning.sweep.cells import cells
from pacmr_lightning.sweep.spec import read_sweep

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_names():
    shipped = {str(path.relative_to(ROOT / "configs"))[:-5] for path in (ROOT / "configs").rglob("*.yaml")}
    assert set(names()) == shipped and {"preference", "tldr/preference", "methods/pacmr"} <= shipped


@pytest.mark.parametrize("name", ["methods/dpo", "methods/dpo.yaml", "configs/methods/dpo.yaml"])
def test_a_name_and_a_file_of_that_path(name):
    assert resolved(name) == str(FOLDER / "methods/dpo.yaml")
    Path(name).parent.mkdir(parents=True)
    Path(name).write_text("model: {}")
    assert resolved(name) == name
    assert resolved("methods/nothing") == "methods/nothing"


def printed(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    return capsys.readouterr()


def test_fit_finds_them_and_says_where(capsys):
    out, said = printed(["fit", "--config", "preference", "--config=methods/rdpo", "--print_config"], capsys)
    config = yaml.safe_load(out)
    assert f"--config preference is {FOLDER / 'preference.yaml'}" in said
    assert f"--config methods/rdpo is {FOLDER / 'methods/rdpo.yaml'}" in said
    assert config["model"]["init_args"]["objective"]["class_path"] == "pacmr_lightning.objectives.RDPO"
    assert config["model"]["init_args"]["policy"]["init_args"]["dtype"] == "auto"


def test_a_name_of_nothing(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", "--config", "methods/pacrm"])
    assert stop.value.code == 2
    said = "there is no file methods/pacrm (did you mean methods/pacmr?); pacmr configs lists all."
    assert capsys.readouterr().err == f"pacmr: error: config: {said}\n"


def test_a_sweep_and_what_it_names():
    named = {config for cell in cells(read_sweep("sweeps/world")) for config in cell.configs}
    assert {str(FOLDER / f"{name}.yaml") for name in ("quickstart/preference", "methods/ropo")} <= named


def test_list(capsys):
    cli.main(["configs"])
    out, said = capsys.readouterr()
    assert out.startswith("preference ") and str(FOLDER) in said
    lines = [line.partition(" ") for line in out.splitlines()]
    listed = [first for first, _, rest in lines if rest]
    assert listed[:2] == ["preference", "sft"]
    for name in (name for name in names() if not name.startswith("sweeps/")):
        assert any(first == name and rest.endswith(told(name)) for first, _, rest in lines)
        assert told(name).endswith((".", "?")), name
    assert "Plain DPO: every pair counts the same.\n" in out and "sweeps/" not in out
