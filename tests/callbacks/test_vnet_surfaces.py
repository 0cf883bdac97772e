"""VNetSurfaces: grid, files and images of a real run; a resume; two processes: test_two_processes.py."""

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pacmr_lightning.analysis.surface import load_surface, slope_and_offset, steps_of
from pacmr_lightning.callbacks import WeightRecorder
from pacmr_lightning.callbacks.weight_figures import VNetSurfaces, WeightDistributions
from pacmr_lightning.runs.folder import read_weights
from pacmr_lightning.weighting import VNetWeighting

from .conftest import Module, fit, train


@pytest.mark.slow
def test_values_of_a_real_run(tiny_llama, tmp_path):
    # A threshold that all pairs pass and a fast VNet, so that its surface is not flat; some seeds' units die.
    torch.manual_seed(0)
    weighting = VNetWeighting(every=1, learning_rate=0.05)
    weighting.outer.tau = 0.5
    callbacks = [WeightRecorder(), VNetSurfaces(steps=[2], points=9, window=16, every=3)]
    options = {"weighting": weighting, "data": {"task": "tiny"}, "max_steps": 4}
    trainer = train(tmp_path, tiny_llama(tmp_path / "model", initializer_range=0.2), callbacks, **options)
    vnet = trainer.lightning_module.vnet

    assert steps_of(tmp_path) == [2, 4]
    last = load_surface(tmp_path)
    assert (last.step, last.method, last.task, last.noise_rate) == (4, "pacmr", "tiny", 0.3)
    rows = read_weights(tmp_path)
    for surface, (first, end) in ((load_surface(tmp_path, 2), (0, 2)), (last, (2, 4))):
        part = rows[rows["step"].between(first, end - 1)]
        assert len(part) == 16
        part = part.sort_values(["step", "u", "delta", "weight", "flipped"])  # u of a fresh policy is 0
        for name in ("u", "delta", "weight", "flipped"):
            np.testing.assert_array_equal(getattr(surface.visits, name), part[name].astype(float))
        assert surface.a.shape == surface.b.shape == surface.g.shape == surface.density.shape == (9, 9)
        delta, u = part["delta"].astype(float), part["u"].astype(float)
        np.testing.assert_allclose(surface.delta[[0, -1]], delta.quantile([0.005, 0.995]), rtol=1e-9)
        side = u.quantile([0.005, 0.995]).abs().max()
        np.testing.assert_allclose(surface.u, np.linspace(-side, side, 9), rtol=1e-9, atol=1e-12)

    a, b = slope_and_offset(vnet, last.delta, last.u)  # by hand: analysis/test_figures.py
    np.testing.assert_array_equal((last.a, last.b), (a, b))
    np.testing.assert_allclose(last.g, 1 / (1 + np.exp(-a * last.u - b)), rtol=1e-9)
    assert np.ptp(last.g) > 0.1
    assert np.ptp(last.a) > 0.01 and np.ptp(last.b) > 0.01
    # The last step's pairs got their weights from this VNet, in float32.
    end = rows[rows["step"] == 3]
    with torch.no_grad():
        weights, _, _ = vnet(*(torch.tensor(end[name].to_numpy()) for name in ("delta", "u")))
    np.testing.assert_allclose(weights, end["weight"], rtol=1e-5)

    with np.load(tmp_path / "analysis" / "surfaces-step-00004.npz") as arrays:
        np.testing.assert_array_equal(arrays["g"], last.g)
    table = pd.read_csv(tmp_path / "analysis" / "surfaces-step-00004.csv")
    assert list(table) == ["delta", "u", "a", "b", "g", "density"]
    np.testing.assert_allclose(table["g"].to_numpy().reshape(9, 9), last.g, rtol=1e-8)
    np.testing.assert_allclose(table["u"].to_numpy().reshape(9, 9)[3], last.u, rtol=1e-8)
    events = EventAccumulator(str(tmp_path), {"images": 0}).Reload()
    for name in ("heat_maps", "weight_function", "surfaces"):
        shown_at = [1, 3] if name == "surfaces" else [1, 2, 3]
        shown = events.Images(f"pair_weights/{name}")
        assert [event.step for event in shown] == shown_at, "steps, every and the end"
        assert len({event.encoded_image_string for event in shown}) == len(shown_at)


def test_nothing_where_there_is_no_vnet_and_all_weights_are_alike(tmp_path):
    fit(tmp_path, [VNetSurfaces(steps=[2]), WeightDistributions(steps=[3])], Module("dpo"))
    assert not (tmp_path / "analysis").exists()


def test_visits_that_are_not_finite_are_left_out(tmp_path):
    class Altered(Module):
        def training_step(self, batch, batch_idx):
            outputs = super().training_step(batch, batch_idx)
            outputs["record"].u[:1].fill_(torch.inf)
            return outputs

    fit(tmp_path, [VNetSurfaces()], Altered())
    surface = load_surface(tmp_path)
    assert len(surface.visits.u) == 84  # 12 of 96 are infinite
    assert np.isfinite(surface.g).all()


@pytest.mark.slow
def test_a_resume_removes_the_files_of_steps_that_did_not_happen(tmp_path):
    """And no file of the user's. That the others are as in a whole run: tests/kills."""

    def callbacks(*steps):
        return [VNetSurfaces(list(steps), points=5, window=30), ModelCheckpoint(every_n_epochs=1)]

    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path, callbacks(3, 6, 7), Module(die_at=7))
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert steps_of(tmp_path) == [3, 6, 7]
    (tmp_path / "analysis" / "surfaces-step-00007-mine.png").write_text("a copy of the user's")
    fit(tmp_path, callbacks(6), resume=checkpoint)
    assert steps_of(tmp_path) == [3, 6, 12]
    left = {path.name for path in (tmp_path / "analysis").glob("*00007*")}
    assert left == {"surfaces-step-00007-mine.png"}
