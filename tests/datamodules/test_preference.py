"""The datamodule under a real trainer."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

from pacmr_lightning.datamodules.evaluation_prompts import draw_prompts
from pacmr_lightning.datamodules.preference import PreferenceDataModule
from pacmr_lightning.datamodules.sources import Files
from pacmr_lightning.datamodules.stream import EvaluationStream, TrainingStream
from pacmr_lightning.errors import UserError

from ..conftest import quiet_trainer


class Killed(Exception):
    """Stands for what ends a run from outside."""


class Recorder(LightningModule):
    """The smallest module that takes optimizer steps; writes down what it was given."""

    def __init__(self, die_at=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.die_at = die_at
        self.seen = []
        self.evaluated = []

    def training_step(self, batch, _):
        if self.global_step == self.die_at:
            raise Killed
        self.seen.append((self.global_step, batch.train.ids, batch.meta and batch.meta.ids))
        return self.weight.sum()

    def validation_step(self, batch, _):
        self.evaluated += zip(batch.ids, batch.flipped.tolist(), strict=True)

    def predict_step(self, batch, _):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def trainer(tmp_path):
    return partial(quiet_trainer, tmp_path)


@pytest.fixture
def data(write_rows, pair_rows, tiny_tokenizer_folder):
    files = Files(write_rows(pair_rows(46)), write_rows(pair_rows(10), "validation.jsonl"))
    small = {"global_batch_size": 4, "validation_batch_size": 4, "meta_every": 3, "meta_batch_size": 6}
    return partial(PreferenceDataModule, source=files, tokenizer=tiny_tokenizer_folder, **small)


def test_fit_validates_on_clean_labels_and_counts(trainer, data, caplog):
    module, datamodule = Recorder(), data(noise_rate=0.4)
    trainer(max_epochs=2, num_sanity_val_steps=0).fit(module, datamodule)
    assert [step for step, *_ in module.seen] == list(range(22))
    assert [step for step, _, meta in module.seen if meta] == list(range(0, 22, 3))
    # Epochs are permutations without the incomplete batch.
    ids = [name for _, names, _ in module.seen for name in names]
    assert len(set(ids[:44])) == len(set(ids[44:])) == 44 and ids[:44] != ids[44:]
    # Likewise the seven batches of six pairs of an epoch of meta-batches.
    assert len({name for _, _, meta in module.seen[:20] for name in meta or ()}) == 42
    held_out = [(name, -1) for name in datamodule.validation_pairs.rows["id"]]
    assert module.evaluated == held_out * 2
    flipped = sum(datamodule.train_pairs.swapped)
    assert datamodule.counts == {
        "train": {"rows": 46, "kept": 46, "no augmented prompt": 0, "flipped": flipped},
        "validation": {"rows": 10, "kept": 10, "no augmented prompt": 0},
    }
    lines = [r.getMessage() for r in caplog.records if "pairs kept" in r.getMessage()]
    assert len(lines) == 2 and lines[0].startswith("rows.jsonl, train: 46 of 46 pairs kept; ")
    assert "of labels flipped" in lines[0] and "flipped" not in lines[1]


@pytest.mark.parametrize(
    ("save", "die_at", "workers"),
    [
        ({"every_n_train_steps": 5}, 18, 1),
        ({"every_n_train_steps": 11}, 11, 0),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, 13, 1),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, 13, 0),
    ],
)
def test_resuming_goes_on_with_the_next_batch(trainer, data, tmp_path, save, die_at, workers):
    whole = Recorder()
    trainer(max_epochs=3).fit(whole, data())
    first = Recorder(die_at)
    saving = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, **save)
    with pytest.raises(Killed):
        trainer(max_epochs=3, callbacks=[saving]).fit(first, data(num_workers=workers))
    files = (tmp_path / "checkpoints").iterdir()
    checkpoint = max(files, key=lambda file: torch.load(file, weights_only=True)["global_step"])
    second = Recorder()
    trainer(max_epochs=3).fit(second, data(num_workers=workers), ckpt_path=checkpoint)
    start = second.seen[0][0]
    assert 0 < start <= die_at
    assert first.seen == whole.seen[:die_at]
    assert second.seen == whole.seen[start:]


def test_epochs_that_are_cut_short_go_on_through_the_data(trainer, data):
    """The data's step is the trainer's, or a VNet step would have no meta batch."""
    whole, cut = Recorder(), Recorder()
    trainer(max_steps=10).fit(whole, data())
    trainer(max_epochs=2, limit_train_batches=5).fit(cut, data())
    assert cut.seen == whole.seen


LABELS = "ids, labels, order or augmented prompts of the training pairs"


@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        ({}, {}, set()),
        ({"chosen": " It is another."}, {}, {"texts of the training pairs", LABELS}),  # ids are hashes
        ({"eta": 0.5}, {}, {LABELS}),
        ({"augmented_prompt": "Once more, in other words:"}, {}, {LABELS}),
        ({}, {"noise_rate": 0.2}, {"data.noise_rate", "flipped labels of the training pairs"}),
        *(({}, {name: value}, {f"data.{name}"}) for name, value in (("max_length", 700), ("seed", 1))),
        ({}, {"meta_batch_size": 8}, {"data.meta_batch_size"}),
    ],
)
def test_a_resumed_fit_is_compared_by_pairs_and_options(data, write_rows, pair_rows, change, options, named):
    """That a difference is refused: pacmr_lightning/modules/test_preference.py."""

    def found(**options):
        made = data(**options)
        made.setup("fit")
        return made.fit_options()

    def changed():
        return {name for name, value in found(**options).items() if first[name] != value}

    first, rows = found(), pair_rows(46)
    rows[3] |= change
    write_rows(rows)
    assert changed() == named
    write_rows(pair_rows(8), "validation.jsonl")
    assert changed() == named | {"validation pairs"}


def test_incomplete_batches_are_told(trainer, data, caplog):
    trainer(max_steps=1).fit(Recorder(), data(global_batch_size=32, meta_batch_size=20))
    assert "An epoch: 1 update of 32 pairs, 14 of 46 pairs left out; an epoch of meta-b" in caplog.text
    assert "2 batches of 20 pairs, 6 of 46 pairs left out." in caplog.text
    trainer(max_steps=1).fit(Recorder(), data(global_batch_size=23, meta_every=None))
    assert "An epoch: 2 updates of 23 pairs.\n" in caplog.text


def test_ties_are_not_validated(data, write_rows, pair_rows, caplog):
    rows = [row | {"id": f"{i}"} | ({"label": "tie"} if i % 2 else {}) for i, row in enumerate(pair_rows(10))]
    (datamodule := data(source=Files(write_rows(pair_rows(46)), write_rows(rows, "ties.jsonl")))).setup("fit")
    assert datamodule.validation_pairs.rows["id"][:] == ["0", "2", "4", "6", "8"]
    assert "validation: 5 of 10 pairs are ties, of which no response is better; they are left" in caplog.text


def test_what_processes_share(data):
    datamodule = data()
    datamodule.setup("fit")
    pairs = datamodule.validation_pairs
    ids = pairs.rows["id"][:]

    def shares(size, processes):
        streams = (EvaluationStream(pairs, size, rank, processes) for rank in range(processes))
        return [[[ids.index(name) for name in batch.ids] for batch in stream] for stream in streams]

    assert shares(4, 2) == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]
    # A rest that is too small for all processes joins the batch before it.
    assert shares(3, 2) == [[[0, 2], [3, 5], [6, 8]], [[1], [4], [7, 9]]]
    assert shares(4, 3) == [[[0, 3], [4, 7]], [[1], [5, 8]], [[2], [6, 9]]]
    with pytest.raises(UserError, match="each of 11 processes needs one"):
        EvaluationStream(pairs, 20, world_size=11)
    with pytest.raises(UserError, match="meta_batch_size is 3, which 2 processes cannot share"):
        TrainingStream(datamodule.train_pairs, 4, seed=0, meta_every=1, meta_batch_size=3, world_size=2)


def test_the_longest_prompts_come_first_and_too_long_ones_do_not(trainer, data, write_rows, caplog):
    words = [3, 9, 1, 6, 8, 2, 4]
    rows = [{"prompt": f"{n} the{' sea' * n}", "chosen": " a", "rejected": " b"} for n in words]
    rows += [{"chosen": "\n\nHuman: 1", "rejected": "\n\nHuman: 2"}, rows[1] | {"chosen": " c"}]
    path = write_rows(rows)
    datamodule = data(source=Files(path, path))
    lengths = [batch.attention_mask.sum(1) for batch in trainer().predict(Recorder(), datamodule)]
    lengths = torch.cat(lengths).tolist()
    assert len(lengths) == 7 and lengths == sorted(lengths, reverse=True)
    limited = data(source=Files(path, path), predict_max_length=lengths[3])
    batches = trainer().predict(Recorder(), limited)
    assert torch.cat([batch.attention_mask.sum(1) for batch in batches]).tolist() == lengths[3:]
    assert [place for batch in batches for place in batch.places] == [6, 0, 5, 2]
    left_out = f"3 of 7 prompts are left out: longer than predict_max_length {lengths[3]} tokens."
    assert left_out in caplog.text
    none = write_rows([{"prompt": " ", "chosen": " a", "rejected": " b"}], "none.jsonl")
    with pytest.raises(UserError, match=r"none\.jsonl has no prompt to answer"):
        trainer().predict(Recorder(), data(source=Files(none, none)))


def test_which_prompts_are_drawn_depends_on_prompts_and_seed_alone(write_rows, pair_rows, caplog):
    rows = pair_rows(60)
    path = write_rows(rows)
    drawn = draw_prompts(Files(path, path), 20, 42)
    places = [[row["prompt"] for row in rows].index(prompt.text) for prompt in drawn]
    assert len(drawn) == 20 and places == sorted(places)
    # A prompt counts once, with the id of its first pair.
    again = [row | {"id": str(i), "chosen": " x"} for i, row in enumerate(rows[::-1] + rows)]
    other = write_rows(again, "other.jsonl")
    found = draw_prompts(Files(other, other), 20, 42)
    assert [prompt.text for prompt in found] == [prompt.text for prompt in drawn[::-1]]
    assert [prompt.id for prompt in found] == [str(59 - place) for place in places[::-1]]
    assert {p.text for p in draw_prompts(Files(path, path), 20, 1)} != {p.text for p in drawn}
    assert {p.text for p in draw_prompts(Files(path, path), 30, 42)} > {p.text for p in drawn}
    for count in (None, 60, 61):
        assert [p.text for p in draw_prompts(Files(path, path), count, 42)] == [r["prompt"] for r in rows]
        told = "rows.jsonl has 60 distinct prompts, fewer than the 61 asked for." in caplog.text
        assert told == (count == 61)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        *((name, 0, name) for name in ("global_batch_size", "validation_batch_size", "meta_batch_size")),
        *((name, 0, name) for name in ("predict_prompts", "predict_max_length", "validation_sample")),
        *(("noise_rate", 1.0, "noise_rate"), ("num_workers", -1, "num_workers")),
        *(("meta_every", 0, r"meta_every \(the weighting's every\)"), ("max_length", 1, "max_length .*")),
    ],
)
def test_wrong_options(data, option, value, named):
    with pytest.raises(UserError, match=f"{named} is {value}"):
        data(**{option: value})
