"""The notebook runs from top to bottom, and what it shows is so."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples/noisy_labels.ipynb"


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is in the extra docs")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=900, resources=folder).execute()
    text = "".join(
        output.get("text", "") or str(output.get("data", {}).get("text/plain", ""))
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    )
    assert "pacmr: error" not in text and "Traceback" not in text
    wrong, first = map(int, re.findall(r"(\d+)% of all labels are wrong, (\d+)% of the first 100", text)[0])
    assert wrong == 25 and first > 80
    wins, losses = (float(re.search(rf"{side} wins.*?([\d.]+)%", text)[1]) for side in "AB")
    assert wins > losses  # of the second policy's samples
    assert (tmp_path / "runs/mine/audit/report.html").exists()
    assert (tmp_path / "exports/mine/adapter_config.json").exists()


def test_its_outputs_are_stored():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    commands = [cell for cell in cells if cell["cell_type"] == "code" and "!pacmr" in "".join(cell["source"])]
    assert len(commands) >= 7 and all(cell["outputs"] for cell in commands)
