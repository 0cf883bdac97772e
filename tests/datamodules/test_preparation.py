"""What becomes of rows before they are batches: augmented prompts, held-out pairs, realised noise."""

import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import Trainer

from pacmr_lightning import cli
from pacmr_lightning.batch import Segment
from pacmr_lightning.datamodules import (
    AnnotatorNoise,
    CategoryNoise,
    EmbeddedWorld,
    Files,
    NoiseFromMask,
    PreferenceDataModule,
    SymmetricNoise,
    TwoRateNoise,
)
from pacmr_lightning.datamodules.token_report import summary_line
from pacmr_lightning.errors import UserError

from ..conftest import write_lines


@pytest.fixture
def make(write_rows, pair_rows, tiny_tokenizer_folder):
    paths = write_rows(pair_rows(30)), write_rows(pair_rows(4), "validation.jsonl")

    def make(source=None, trainer=None, **options):
        small = {"global_batch_size": 4, "meta_every": 2, "meta_batch_size": 4}
        data = PreferenceDataModule(source or Files(*paths), tiny_tokenizer_folder, **(small | options))
        data.trainer = trainer
        data.prepare_data()
        data.setup("fit")
        return data

    return make


@pytest.fixture
def augmentations(tmp_path):
    def make(prompts, **more):
        columns = {"prompt": prompts, "augmented_prompt": [f"Again: {p}" for p in prompts]}
        pq.write_table(pa.table(columns | more), tmp_path / "augmented.parquet")
        return str(tmp_path / "augmented.parquet")

    return make


def test_meta_batches_have_the_augmented_prompts(make, augmentations, pair_rows):
    data = make(augmentations=augmentations([row["prompt"] for row in pair_rows(6)]), noise_rate=0.4)
    assert [data.counts[split]["no augmented prompt"] for split in ("train", "validation")] == [24, 0]
    batches = data.train_dataloader().dataset
    for step in range(0, 6, 2):
        meta = batches[step].meta
        ids = (meta.input_ids, meta.augmented.input_ids)
        views = (data.tokenizer.batch_decode(each, skip_special_tokens=True) for each in ids)
        assert all(f"Again: {text}" == augmented for text, augmented in zip(*views, strict=True))
        assert torch.equal(meta.flipped, meta.augmented.flipped)
    parts = (data.train_pairs.rows[f"{name}_ids"] for name in ("prompt", "augmented", "chosen", "rejected"))
    lengths = [max(len(p), len(a)) + len(c) + len(r) for p, a, c, r in zip(*parts, strict=True)]
    found = (data.longest_pairs(4).segment_ids != 0).sum(1)
    assert found.tolist() == sorted(lengths, reverse=True)[:4]


def test_prompts_that_rules_reword_are_warned_of(make, augmentations, write_rows, pair_rows, tmp_path):
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    rows = [row | {"augmented_prompt": "Again?" if i < 18 else None} for i, row in enumerate(pair_rows(30))]
    unchanged = [row | {"prompt": f"Colours, {i}?"} for i, row in enumerate(pair_rows(5))]
    some = Files(write_rows([*rows, *unchanged], "more.jsonl"), write_rows(rows[:4], "validation.jsonl"))
    with pytest.warns(UserWarning, match=r"VNet learns from 12 prompts of more\.jsonl.*pacmr augment"):
        make(some, trainer)
    file = str(tmp_path / "rules.parquet")
    words = ["--source", "Files", "--source.train", some.splits.train, "--source.validation"]
    cli.main(["augment", *words, some.splits.validation, "--rewriter", "Rules", "--output", file])
    with pytest.warns(UserWarning, match=r"VNet learns from 30 prompts of more\.jsonl.*BackTranslation"):
        make(some, trainer, augmentations=file)
    prompts = [row["prompt"] for row in pair_rows(30)]
    with warnings.catch_warnings(action="error"):
        make(some)
        make(some, trainer, meta_every=None)
        make(some, trainer, clean_meta=EmbeddedWorld(8))
        make(None, trainer, augmentations=augmentations(prompts))
        make(EmbeddedWorld(30, 4), trainer)


def test_a_sample_of_the_validation_pairs(make, caplog):
    source = EmbeddedWorld(30, 40)
    every, some, more = (make(source, validation_sample=n).validation_pairs for n in (None, 10, 20))
    ids = [set(pairs.rows["id"][:]) for pairs in (every, some, more)]
    assert [len(found) for found in ids] == [40, 10, 20] and ids[1] < ids[2] < ids[0]
    assert [name for name in every.rows["id"][:] if name in ids[1]] == some.rows["id"][:]
    assert len(make(source, validation_sample=100).validation_pairs) == 40
    assert len(make(source, validation_sample=10).val_dataloader().dataset) == 1


def test_augmentations_that_do_not_fit(make, augmentations, pair_rows):
    # One base config serves DPO and MWN too, before the file is there.
    make(augmentations="none.parquet", meta_every=None)
    make(augmentations="none.parquet", clean_meta=EmbeddedWorld(8))
    with pytest.raises(UserError, match=r"There is no file none\.parquet"):
        make(augmentations="none.parquet")
    said = r"none of its prompts augments a training pair of rows\.jsonl"
    few = [pair_rows(1)[0]["prompt"]]
    for more in ({"prompt": ["other"]}, {"pair_ids": [["another"]]}, {"augmented_prompt": [" "]}):
        with pytest.raises(UserError, match=said):
            make(augmentations=augmentations(few, **more))
    with pytest.raises(UserError, match=r"Only 1 of the 30 training pairs .* paraphrases with pacmr augment"):
        make(augmentations=augmentations(few)).train_dataloader()


