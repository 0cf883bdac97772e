"""The wheel holds all three folders under one name."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROBE = """
import pacmr_lightning, pacmr_lightning.callbacks, pacmr_lightning.datamodules
from pacmr_lightning.modules import PreferenceModule
for module in (pacmr_lightning, pacmr_lightning.callbacks, pacmr_lightning.datamodules):
    print(module.__file__)
"""


@pytest.mark.slow
def test_wheel(tmp_path):
    """Built, installed in a new environment (which borrows the dependencies only) and imported elsewhere."""
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"pacmr_lightning"}

    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "empty")}))
    # .pth files of a folder added like this are not read, so the editable install is not among them.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    done = subprocess.run([python, "-c", PROBE], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert all(line.startswith(str(site)) for line in done.stdout.split()), done.stdout
    command = [tmp_path / "empty" / "bin" / "pacmr", "--help"]
    assert "fit" in subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
