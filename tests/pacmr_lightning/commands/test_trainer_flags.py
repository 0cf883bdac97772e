"""Each flag of Lightning's Trainer and each of its callbacks, by what docs/scaling.md says of it."""

import inspect
import json
import re
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.tuner import Tuner

from pacmr_lightning import cli
from pacmr_lightning.datamodules import Files, PreferenceDataModule
from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.trainer_flags import CALLBACKS, FLAGS
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.strategies import LoraDeepSpeedStrategy

from ...conftest import fails, files, quiet_trainer, short_fit, write_lines

PAGE = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text().partition("## Lightning's flags")[2]
LIST, TABLE = PAGE.partition("\n## ")[0].split("Preference runs refuse")
AS_IN_LIGHTNING = set(re.findall(r"`(\w+)`", LIST)) - {"checkpoint", "monitor"}
REFUSED = [
    (given, re.findall("`(.+?)`", row[2]))
    for row in (line.split("|") for line in TABLE.splitlines() if line.startswith("| `"))
    for given in re.findall("`(.+?)`", row[1])[row[1].strip() == "`--trainer.`" :]
]
OPTIONS = {"BackboneFinetuning": {}, "StochasticWeightAveraging": {"swa_lrs": 0.1}}
OPTIONS |= {"GradientAccumulationScheduler": {"scheduling": {"0": 2}}}
OPTIONS |= {"ModelPruning": {"pruning_fn": "l1_unstructured"}, "OnExceptionCheckpoint": {"dirpath": "failed"}}
BASES = {"Callback", "Checkpoint", "BaseFinetuning", "BasePredictionWriter", "ProgressBar"}
RUN = "runs/mine-dpo-noise0-seed42"