def test_clean_pairs_without_ids_are_held_out_by_their_texts(make, write_rows, pair_rows):
    rows = pair_rows(30)
    clean = [dict(row) for row in rows[:8]]
    for row in clean[::2]:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    for given in (rows, [row | {"id": f"{i}"} for i, row in enumerate(rows)]):
        train, held_out = write_rows(given, "rows.jsonl"), write_rows(clean, "clean.jsonl")
        data = make(Files(train, train), clean_meta=Files(held_out, held_out), meta_batch_size=8)
        assert data.counts["train"]["in clean_meta"] == 8
    ties = [row | {"label": "tie"} for row in clean]
    some = Files(write_rows([*ties[:2], *clean[2:]], "some.jsonl"), train)
    assert len(make(clean_meta=some, meta_batch_size=4).clean_pairs) == 6
    with pytest.raises(UserError, match="All 8 pairs of clean_meta are ties"):
        make(clean_meta=Files(write_rows(ties, "ties.jsonl"), train))


def test_clean_pairs_come_as_meta_and_never_as_train(make):
    noise = AnnotatorNoise(0.4)
    options = {"global_batch_size": 8, "noise": noise, "clean_meta": EmbeddedWorld(16, 1)}
    with pytest.raises(UserError, match="clean_meta has 16 pairs, fewer than meta_batch_size 17"):
        make(EmbeddedWorld(64, 4), **options, meta_batch_size=17).train_dataloader()
    data = make(EmbeddedWorld(64, 4), **options)
    batches = data.train_dataloader().dataset
    assert data.counts["train"]["in clean_meta"] == 16 and len(batches) == 6
    clean = {row["id"]: row["eta"] for row in data.clean_meta.load("train")}
    etas = {row["id"]: row["eta"] for row in data.source.load("train")}
    trained, seen = set(), set()
    for step in range(len(batches)):
        batch = batches[step]
        trained |= set(batch.train.ids)
        flips = batch.train.flipped.tolist()
        # eta is that of the label as trained.
        expected = [1 - etas[i] if flip else etas[i] for i, flip in zip(batch.train.ids, flips, strict=True)]
        assert batch.train.eta.tolist() == pytest.approx(expected)
        assert (batch.meta is None) == (step % 2 == 1)
        if batch.meta is not None:
            seen |= set(batch.meta.ids)
            assert batch.meta.augmented is None
            # As found, not as the noise would leave them.
            assert batch.meta.eta.tolist() == pytest.approx([clean[i] for i in batch.meta.ids])
    assert len(trained) == 48 and not trained & set(clean) and seen <= set(clean) and len(seen) == 12
    assert 0 < sum(data.train_pairs.flipped) < 48
    # What rDPO and others are told is the share that came about.
    assert data.noise_rate == sum(data.train_pairs.swapped) / 48
    told = summary_line("world", "train", data.counts["train"])
    assert told.endswith(f"16 held out for clean_meta; {data.noise_rate:.1%} of labels flipped")
    assert list(data.annotators.values()) == noise.annotators(data.source.load("train"))
    batch = data.train_pairs.batch(range(48))
    assert batch.annotators == [data.annotators[name] for name in batch.ids]


def test_noise_of_every_kind_arrives_in_the_pairs(make, write_rows, pair_rows, tmp_path):
    given = [(True, False, None)[i % 3] for i in range(30)]
    rows = [row | {"id": f"r{i}", "category": "ab"[i % 2]} for i, row in enumerate(pair_rows(30))]
    rows = [row | {"flipped": wrong} for row, wrong in zip(rows, given, strict=True)]
    source = Files(write_rows(rows), write_rows(rows[:4], "validation.jsonl"))
    plain = make(source)
    assert plain.noise_flips is None and plain.train_pairs.flipped == [1, 0, -1] * 10
    uniform = make(source, noise_rate=0.4)
    assert uniform.uniform_noise and uniform.noise_rate == 0.4
    same = make(source, noise=SymmetricNoise(0.4))
    assert same.uniform_noise and same.noise_rate == 0.4 and same.noise_flips == uniform.noise_flips
    mask = write_lines(tmp_path / "mask.jsonl", ({"id": f"r{i}", "flipped": i < 6} for i in range(30)))
    for noise in (TwoRateNoise([0.1, 0.6]), CategoryNoise({"a": 0.9}), NoiseFromMask(mask)):
        data = make(source, noise=noise)
        pairs = data.train_pairs
        expected = [data.noise_flips[name] for name in pairs.rows["id"]]
        assert pairs.swapped == expected and any(expected) and not all(expected)
        batch = pairs.batch(range(30))
        for row, flip, ids, segments in zip(rows, expected, batch.input_ids, batch.segment_ids, strict=True):
            first, second = ("rejected", "chosen") if flip else ("chosen", "rejected")
            assert data.tokenizer.decode(ids[segments == Segment.CHOSEN]) == f"{row[first]}<eos>"
            assert data.tokenizer.decode(ids[segments == Segment.REJECTED]) == f"{row[second]}<eos>"
        # A wrong label that is flipped is right; one of which nothing is known counts as right.
        assert pairs.flipped == [bool(wrong) != flip for wrong, flip in zip(given, expected, strict=True)]
        assert not data.uniform_noise and data.noise_rate == sum(expected) / 30
        assert data.counts["train"]["flipped"] == sum(expected)
        assert not any(data.validation_pairs.swapped)
    assert data.noise_rate == 0.2
