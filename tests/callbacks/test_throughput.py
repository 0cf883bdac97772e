import warnings

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pacmr_lightning.batch import PairBatch, PairedBatch
from pacmr_lightning.callbacks import Throughput, pairs_in, tokens_in


def test_counts_of_a_batch():
    pairs = PairBatch.collate(["a", "b"], [[1, 2], [1]], [[3], [3, 4]], [[5], [5]])
    meta = PairBatch.collate(["m"], [[1]], [[2]], [[3]])
    assert pairs_in(pairs) == pairs_in(PairedBatch(pairs, meta)) == 2
    assert tokens_in(pairs) == tokens_in(PairedBatch(pairs, meta)) == 8


@pytest.mark.parametrize("validation", [True, False])
def test_scalars_in_tensorboard(fit, tmp_path, validation):
    logger = TensorBoardLogger(tmp_path, name="tensorboard", version="")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*flops_per_batch")
        limits = {} if validation else {"limit_val_batches": 0}
        fit(tmp_path, [Throughput(window_size=3)], logger=logger, val_check_interval=2, **limits)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {f"train/device/{kind}_per_sec" for kind in ("items", "samples", "batches")} <= names
    assert {f"train/{kind}" for kind in ("time", "batches", "samples", "lengths")} <= names
    assert ("validate/samples" in names) == validation
    assert events.Scalars("train/samples")[-1].value == 96
    assert len(events.Scalars("train/device/items_per_sec")) == 10
    tokens, pairs = (
        events.Scalars(f"train/device/{kind}_per_sec")[-1].value for kind in ("items", "samples")
    )
    assert tokens == pytest.approx(4.5 * pairs)