def callback(name, **options):
    given = {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": options}
    return f"callbacks+={json.dumps(given)}"


def size(batch):
    return len(getattr(batch, "train", batch))


# Values, updates of the run, and what the run must have.
WORKS = [
    (
        {
            **{"accelerator": "cpu", "devices": "1", "num_nodes": "1", "min_epochs": "1", "min_steps": "1"},
            **{"limit_test_batches": "1", "limit_predict_batches": "1", "num_sanity_val_steps": "0"},
            **{"log_every_n_steps": "2", "enable_progress_bar": "true", "enable_model_summary": "true"},
            **{"deterministic": "true", "benchmark": "false", "inference_mode": "false"},
            **{"use_distributed_sampler": "false", "detect_anomaly": "true", "sync_batchnorm": "true"},
            **{"reload_dataloaders_every_n_epochs": "1", "enable_autolog_hparams": "false"},
            **{"model_registry": "mine", "profiler": "simple", "max_time": "00:01:00:00"},
        },
        2,
        ["metrics.csv"],
    ),
    ({"max_epochs": "2", "check_val_every_n_epoch": "2", "logger": "false"}, 4, []),
    ({"max_epochs": "9", "max_steps": "3", "limit_val_batches": "1"}, 3, []),
    ({"limit_train_batches": "1", "val_check_interval": "1"}, 1, []),
    ({"max_epochs": "99", "EarlyStopping": {"monitor": "val/loss", "stopping_threshold": 1}}, 2, []),
    (
        {
            **{"ModelCheckpoint": {"monitor": "val/loss"}, "DeviceStatsMonitor": {}, "LambdaCallback": {}},
            **{"RichModelSummary": {}, "Timer": {}},
            **{"LearningRateMonitor": {}, "ThroughputMonitor": {"batch_size_fn": f"{__name__}.size"}},
        },
        2,
        ["checkpoints-2/epoch=0-step=2.ckpt"],
    ),
    ({"enable_progress_bar": "true", "RichProgressBar": {}, "ModelSummary": {}}, 2, []),
    ({"enable_progress_bar": "true", "TQDMProgressBar": {}, "default_root_dir": RUN}, 2, []),
    ({"plugins": "lightning.pytorch.plugins.AsyncCheckpointIO"}, 2, []),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("flags")
    tiny_llama(folder / "model")
    write_lines(folder / "pairs.jsonl", World().preference_rows(16, 0))
    return folder


@pytest.fixture
def words(place, inside):
    sizes = "--data.global_batch_size 8 --trainer.max_epochs 1 --trainer.callbacks RunSummary"
    return short_fit(place / "model", f"{files(place / 'pairs.jsonl')} --data.task mine {sizes}")


def test_the_page_names_every_flag():
    own = {"callbacks", "fast_dev_run"}  # of all runs here; a test of its own
    assert {name for flags, _, _ in WORKS for name in flags} | own == AS_IN_LIGHTNING
    known = {*inspect.signature(Trainer).parameters, *of_lightning.__all__} - BASES
    refused = {given.removeprefix("callbacks+ ").split()[0] for given, _ in REFUSED}
    assert AS_IN_LIGHTNING | refused == known and not AS_IN_LIGHTNING & refused
    assert {kind.__name__ for kind in CALLBACKS} | FLAGS.keys() <= refused


@pytest.mark.parametrize(("flags", "updates", "left"), WORKS)
@pytest.mark.filterwarnings("ignore")
def test_as_in_lightning(flags, updates, left, words):
    for name, value in flags.items():  # names of callbacks begin with a capital letter
        words.append(f"--trainer.{callback(name, **value) if name[0].isupper() else f'{name}={value}'}")
    cli.main(words)
    assert updates == json.loads(Path(RUN, "summary.json").read_text())["steps"]
    assert Path(RUN, "checkpoints/last.ckpt").exists() and all(Path(RUN, name).exists() for name in left)
    assert Path(RUN, "metrics.csv").exists() == Path(RUN, "tensorboard").exists() == ("logger" not in flags)


@pytest.mark.parametrize(("given", "remedy"), REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_refused(given, remedy, words, capsys, monkeypatch):
    monkeypatch.setattr(PolicyModel, "build", None)
    name, value = given.split()
    more = callback(value, **OPTIONS.get(value, {})) if name == "callbacks+" else f"{name}={value}"
    said = fails(capsys, [*words, f"--trainer.{more}"])
    assert (value if name == "callbacks+" else f"trainer.{name}") in said
    assert all(part in said for part in remedy)
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("max_steps=0", "trainer.max_steps is 0, so nothing would be trained"),
        ("max_epochs=0", "trainer.max_epochs is 0"),
        ("limit_train_batches=0", "trainer.limit_train_batches is 0"),
        ("val_check_interval=0", "must be above 0; for no validation give trainer.limit_val_batches 0"),
        ("val_check_interval=3", "trainer.val_check_interval is 3, but an epoch has 2 batches"),
        ("val_check_interval=00:00:00:01", "val_check_interval is a time, but an epoch has 2 batches"),
        (callback("ModelCheckpoint", save_on_exception=True), "which would save half an update; lower"),
        (
            callback("ModelCheckpoint", train_time_interval="0:00:01"),
            "would ignore its train_time_interval; set checkpoint.train_time_interval instead",
        ),
        ("devices=[0]", "should be an int > 0"),
        ("accelerator=tpu", "torch_xla"),
    ],
)
def test_values_that_cannot_be(flag, said, words, capsys, monkeypatch):
    """Those of Lightning alone are its own sentence, without a traceback."""
    monkeypatch.setattr(PolicyModel, "build", None)
    assert said in fails(capsys, [*words, f"--trainer.{flag}"])
    assert not list(Path().iterdir())


def test_a_trial_leaves_nothing(words, capsys):
    cli.main([*words, "--trainer.fast_dev_run", "true"])
    assert "The run is in" not in capsys.readouterr().out and not list(Path().iterdir())


@pytest.mark.parametrize(
    ("more", "owner", "name"),
    [
        ("checkpoint.monitor=val_loss", "checkpoint", "val_loss"),
        ("checkpoint.monitor=loss", "checkpoint", "loss"),
        (f"trainer.{callback('EarlyStopping', monitor='val_loss')}", "EarlyStopping", "val_loss"),
        (f"trainer.{callback('ModelCheckpoint', monitor='val_loss')}", "ModelCheckpoint", "val_loss"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_an_unknown_monitor(more, owner, name, words, capsys):
    """One of the validation is refused before training; none spoils the folder for a second try."""
    words = [*words, "--trainer.log_every_n_steps=1", "--trainer.val_check_interval=1"]
    said = fails(capsys, [*words, f"--{more}"])
    assert f"{owner}.monitor is {name}, but nothing has logged {name} by a validation; choose" in said
    assert "val/loss" in said
    assert Path(RUN).exists() == (name == "loss")
    cli.main(words)
    assert json.loads(Path(RUN, "summary.json").read_text())["steps"] == 2


def test_from_python(tmp_path):
    """The same sentences, before anything is read: neither model nor pairs exist."""
    module = PreferenceModule(PolicyModel("nowhere"))
    data = PreferenceDataModule(Files("nowhere.jsonl"), tokenizer="nowhere")
    said = r"batches is 2, but .* data\.global_batch_size, cut by model\.micro_batch_size; leave it out"
    with pytest.raises(UserError, match=rf"trainer\.accumulate_grad_{said}"):
        quiet_trainer(tmp_path, accumulate_grad_batches=2).fit(module, data)
    sections = {"bf16": {"enabled": True}}, {"fp16": {"enabled": "auto"}, "optimizer": {"type": "AdamW"}}
    for config in (*sections, {"bf16": True}, {"gradient_clipping": 0.1}, {"steps_per_print": "auto"}):
        with pytest.raises(UserError, match=f"DeepSpeed is given {[*config][-1]} .*; leave it out"):
            quiet_trainer(tmp_path, strategy=LoraDeepSpeedStrategy(config=config)).fit(module, data)
    with pytest.raises(UserError, match="LearningRateFinder"):
        Tuner(quiet_trainer(tmp_path)).lr_find(module, datamodule=data)
    with pytest.raises(Exception, match=r'UserError: .* lost; give devices=1 .* strategy="ddp" in a script'):
        quiet_trainer(tmp_path, strategy="ddp_fork").fit(module, data)
