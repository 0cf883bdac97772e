"""W&B and MLflow, for real and on this machine: what arrives there, metrics.csv beside it, and going on."""

import json
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import yaml
from lightning_utilities.core.imports import RequirementCache

from pacmr_lightning import cli
from pacmr_lightning.callbacks.samples import verbatim
from pacmr_lightning.runs.loggers import loggers_of_another

from ..conftest import fails, read_lines

DRAWN = {f"pair_weights/{name}": [1, 2] for name in ("heat_maps", "weight_function")}
DRAWN |= {"pair_weights/distributions": [2]}
"""Figures, and the updates after which they are drawn: before VNet's first one all weights are alike."""


@pytest.fixture
def config(inside, tiny_llama, preference_config) -> dict:
    weighting = {"class_path": "VNetWeighting", "init_args": {"every": 1}}
    module = {"weighting": weighting, "method": "pacmr"}
    source = {"class_path": "EmbeddedWorld", "init_args": {"pairs": 40, "validation_pairs": 8}}
    drawing = [
        {"class_path": "VNetSurfaces", "init_args": {"every": 0.5, "points": 5}},
        {"class_path": "WeightDistributions", "init_args": {"every": 1}},
        {"class_path": "SampleResponses", "init_args": {"prompts": 2, "every": 1, "max_new_tokens": 3}},
        {"class_path": "RunSummary"},
        {"class_path": "Dashboard"},
    ]
    trainer = {"default_root_dir": "run", "max_steps": 2, "limit_val_batches": 0}
    found = preference_config(tiny_llama("model"), source, module, {"noise_rate": 0.3}, drawing, **trainer)
    found["model"]["init_args"]["policy"]["init_args"]["rank"] = 2
    return found


def words_of(config, *options):
    Path("config.yaml").write_text(yaml.safe_dump(config))
    return ["fit", "--config", "config.yaml", *options]


def fit(config, *options):
    cli.main(words_of(config, *options))


def curves():
    table = pd.read_csv("run/metrics.csv")
    assert table["lr"].notna().any() and table["lr-VNet-updates"].notna().any()
    loss = table[["step", "train/loss"]].dropna()
    assert loss["step"].is_unique
    return dict(zip(loss["step"], loss["train/loss"], strict=True))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
