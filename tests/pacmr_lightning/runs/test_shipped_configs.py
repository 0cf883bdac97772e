"""Configs that come with the package are found by name, a file of that path before them."""

from pathlib import Path

import pytest

from pacmr_lightning import cli
from pacmr_lightning.runs.shipped_configs import FOLDER, names, resolved, told
from pacmr_lightning.sweep.cells import cells
from pacmr_lightning.sweep.spec import read_sweep

pytestmark = pytest.mark.usefixtures("inside")


@pytest.mark.parametrize("name", ["methods/dpo", "methods/dpo.yaml", "configs/methods/dpo.yaml"])
def test_a_name_and_a_file_of_that_path(name):
    assert resolved(name) == str(FOLDER / "methods/dpo.yaml")
    Path(name).parent.mkdir(parents=True)
    Path(name).write_text("model: {}")
    assert resolved(name) == name
    assert resolved("methods/nothing") == "methods/nothing"


def test_a_sweep_and_what_it_names():
    named = {config for cell in cells(read_sweep("sweeps/world")) for config in cell.configs}
    assert {str(FOLDER / f"{name}.yaml") for name in ("quickstart/preference", "methods/ropo")} <= named


def test_list(capsys):
    cli.main(["configs"])
    out, said = capsys.readouterr()
    assert out.startswith("preference ") and str(FOLDER) in said
    lines = [line.partition(" ") for line in out.splitlines()]
    assert set(names()) == {str(path.relative_to(FOLDER))[:-5] for path in FOLDER.rglob("*.yaml")}
    assert [first for first, _, rest in lines if rest][:2] == ["preference", "sft"]
    for name in (name for name in names() if not name.startswith("sweeps/")):
        assert any(first == name and rest.endswith(told(name)) for first, _, rest in lines)
        assert told(name).endswith((".", "?")) and not told(name).endswith("the settings of Qu et al."), name
    assert "Plain DPO: every pair counts the same.\n" in out and "sweeps/" not in out
