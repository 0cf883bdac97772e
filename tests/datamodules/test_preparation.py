"""What becomes of rows before they are batches: augmented prompts, held-out pairs, realised noise."""

import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import Trainer

from pacmr_lightning import cli
from pacmr_lightning.datamodules import (
    AnnotatorNoise,
    CategoryNoise,
    EmbeddedWorld,
    Files,
    NearTieNoise,
    NoiseFromMask,
    PreferenceDataModule,
    SymmetricNoise,
    TwoRateNoise,
)
from pacmr_lightning.errors import UserError

from ..conftest import write_lines


@pytest.fixture
def make(write_rows, pair_rows, tiny_tokenizer_folder):
    train, validation = write_rows(pair_rows(30)), write_rows(pair_rows(4), "validation.jsonl")

    def make(source=None, trainer=None, **options):
        small = {"global_batch_size": 4, "meta_every": 2, "meta_batch_size": 4}
        data = PreferenceDataModule(
            source or Files(train, validation), tiny_tokenizer_folder, **(small | options)
        )
        data.trainer = trainer
        data.prepare_data()
        data.setup("fit")
        return data

    return make


@pytest.fixture
def augmentations(tmp_path):
    def make(prompts):
        columns = {"prompt": prompts, "augmented_prompt": [f"Again: {p}" for p in prompts]}
        pq.write_table(pa.table(columns), tmp_path / "augmented.parquet")
        return str(tmp_path / "augmented.parquet")

    return make


def test_meta_batches_have_the_augmented_prompts(make, augmentations, pair_rows):
    """And are the same otherwise; the longest pair counts them, too."""
    data = make(augmentations=augmentations([row["prompt"] for row in pair_rows(6)]), noise_rate=0.4)
    assert [data.counts[split]["no augmented prompt"] for split in ("train", "validation")] == [24, 0]
    batches = data.train_dataloader().dataset
    for step in range(0, 6, 2):
        meta = batches[step].meta
        views = (
            data.tokenizer.batch_decode(b.input_ids, skip_special_tokens=True) for b in (meta, meta.augmented)
        )
        assert all(f"Again: {text}" == augmented for text, augmented in zip(*views, strict=True))
        assert torch.equal(meta.flipped, meta.augmented.flipped)
    rows = data.train_pairs.rows[:]
    prompts = [max(map(len, both)) for both in zip(rows["prompt_ids"], rows["augmented_ids"], strict=True)]
    both = [len(c) + len(r) for c, r in zip(rows["chosen_ids"], rows["rejected_ids"], strict=True)]
    lengths = sorted((p + b for p, b in zip(prompts, both, strict=True)), reverse=True)
    found = data.longest_pairs(4)
    assert found.augmented is None and (found.segment_ids != 0).sum(1).tolist() == lengths[:4]


def test_prompts_that_rules_reword_are_warned_of(make, augmentations, write_rows, pair_rows, tmp_path):
    """In a training run whose VNet learns from them, and in no other."""
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
    with pytest.raises(UserError, match="validation_sample is 0"):
        make(source, validation_sample=0)


def test_augmentations_that_do_not_fit(make, augmentations, pair_rows):
    # One base config serves DPO and MWN too, before the file is there.
    make(augmentations="none.parquet", meta_every=None)
    make(augmentations="none.parquet", clean_meta=EmbeddedWorld(8))
    with pytest.raises(UserError, match=r"There is no file none\.parquet"):
        make(augmentations="none.parquet")
    said = r"none of its prompts augments a training pair of rows\.jsonl"
    with pytest.raises(UserError, match=said):
        make(augmentations=augmentations(["other", "prompts"]))
    of_others = augmentations([row["prompt"] for row in pair_rows(2)])
    table = pq.read_table(of_others)
    pq.write_table(table.append_column("pair_ids", pa.array([["x"], ["y"]])), of_others)
    with pytest.raises(UserError, match=said):
        make(augmentations=of_others)
    few = augmentations([pair_rows(1)[0]["prompt"]])
    with pytest.raises(UserError, match=r"Only 1 of the 30 training pairs .* paraphrases with pacmr augment"):
        make(augmentations=few).train_dataloader()


def test_clean_pairs_are_held_out(make, write_rows, pair_rows):
    rows = [row | {"id": f"r{i}"} for i, row in enumerate(pair_rows(30))]
    source = Files(write_rows(rows), write_rows(rows[:4], "validation.jsonl"))
    clean = Files(write_rows(rows[5:15], "clean.jsonl"), write_rows(rows[:1], "unused.jsonl"))
    data = make(source, clean_meta=clean)
    assert data.counts["train"]["in clean_meta"] == 10 and len(data.train_pairs) == 20
    with pytest.raises(UserError, match="clean_meta has 10 pairs, fewer than meta_batch_size 11"):
        make(source, clean_meta=clean, meta_batch_size=11).train_dataloader()