# Of MLflow's store, to SQLAlchemy and to itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_mlflow_beside_tensorboard(config, capsys, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    places = {"tracking_uri": "mlruns", "artifact_location": "files"}
    options = {name: Path(place).absolute().as_uri() for name, place in places.items()}
    mlflow = {"class_path": "MLFlowLogger", "init_args": {"experiment_name": "mine", **options}}
    board = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "boards"}}
    config["trainer"]["logger"] = [mlflow, board]
    fit(config)
    assert "its curves: tensorboard --logdir boards;" in capsys.readouterr().err
    client = MlflowClient(options["tracking_uri"])
    experiment = client.get_experiment_by_name("mine").experiment_id
    (run,) = client.search_runs([experiment])

    def logged():
        found = client.get_metric_history(run.info.run_id, "train/loss")
        return {metric.step: pytest.approx(metric.value, rel=1e-6) for metric in found}

    assert curves() == logged() and set(logged()) == {0, 1}
    (folder,) = Path("files").iterdir()
    for name, steps in DRAWN.items():
        for step in steps:
            assert (folder / f"artifacts/{name}-step-{step:05d}.png").read_bytes().startswith(b"\x89PNG")
    files = (folder / "artifacts/pair_weights").glob("*/g-step-00002.json")
    bins = [json.loads(path.read_text()) for path in files]
    assert len(bins) == 2 and sum(sum(one["counts"]) for one in bins) == 16, "unflipped and flipped"
    rows = read_lines("run/responses.jsonl")
    for step in (0, 1, 2):
        page = (folder / f"artifacts/responses-step-{step:05d}.md").read_text()
        for row in rows[2 * step : 2 * step + 2]:
            assert f"| {verbatim(row['id'])} | {verbatim(row['prompt'])} |" in page

    config["trainer"] |= {"max_steps": 3}
    mlflow["init_args"]["run_id"] = run.info.run_id
    fit(config, "--ckpt_path", "last")
    assert curves() == logged() and set(logged()) == {0, 1, 2}
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert (folder / "artifacts/pair_weights/weight_function-step-00003.png").exists()

    mlflow["init_args"]["run_id"] = "gone"
    said = fails(capsys, words_of(config, "--ckpt_path", "last"))
    assert "mlflow of trainer.logger failed: " in said and "gone" in said
    # Lightning's default is a folder, which MLflow refuses.
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    said = fails(capsys, words_of(config, "--ckpt_path", "last", "--trainer.logger", "MLFlowLogger"))
    assert said.startswith("pacmr: error: mlflow of trainer.logger failed: ")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb(config, capsys, monkeypatch):
    import wandb
    from wandb.sdk.wandb_run import Run

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows, log = [], Run.log

    def noted(run, data, *more, **options):
        rows.append(dict(data))
        log(run, data, *more, **options)

    monkeypatch.setattr(Run, "log", noted)
    options = ["--trainer.logger", "WandbLogger", "--trainer.logger.project", "mine"]
    options += ["--trainer.logger.id", "first"]
    fit(config, *options)
    assert "its curves: run/metrics.csv;" in capsys.readouterr().err
    assert wandb.run is None, "the next run of this process has its own"
    steps = [row["trainer/global_step"] for row in rows]
    assert steps == sorted(steps) and set(steps) == {0, 1}

    def values(name):
        return [(step, row[name]) for step, row in zip(steps, rows, strict=True) if name in row]

    assert dict(values("train/loss")) == pytest.approx(curves(), rel=1e-6)
    (folder,) = Path("wandb").glob("offline-run-*-first")
    for name, drawn in DRAWN.items():
        assert [step + 1 for step, _ in values(name)] == drawn
        assert len(list(folder.glob(f"files/media/images/{name}_*.png"))) == len(drawn)
    bins = [values(f"pair_weights/{name}/g") for name in ("unflipped", "flipped")]
    assert [step for ((step, _),) in bins] == [1, 1] and sum(sum(it.histogram) for ((_, it),) in bins) == 16
    tables = [table for _, table in values("responses")]
    assert len(tables) == 3 and tables[-1].columns == ["id", "Prompt", "Reference", "Policy"]
    keys = ("id", "prompt", "reference", "response")
    assert tables[-1].data == [[row[key] for key in keys] for row in read_lines("run/responses.jsonl")[-2:]]

    config["trainer"]["max_steps"] = 3
    rows.clear()
    fit(config, *options, "--ckpt_path", "last")
    assert set(curves()) == {0, 1, 2} and {row["trainer/global_step"] for row in rows} == {2}
    assert len(list(Path("wandb").glob("offline-run-*-first"))) == 2


def test_a_second_pass_is_a_run_of_its_own():
    options = {"WandbLogger": {"id": "first", "project": "mine"}, "CSVLogger": {"save_dir": "."}}
    options["MLFlowLogger"] = {"run_id": "abc", "tracking_uri": "sqlite:///a.db"}
    given = [{"class_path": name, "init_args": its} for name, its in options.items()]
    found = {one["class_path"]: one["init_args"] for one in loggers_of_another(given, "run-refined")}
    assert found.pop("WandbLogger") == {"id": "first-run-refined", "project": "mine"}
    assert found.pop("MLFlowLogger") == {"run_id": None, "tracking_uri": "sqlite:///a.db"}
    assert found == {"CSVLogger": {"save_dir": "."}}
    assert loggers_of_another(given[0], "b")["init_args"]["id"] == "first-b"


def test_a_logger_that_is_not_installed(config, capsys, monkeypatch):
    absent = RequirementCache("wandb>=1000")
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", absent)
    config["trainer"]["logger"] = {"class_path": "WandbLogger"}
    assert 'or install "pacmr-lightning[loggers]".' in fails(capsys, words_of(config))
    assert not Path("run").exists()
