"""Callbacks in two processes leave what they leave in one, also where the run is resumed on more or fewer."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from pacmr_lightning.analysis.surface import load_surface
from pacmr_lightning.callbacks import RunSummary, VNetSurfaces, WeightDistributions, WeightRecorder
from pacmr_lightning.runs.folder import read_weights, weight_parts

from .conftest import Ordered, fit


@pytest.mark.slow
def test_two_processes_leave_what_one_leaves(tmp_path):
    def run(name, **options):
        drawing = [VNetSurfaces([7], points=11, window=20), WeightDistributions([7], window=20)]
        saving = ModelCheckpoint(tmp_path / name, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
        callbacks = [WeightRecorder(rows_per_part=6), RunSummary(window=50), *drawing, saving]
        fit(tmp_path / name, callbacks, data=Ordered(), **options)
        return tmp_path / name

    two = {"devices": 2, "strategy": "ddp_spawn"}
    one, both = run("one"), run("two", **two)
    for name, before in (("fewer", both), ("more", one)):
        shutil.copytree(before, tmp_path / name)
    fewer = run("fewer", resume=both / "epoch=1.ckpt")
    more = run("more", resume=one / "epoch=1.ckpt", **two)
    expected = json.loads((one / "summary.json").read_text())
    assert expected["window_pairs"] == 56 and expected["wall_seconds"] > expected["seconds"] > 0
    for folder in (both, fewer, more):
        assert {part.name[:8] for part in weight_parts(folder)} == {"part-000", "part-001"}
        visits = (read_weights(each).set_index(["step", "id"]).sort_index() for each in (folder, one))
        pd.testing.assert_frame_equal(*visits, rtol=1e-5)
        found = json.loads((folder / "summary.json").read_text())
        for key in ("flip_auroc", "flip_auroc_u", "steps", "counts", "val_accuracy", "window_pairs"):
            assert found[key] == expected[key]
        for key in ("weight_mean_unflipped", "weight_mean_flipped", "weight_gap"):
            assert found[key] == pytest.approx(expected[key], abs=1e-6)
        files = [sorted(path.name for path in (each / "analysis").iterdir()) for each in (folder, one)]
        assert files[0] == files[1] and len(files[0]) == 2 * 8
        for step in (7, 12):
            surfaces = [load_surface(each, step) for each in (folder, one)]
            for name in ("delta", "u", "a", "b", "density"):
                np.testing.assert_allclose(*(getattr(s, name) for s in surfaces), rtol=1e-5, atol=1e-7)
            for name in ("u", "delta", "weight", "flipped"):
                values = (np.sort(getattr(s.visits, name)) for s in surfaces)
                np.testing.assert_allclose(*values, rtol=1e-5)
