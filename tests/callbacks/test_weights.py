import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from pacmr_lightning.callbacks import WeightRecorder
from pacmr_lightning.callbacks.weights import SCHEMA
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import replacing
from pacmr_lightning.runs.folder import read_weights, weight_parts

from .conftest import Data, Module, fit


def test_one_row_a_pair_and_a_visit(tmp_path):
    """They are on disk when a checkpoint is, and a fresh fit replaces them."""
    seen = {}

    class Look(ModelCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            super()._save_checkpoint(trainer, filepath)
            seen[trainer.global_step] = len(read_weights(tmp_path))

    recorder = WeightRecorder(rows_per_part=1)
    fit(tmp_path, [recorder], max_epochs=1, enable_checkpointing=False)
    assert len(read_weights(tmp_path)) == 32 and len(weight_parts(tmp_path)) == 4
    recorder.rows_per_part = 20
    fit(tmp_path, [recorder], enable_checkpointing=False)
    frame = read_weights(tmp_path)
    assert (frame.groupby("id").size() == 3).all()
    assert frame["step"].tolist() == [step for step in range(12) for _ in range(8)]
    first = frame[frame["step"] == 0]
    assert first["id"].tolist() == [f"pair-{i}" for i in range(8)]
    sign = np.where(np.arange(8) % 4 == 0, -1, 1)
    np.testing.assert_allclose(first["u"], sign * (1 + np.arange(8) / 32), rtol=1e-6)
    np.testing.assert_allclose(first["delta"], 2 * first["u"], rtol=1e-6)
    expected = 1 / (1 + np.exp(-frame["a"] * frame["u"] - frame["b"]))
    np.testing.assert_allclose(frame["weight"], expected, rtol=1e-6)
    assert first["flipped"].tolist() == [i % 4 == 0 for i in range(8)]
    # 20 rows are reached with the third step of 8.
    assert [len(pq.read_table(part)) for part in weight_parts(tmp_path)] == [24] * 4
    assert all(pq.read_schema(part).equals(SCHEMA) for part in weight_parts(tmp_path))
    assert not list((tmp_path / "weights").glob(".*"))
    fit(tmp_path, [Look(every_n_train_steps=3, save_top_k=-1), WeightRecorder()], max_epochs=2)
    assert seen == {3: 24, 6: 48}


def test_unknown_values_are_null(tmp_path):
    fit(tmp_path, [WeightRecorder()], Module("dpo"), Data(lambda i: None if i < 3 else i == 3), max_steps=1)
    (part,) = weight_parts(tmp_path)
    table = pq.read_table(part)
    assert table["a"].null_count == table["b"].null_count == 8
    assert table["u"].null_count == table["weight"].null_count == 0
    assert table["flipped"].to_pylist() == [None] * 3 + [True] + [False] * 4
    frame = read_weights(tmp_path)
    assert frame["flipped"].dtype == "boolean" and frame["a"].dtype == np.float32


def test_resume_from_an_older_checkpoint_cuts_parts_in_two(tmp_path):
    fit(tmp_path, [WeightRecorder(), ModelCheckpoint(every_n_epochs=1, save_top_k=-1, filename="{epoch}")])
    whole = read_weights(tmp_path)
    for part in weight_parts(tmp_path):
        part.unlink()
    # As if all of it had been flushed at once, and another rank had worked in an earlier run of two.
    for name, start in (("part-000-00007", 0), ("part-001-00003", 1)):
        with replacing(tmp_path / "weights" / f"{name}.parquet") as path:
            rows = pa.Table.from_pandas(whole.iloc[start::2], SCHEMA, preserve_index=False)
            pq.write_table(rows, path)
    (checkpoint,) = tmp_path.rglob("epoch=0.ckpt")
    fit(tmp_path, [WeightRecorder()], resume=checkpoint)
    again = read_weights(tmp_path).sort_values(["step", "id"], ignore_index=True)
    pd.testing.assert_frame_equal(again, whole.sort_values(["step", "id"], ignore_index=True))


def test_bad_input(tmp_path):
    with pytest.raises(UserError, match="There are no weights in"):
        read_weights(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "part-000-00000.parquet").write_text("nonsense")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read_weights(tmp_path)
