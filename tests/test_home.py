"""Paths that begin with ~, where no shell expands them: each is in the home folder, and none makes a ~."""

import os

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger

from pacmr_lightning import cli
from pacmr_lightning.audit import AuditOptions, audit
from pacmr_lightning.callbacks import RunCheckpoint, RunSummary
from pacmr_lightning.datamodules import Files, HubPreferences, PreferenceDataModule
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel

from .conftest import fails, quiet_trainer, write_lines


@pytest.fixture(scope="module")
def home(tiny_llama, pair_rows, preference_config, tmp_path_factory):
    """A home folder with a model, pairs, a config, and another folder that is worked in."""
    folder = tmp_path_factory.mktemp("user")
    home, work = folder / "home", folder / "work"
    for each in (home, work, home / "data"):
        each.mkdir()
    tiny_llama(home / "model")
    for name in ("pairs.jsonl", "data/train.jsonl"):
        write_lines(home / name, pair_rows(24))
    boards = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "~/boards"}}
    trainer = {"max_steps": 2, "default_root_dir": "~/runs/x", "logger": [boards]}
    trainer["callbacks"] = [{"class_path": "RunSummary"}]
    config = preference_config("~/model", "~/pairs.jsonl", {"learning_rate": 1e-3}, **trainer)
    (home / "base.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        patch.setenv("HOME", str(home))
        cli.main(["fit", "--config=~/base.yaml"])
        yield home
    assert not list(work.iterdir())


def test_the_run_is_in_one_folder(home):
    run = home / "runs/x"
    assert {"config.yaml", "summary.json", "checkpoints"} <= set(os.listdir(run))
    assert list((home / "boards").rglob("metrics.csv"))
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["trainer"]["default_root_dir"] == str(run)
    assert config["model"]["init_args"]["policy"]["init_args"]["model"] == str(home / "model")
    assert config["data"]["init_args"]["source"]["init_args"]["train"] == str(home / "pairs.jsonl")


def test_a_run_is_found_again(home, capsys):
    assert "it must be a local folder" in fails(capsys, ["fit", "--config=~/base.yaml", "--output=s3://a/b"])
    last = "--ckpt_path=~/runs/x/checkpoints/last.ckpt"
    cli.main(["fit", "--config", "~/base.yaml", "--trainer.max_steps", "3", "--ckpt_path", "last"])
    cli.main(["validate", "--config", "~/runs/x/config.yaml", last])
    cli.main(["export", "~/runs/x", "~/exported"])
    assert "training starts from the beginning" not in capsys.readouterr().err
    text = (home / "exported/adapter_config.json").read_text()
    assert str(home / "model") in text and "~" not in text


def test_options_of_tools(home):
    words = "audit ~/model --data=~/pairs.jsonl --output=~/audit --cleaned=~/new/cleaned.jsonl"
    cli.main([*words.split(), "--noise_rate=0.2"])
    cli.main(["analyze", "~/runs/x", "--output=~/agree"])
    for name in ("audit/report.html", "new/cleaned.jsonl", "agree/consistency-train.md"):
        assert (home / name).is_file()


def test_sweep_files(home, capsys):
    sweep = {"base": ["~/base.yaml"], "output": "~/sweep", "report": "~/report", "noise_rates": [0.2]}
    sweep |= {"seeds": [0], "methods": {"dpo": None}, "anchor": None}
    source = {"class_path": "HubPreferences", "init_args": {"path": "~/data"}}
    sweep |= {"options": {"data.source": source, "data.noise_rate": "{noise}"}}
    sweep |= {"prepare": [{"output": "~/augmented.parquet", "command": "augment --output=~/a.parquet"}]}
    (home / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    (home / "augmented.parquet").touch()
    (home / "like.yaml").write_text("like: ~/sweep.yaml")
    cli.main(["sweep", "~/like.yaml", "--dry_run"])
    said = capsys.readouterr().out
    assert f"{home}/augmented.parquet (exists)" in said and f"--config {home}/base.yaml" in said
    assert f"default_root_dir {home}/sweep/dpo-noise20-seed0" in said and f'"path": "{home}/data"' in said


def test_python(home):
    """A run of Python and its audit are in the folders that were named."""
    data = PreferenceDataModule(Files("~/pairs.jsonl", "~/pairs.jsonl"), "~/model", global_batch_size=8)
    module = PreferenceModule(PolicyModel("~/model"), DPO(), learning_rate=1e-3)
    callbacks = [RunCheckpoint(save_last=True), RunSummary()]
    trainer = quiet_trainer("~/runs/python", callbacks, logger=CSVLogger(home / "logs"), max_steps=1)
    trainer.fit(module, data)
    assert set(os.listdir(home / "runs/python")) == {"summary.json", "checkpoints"}
    assert len(audit(module, data, AuditOptions(noise_rate=0.2, output="~/third")).table) == 24
    assert (home / "third/report.html").is_file()
    assert len(HubPreferences("~/data").load_all()) == 24
