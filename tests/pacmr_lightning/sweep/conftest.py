"""A world small enough for sweeps that run in seconds."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from pacmr_lightning.commands.fit import parser_of
from pacmr_lightning.sweep.cells import Cell, cells, config_contents
from pacmr_lightning.sweep.results import NUMBERS
from pacmr_lightning.sweep.spec import Sweep, read_yaml
from pacmr_lightning.sweep.state import texts_in

ROOT = Path(__file__).parents[3]
DATA = ("data/tldr/some", "data/tldr/pairs", "runs/examples/", "runs/vote-policies/fold")
"""Beginnings of the data that the commands above a sweep file make."""
OPTIONS = dict.fromkeys(("seed_everything", "data.seed", "data.noise_seed"), "{seed}")
OPTIONS |= {"data.noise_rate": "{noise}"}


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama) -> Path:
    """A folder with a tiny model and ``base.yaml``: 10 updates on the synthetic benchmark."""
    folder = tmp_path_factory.mktemp("world")
    tiny_llama(folder / "model")
    base = yaml.safe_load((ROOT / "configs/quickstart/preference.yaml").read_text())
    base["model"]["init_args"]["policy"]["init_args"]["model"] = str(folder / "model")
    base["data"]["init_args"]["source"]["init_args"] = {"pairs": 80, "validation_pairs": 16}
    base["data"]["init_args"] |= {"global_batch_size": 8, "meta_batch_size": 8}
    base["trainer"] |= dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False)
    base["trainer"]["val_check_interval"] = 1.0
    gold = {"class_path": "GoldReward", "init_args": {"samples": 16, "max_new_tokens": 4}}
    base["trainer"]["callbacks"] = [{"class_path": "RunSummary"}, gold]
    base["checkpoint"]["every_n_train_steps"] = 5
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    return folder


@pytest.fixture
def write_sweep(world, inside) -> Callable[..., str]:
    return partial(write, world)


def write(world: Path, **changes: object) -> str:
    """Writes a sweep file into the working directory, DPO and PACMR-DPO unless told otherwise."""
    if not Path("configs").exists():
        Path("configs").symlink_to(ROOT / "configs")
    quick = {"model.weighting.every": 2, "model.weighting.outer.tau": 0.5}
    sweep = {
        "base": [str(world / "base.yaml")],
        "output": "out",
        "noise_rates": [0.3],
        "seeds": [0, 1],
        "options": OPTIONS,
        "methods": {"dpo": None, "pacmr": {"label": "PACMR-DPO", "options": quick}},
        "jobs": 2,
    }
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep | changes, sort_keys=False))
    return "sweep.yaml"


def end(cell: Cell, summary: dict | None) -> None:
    """What a run leaves that has ended: its record, and a summary with these values; None: it has failed."""
    cell.folder.mkdir(parents=True)
    record = {"arguments": cell.arguments, "configs": config_contents(cell), "exit": int(summary is None)}
    (cell.folder / "cell.json").write_text(json.dumps(record))
    if summary is not None:
        summary = dict.fromkeys(NUMBERS) | {"task": "world", "metrics": {}, "val_accuracy": 0.5} | summary
        (cell.folder / "summary.json").write_text(json.dumps(summary))


def check_measures(sweep: Sweep) -> None:
    """A run validates before it ends, and does nothing twice."""
    cell = cells(sweep)[0]
    trainer = parser_of("fit").parse_args(cell.arguments[1:]).trainer
    names = [callback.class_path for callback in trainer.callbacks]
    assert len(names) == len(set(names))
    if (steps := trainer.max_steps) > 0:
        assert isinstance(trainer.val_check_interval, int) and trainer.val_check_interval <= steps


def check_dry_run(file: Path, main: Callable[[list[str]], None], whole: bool, capsys) -> int:
    """How many cells a file has, each option of which exists and is in range; nothing is run or written.

    Parsing takes a third of a second a method, so without ``whole`` an option has its first value only.
    """
    for name in ("configs", "examples", "research"):
        Path(name).symlink_to(ROOT / name)
    sweep = read_yaml(str(file))
    if not whole:
        for method in filter(None, sweep["methods"].values()):
            method["vary"] = {option: values[:1] for option, values in method.get("vary", {}).items()}
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    for _, text in texts_in(sweep):
        for seed in sweep["seeds"]:
            if text.startswith(DATA) and text.endswith((".jsonl", ".gz")):
                data = Path(text.replace("{seed}", str(seed)))
                data.parent.mkdir(parents=True, exist_ok=True)
                data.touch()
    there = {*Path().iterdir()}
    main(["sweep.yaml", "--dry_run"])
    assert {*Path().iterdir()} == there
    lines = capsys.readouterr().out.splitlines()
    cell = re.compile(r"\S+-seed\d+ \(.* pacmr fit --config (?:configs|examples)/")
    found = [*filter(cell.match, lines)]
    assert re.fullmatch(rf"{len(found)} cells( at most: .+)?", lines[-1])
    assert not any(re.search(r"\{\w+\}", line) for line in found)  # placeholders; JSON has braces, too
    return len(found)
