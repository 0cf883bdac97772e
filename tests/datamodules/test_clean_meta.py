"""Meta batches of clean pairs (MWN-DPO)."""

import pytest

from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule
from pacmr_lightning.errors import UserError


def make(folder, **options):
    defaults = {
        "global_batch_size": 8,
        "meta_every": 2,
        "meta_batch_size": 4,
        "noise_rate": 0.4,
        "clean_meta": EmbeddedWorld(pairs=16, validation_pairs=1),
    }
    data = PreferenceDataModule(
        EmbeddedWorld(pairs=64, validation_pairs=4), folder, **{**defaults, **options}
    )
    data.setup("fit")
    return data


def test_clean_pairs_come_as_meta_and_never_as_train(tiny_tokenizer_folder):
    data = make(tiny_tokenizer_folder)
    batches = data.train_dataloader().dataset
    assert data.counts["train"]["in clean_meta"] == 16 and len(batches) == 6
    clean = {row["id"]: row for row in data.clean_meta.load("train")}
    trained, seen = set(), set()
    for step in range(len(batches)):
        batch = batches[step]
        trained |= set(batch.train.ids)
        assert (batch.meta is None) == (step % 2 == 1)
        if batch.meta is not None:
            seen |= set(batch.meta.ids)
            assert batch.meta.augmented is None
            # As found, not as the noise would leave them: eta is that of the row.
            assert batch.meta.eta.tolist() == pytest.approx([clean[i]["eta"] for i in batch.meta.ids])
    assert len(trained) == 48 and not trained & set(clean) and seen <= set(clean) and len(seen) == 12


def test_eta_follows_the_noise(tiny_tokenizer_folder):
    data = make(tiny_tokenizer_folder, clean_meta=None)
    found = {row["id"]: row["eta"] for row in data.source.load("train")}
    batch = data.train_dataloader().dataset[0].train
    assert 0 < batch.flipped.sum() < 8
    expected = [1 - found[i] if f else found[i] for i, f in zip(batch.ids, batch.flipped, strict=True)]
    assert batch.eta.tolist() == pytest.approx(expected)
    assert batch[2:5].eta.tolist() == pytest.approx(expected[2:5])


def test_bad_input(tiny_tokenizer_folder):
    with pytest.raises(UserError, match="nothing learns from meta pairs"):
        make(tiny_tokenizer_folder, meta_every=None)
    with pytest.raises(UserError, match="clean_meta has 16 pairs, fewer than meta_batch_size 20"):
        make(tiny_tokenizer_folder, meta_batch_size=20).train_dataloader()
