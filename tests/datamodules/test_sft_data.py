"""Demonstrations on their way from files and the synthetic benchmark to batches."""

import re

import pytest
import torch

from pacmr_lightning.datamodules.sft import SFTDataModule
from pacmr_lightning.datamodules.sources import CompletionFiles, WorldCompletions
from pacmr_lightning.errors import UserError

from ..conftest import quiet_trainer


def rows_of(count):
    return [{"prompt": f"What is the sea {i}?", "completion": f" It is {i} calm."} for i in range(count)]


@pytest.fixture
def files(write_rows):
    def make(train, validation=None):
        held_out = write_rows(validation or rows_of(3), "validation.jsonl")
        return CompletionFiles(write_rows(train, "train.jsonl"), held_out)

    return make


@pytest.fixture
def ready(tmp_path):
    def make(source, **options):
        data = SFTDataModule(source, vocab_size=300, **options)
        data.trainer = quiet_trainer(tmp_path)
        data.prepare_data()
        data.setup("fit")
        return data

    return make


def test_batches_hold_the_loss_on_the_completion_only(files, ready):
    rows = [row | {"completion": row["completion"] * (1 + i % 3)} for i, row in enumerate(rows_of(10))]
    data = ready(files(rows), batch_size=4)
    seen = []
    for batch in data.train_dataloader():
        assert list(batch) == ["input_ids", "attention_mask", "labels"]
        assert all(t.dtype == torch.long and t.shape == batch["labels"].shape for t in batch.values())
        for ids, mask, labels in zip(*batch.values(), strict=True):
            start, end = int((labels != -100).nonzero()[0]), int(mask.sum())
            assert mask[:end].all() and not mask[end:].any()
            assert (ids[end:] == data.tokenizer.pad_token_id).all() and (labels[end:] == -100).all()
            assert torch.equal(labels[start:end], ids[start:end])
            seen.append([data.tokenizer.decode(part) for part in (ids[:start], ids[start:end])])
    expected = [[f"<bos>{row['prompt']}", f"{row['completion']}<eos>"] for row in rows]
    assert sorted(seen) == sorted(expected) and seen != expected


def test_the_order_depends_on_seed_and_epoch_alone(files, ready):
    source = files(rows_of(12))

    def order(seed, epoch):
        loader = ready(source, seed=seed).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return torch.cat([batch["input_ids"].flatten() for batch in loader]).tolist()

    first, other_epoch, other_seed = order(1, 0), order(1, 1), order(2, 0)
    assert first == order(1, 0) and other_epoch == order(1, 1)
    assert first != other_epoch and first != other_seed


def test_ranks_share_the_rows_and_validate_none_twice(files, ready):
    data = ready(files(rows_of(8), rows_of(7)))
    fit_loop = data.trainer.fit_loop
    for load, per_rank in ((data.train_dataloader, 4), (data.val_dataloader, 3)):
        shares = []
        for rank in (0, 1):
            ranks = {"world_size": 2, "global_rank": rank, "fit_loop": fit_loop, "current_epoch": 0}
            data.trainer = type("Ranks", (), ranks)
            shares.append({tuple(row.tolist()) for batch in load() for row in batch["input_ids"]})
        assert [len(share) for share in shares] == [per_rank, per_rank]
        assert not shares[0] & shares[1]
    data.trainer.world_size = 8
    with pytest.raises(UserError, match="There are 7 validation rows, but each of 8 processes needs one"):
        data.setup("fit")


def test_rows_that_cannot_be_used_are_dropped_and_counted(files, ready, caplog):
    odd = ({"prompt": "What is it?", "completion": text} for text in (" It is the sea." * 20, "", " \n "))
    data = ready(files([*rows_of(3), *odd]), max_length=60)
    assert data.counts == {
        "train": {"rows": 6, "kept": 3, "too long": 1, "empty completion": 2},
        "validation": {"rows": 3, "kept": 3},
    }
    assert "train.jsonl, train: 3 of 6 rows kept; dropped: 1 too long, 2 empty completion" in caplog.text
    [length] = {batch["input_ids"].shape[1] for batch in ready(files(rows_of(1))).train_dataloader()}
    assert ready(files(rows_of(1)), max_length=length).counts["train"]["kept"] == 1
    with pytest.raises(UserError, match=f"None of the 1 train rows .* {length - 1} \\(1 too long\\)"):
        ready(files(rows_of(1)), max_length=length - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 1}, "max_length is 1, but it must be at least 2"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"vocab_size": None}, "tokenizer is None and vocab_size is None; give the one"),
        ({"tokenizer": "gpt2"}, "tokenizer is 'gpt2' and vocab_size is 300; give the one"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        SFTDataModule(WorldCompletions(rows=1), **{"vocab_size": 300, **options})
