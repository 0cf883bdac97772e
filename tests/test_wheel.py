"""The wheel holds all three folders under one name, and every command works from it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pacmr_lightning.cli import RUNS, TOOLS

ROOT = Path(__file__).parents[1]
NAMES = {
    "pacmr_lightning": "pacmr_lightning",
    "datamodules": "pacmr_lightning.datamodules",
    "callbacks": "pacmr_lightning.callbacks",
}
"""Folders at the top of the repository, and the names under which they are imported."""
CONFIGS = {"pacmr_lightning.configs": "configs"}
"""A folder without Python, which is installed beside them."""
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


def test_all_packages_and_files_are_named():
    """A folder with Python code that pyproject.toml does not name would be missing from the wheel."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and later read TOML")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert settings["package-dir"] == {name: folder for folder, name in NAMES.items()} | CONFIGS
    found = set()
    for folder, name in NAMES.items():
        for file in (ROOT / folder).rglob("*.py"):
            below = file.parent.relative_to(ROOT / folder).parts
            found.add(".".join((name, *below)))
            assert (file.parent / "__init__.py").exists(), f"{file.parent} is no package"
    assert sorted(settings["packages"]) == sorted([*found, *CONFIGS])
    data = {"pacmr_lightning": ["py.typed"], "pacmr_lightning.configs": ["**/*.yaml"]}
    data["pacmr_lightning.audit"] = ["report.css", "report.jinja", "report.js"]
    data["pacmr_lightning.runs"] = ["model_card.jinja"]
    assert settings["package-data"] == data
    # Type checkers read annotations of installed packages only where py.typed lies in them.
    assert (ROOT / "pacmr_lightning" / "py.typed").read_bytes() == b""


@pytest.mark.slow
def test_every_command_of_an_installed_wheel(tmp_path):
    """Installed in a folder of its own, away from the checkout; only the dependencies are borrowed."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        assert {"pacmr_lightning/py.typed", "pacmr_lightning/audit/report.css"} <= set(files)
        assert {"pacmr_lightning/audit/report.js", "pacmr_lightning/audit/report.jinja"} <= set(files)
        assert "pacmr_lightning/runs/model_card.jinja" in files
        shipped = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "configs").rglob("*.yaml"))
        assert [f"pacmr_lightning/{file}" for file in shipped] == sorted(f for f in files if "/configs/" in f)
        (entry_points,) = [name for name in files if name.endswith("entry_points.txt")]
        assert "pacmr = pacmr_lightning.cli:main" in archive.read(entry_points).decode()
    tops = {name.split("/")[0] for name in files}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"pacmr_lightning"}

    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(site), str(wheel)], check=True, capture_output=True)
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
    done = run("-m", "pacmr_lightning", "fit", *named, "--print_config")
    for name in named[1::2]:
        assert f"--config {name} is {site}/pacmr_lightning/configs/{name}.yaml\n" in done.stderr
    assert "class_path: pacmr_lightning.weighting.VNetWeighting" in done.stdout
    assert not list(elsewhere.iterdir())

    run("-m", "pacmr_lightning", "quickstart", "--pairs", "320", "--sft_rows", "640", "--samples", "48")
    folder = elsewhere / "runs/quickstart"
    assert all((folder / name / "summary.json").exists() for name in ("dpo", "pacmr", "dpo-refined"))
    assert (folder / "dpo-refined/audit/report.html").exists()
