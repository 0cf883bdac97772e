"""The wheel holds all three folders under one name, and every command works from it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import Distribution

from pacmr_lightning.cli import RUNS, TOOLS
from pacmr_lightning.runs.folder import read_weights

ROOT = Path(__file__).parents[1]
HELP = """
import contextlib, io, sys
import pacmr_lightning, pacmr_lightning.callbacks, pacmr_lightning.datamodules
from pacmr_lightning.cli import RUNS, main

for module in (pacmr_lightning, pacmr_lightning.callbacks, pacmr_lightning.datamodules):
    print(module.__file__)
for command in sys.argv[1:]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            main([command, "--help_all" if command in RUNS else "--help"])
    except SystemExit as stop:
        print(command, stop.code, said.getvalue().startswith("usage: pacmr "))
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "pacmr_lightning" and getattr(module, "__file__", None):
        print(module.__file__)
"""


def test_every_file_is_taken(monkeypatch):
    """A folder or a kind of file that pyproject.toml does not name would be missing from the wheel."""
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files(["pyproject.toml"])
    distribution.include_package_data = False  # it would write a folder beside the packages
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    folders = ("pacmr_lightning", "datamodules", "callbacks", "configs")
    files = {path for folder in folders for path in Path(folder).rglob("*.*") if path.suffix != ".pyc"}
    assert {Path(os.path.relpath(file)) for file in build.get_output_mapping().values()} == files


@pytest.mark.slow
def test_every_command_of_an_installed_wheel(tmp_path):
    """Installed in a folder of its own, away from the checkout; only the dependencies are borrowed."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(site), str(wheel)], check=True, capture_output=True)
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"bin", "pacmr_lightning"}
    commands = [*RUNS, *TOOLS]

    def run(*words):
        # Before the editable install, whose finder comes after the path.
        where = {"cwd": elsewhere, "env": {**os.environ, "PYTHONPATH": str(site)}}
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, **where)
        assert done.returncode == 0, done.stderr
        return done

    done = run("-c", HELP, *commands)
    lines = done.stdout.splitlines()
    places = [line for line in lines if line.endswith(".py")]
    assert [line for line in lines if line.split()[0] in commands] == [f"{name} 0 True" for name in commands]
    assert len(places) > len(commands) and all(place.startswith(str(site)) for place in places), places
    named = ["--config", "preference", "--config", "methods/pacmr"]
    done = run(site / "bin/pacmr", "fit", *named, "--print_config")
    for name in named[1::2]:
        assert f"--config {name} is {site}/pacmr_lightning/configs/{name}.yaml\n" in done.stderr
    assert "class_path: pacmr_lightning.weighting.VNetWeighting" in done.stdout
    assert not list(elsewhere.iterdir())

    run("-m", "pacmr_lightning", "quickstart", "--pairs", "320", "--sft_rows", "640", "--samples", "48")
    folder = elsewhere / "runs/quickstart"
    assert all((folder / name / "summary.json").exists() for name in ("dpo", "pacmr", "dpo-refined"))
    assert (folder / "dpo-refined/audit/report.html").exists()
    dpo, pacmr = (read_weights(folder / name)[["step", "id", "flipped"]] for name in ("dpo", "pacmr"))
    assert dpo.equals(pacmr), "the same pairs and flips in one order"