def test_clean_pairs_come_as_meta_and_never_as_train(make):
    options = {"global_batch_size": 8, "noise_rate": 0.4, "clean_meta": EmbeddedWorld(16, 1)}
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


def test_a_curriculum_has_the_easiest_pairs_in_order(make, tmp_path):
    every = make(noise_rate=0.5)
    ids, swapped = every.train_pairs.rows["id"][:], every.train_pairs.swapped
    u = np.random.default_rng(0).permutation(30) / 10 - 1.5
    observed = np.where(swapped, "rejected", "chosen")
    table = {"id": ids, "cross_fit_u": u, "observed": observed, "texts": every.train_pairs.rows["texts"][:]}
    pd.DataFrame(table).to_parquet(tmp_path / "pairs.parquet")
    data = make(noise_rate=0.5, curriculum=str(tmp_path / "pairs.parquet"), curriculum_share=0.45)
    easiest = np.log1p(np.exp(-u)).argsort()[:13].tolist()
    pairs = data.train_pairs
    assert pairs.rows["id"][:] == [ids[i] for i in easiest]
    assert pairs.swapped == [swapped[i] for i in easiest]
    assert data._kept == easiest
    batches = data.train_dataloader().dataset
    assert [batches[step].train.ids for step in (0, 2, 3)] == [
        [ids[i] for i in easiest[start : start + 4]] for start in (0, 8, 0)
    ]
    assert data.counts["train"]["easiest"] == 13 and len(data.noise_flips) == 30
    order = "ids, labels, order or augmented prompts of the training pairs"
    assert data.fit_options()[order] != every.fit_options()[order]


def test_noise_of_every_kind_arrives_in_the_pairs(make, write_rows, pair_rows, tmp_path):
    rows = [row | {"id": f"r{i}", "category": "ab"[i % 2]} for i, row in enumerate(pair_rows(30))]
    source = Files(write_rows(rows), write_rows(rows[:4], "validation.jsonl"))
    assert make(source).noise_flips is None
    uniform = make(source, noise_rate=0.4)
    assert uniform.uniform_noise and uniform.noise_rate == 0.4
    same = make(source, noise=SymmetricNoise(0.4))
    assert same.uniform_noise and same.noise_rate == 0.4 and same.noise_flips == uniform.noise_flips
    mask = write_lines(tmp_path / "mask.jsonl", ({"id": f"r{i}", "flipped": i < 6} for i in range(30)))
    for options in (
        {"noise": TwoRateNoise([0.1, 0.6])},
        {"noise": CategoryNoise({"a": 0.9})},
        {"noise": NoiseFromMask(mask)},
    ):
        data = make(source, **options)
        pairs = data.train_pairs
        expected = [data.noise_flips[name] for name in pairs.rows["id"]]
        assert pairs.swapped == expected and any(expected) and not all(expected)
        assert pairs.flipped == [int(flip) for flip in expected]
        assert not data.uniform_noise and data.noise_rate == sum(expected) / 30
        assert data.counts["train"]["flipped"] == sum(expected)
        assert not any(data.validation_pairs.swapped)
    assert data.noise_rate == 0.2


def test_annotators_are_those_of_the_rows_or_assigned(make, write_rows, pair_rows):
    rows = [row | {"id": f"r{i}", "eta": 0.1 * (i % 9) + 0.1} for i, row in enumerate(pair_rows(30))]
    source = Files(write_rows(rows), write_rows(rows[:4], "validation.jsonl"))
    assert make(source).annotators is None and make(source, noise=NearTieNoise(0.3)).annotators is None
    noise = AnnotatorNoise(0.4)
    clean = Files(write_rows(rows[5:15], "clean.jsonl"), source.splits.validation)
    data = make(source, noise=noise, clean_meta=clean)
    assert list(data.annotators) == [f"r{i}" for i in range(30)] and not data.uniform_noise
    assert list(data.annotators.values()) == noise.annotators(source.load("train"))
    # What rDPO and others are told is the share that came about.
    assert data.noise_rate == sum(data.train_pairs.swapped) / 20
    batch = data.train_pairs.batch(range(20))
    assert batch.annotators == [data.annotators[name] for name in batch.ids], "also where pairs are held out"
    some = write_rows([*rows[:29], rows[29] | {"annotator": 7}], "some.jsonl")
    named = make(Files(some, source.splits.validation))
    assert named.annotators == {f"r{i}": None for i in range(29)} | {"r29": "7"}
    assert named.train_pairs.batch([29, 3]).annotators == ["7", None]
    assert named.validation_pairs.batch([0]).annotators is None
