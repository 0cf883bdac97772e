"""Sweep files: what a cell is, and one sentence for what is wrong before anything runs."""

import re
from pathlib import Path

import pytest
import yaml

from pacmr_lightning import cli
from pacmr_lightning.commands.fit import parser_of
from pacmr_lightning.errors import UserError
from pacmr_lightning.sweep.cells import cells
from pacmr_lightning.sweep.spec import read_sweep
from pacmr_lightning.sweep.state import prepare, state

from .conftest import OPTIONS

ROOT = Path(__file__).parents[3]
SWEEPS = sorted(set((ROOT / "configs/sweeps").glob("*.yaml")) - {ROOT / "configs/sweeps/world_base.yaml"})
SIZES = {
    "world": 450,
    "world_tau": 120,
    "world_long": 24,
    "world_noise": 515,
    "told_share": 510,
    "frontier": 7245,
    "sentiment": 88,
    "sentiment_tiny": 4,
    "sentiment_small": 4,
    "hh_small": 15,
    "sentiment_noise": 24,
    "sentiment_seeds": 15,
    "tldr_cpu": 7,
    "pacmr_variants": 430,
    "pacmr_variants_long": 54,
    "tldr_clean_meta": 9,
    "tldr": 21,
    "tldr_small": 30,
    "hh": 21,
    "tldr_tau": 12,
}


def fails(capsys, arguments: list[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(["sweep", *arguments])
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("pacmr: error: ")
    return lines[0]


def test_cells(write_sweep, world):
    """Every combination in an own folder, with the arguments of its pacmr fit."""
    path = write_sweep(
        noise_rates=[0.2, 0.35],
        methods={
            "dpo": None,
            "soft": {"config": "pacmr", "vary": {"a.tau": [0.5, 0.6], "b.outer": ["A", "B"]}},
            "own": {"config": "mine.yaml", "options": {"x": None, "y": [1, 2], "z": "s{seed}n{noise}"}},
            "two": {"config": "dpo", "after": "dpo", "first": "audit {after}", "options": {"w": "{after}/a"}},
        },
    )
    found = cells(read_sweep(path))
    assert len(found) == 2 * 2 * (1 + 4 + 1 + 1) and len({cell.name for cell in found}) == len(found)
    by_name = {cell.name: cell for cell in found}
    common = ["--seed_everything", "1", "--data.seed", "1", "--data.noise_seed", "1", "--data.noise_rate"]
    base = ["fit", "--config", str(world / "base.yaml"), "--config"]

    cell = by_name["soft-noise35-tau0.6-outerB-seed1"]
    assert cell.variation == {"a.tau": 0.6, "b.outer": "B"}
    assert cell.arguments == [
        *(*base, "configs/methods/pacmr.yaml", "--model.method", "soft", *common, "0.35"),
        *("--a.tau", "0.6", "--b.outer", "B"),
        *("--trainer.default_root_dir", "out/soft-noise35-tau0.6-outerB-seed1"),
    ]
    own = by_name["own-noise20-seed1"].arguments
    assert own[:6] == [*base, "mine.yaml", "--model.method"]
    assert own[-8:-2] == ["--x", "null", "--y", "[1, 2]", "--z", "s1n0.2"]
    two = by_name["two-noise20-seed1"]
    assert two.after == by_name["dpo-noise20-seed1"].folder
    assert two.first == ["audit", "out/dpo-noise20-seed1"]
    assert two.arguments[-4:-2] == ["--w", "out/dpo-noise20-seed1/a"]
    assert not cell.first and cell.after is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methodz": {}}, "there is no key methodz; choose one of base, methods"),
        ({"methods": {"dpo": {"labels": "x"}}}, "method dpo: there is no key labels"),
        ({"methods": {"dpo": 3}}, "method dpo: expected keys and values, but got 3"),
        ({"noise_rates": ["much"]}, "noise_rates: expected a float, but got much"),
        ({"noise_rates": [20]}, "the noise rate 20.0 is not in [0, 1)"),
        ({"seeds": []}, "seeds is [], but it needs at least one"),
        ({"seeds": [1, 1]}, "and none twice"),
        ({"jobs": 0}, "jobs is 0"),
        ({"anchor": "ipo"}, "anchor names ipo, which is none of the methods (dpo, pacmr)"),
        ({"comparisons": {"x": ["ipo"]}}, "x names ipo"),
        ({"methods": {"dpo": {"label": "pacmr"}, "pacmr": None}}, "but none may occur twice"),
        ({"methods": {"dpo": {"vary": {"a": []}}}}, "varies a over no values"),
        ({"methods": {"dpo": {"after": "pacmr"}, "pacmr": None}}, "dpo comes after pacmr, which"),
        ({"options": {"data.noise_rate": "{noise}"}}, "would be the same run"),
        (
            {"methods": {"dpo": {"vary": {"data.source.train": ["data/a.jsonl", "data_a.jsonl"]}}}},
            "data.source.train = data/a.jsonl, seed 0) and the cell (dpo, noise rate 0.3, data.source.train "
            "= data_a.jsonl, seed 0) would share the folder out/dpo-noise30-traindata_a",
        ),
        (
            {"frontier": {"subject": "dpo", "kls": [1.0], "tuning_seeds": [0, 100]}},
            "frontier.tuning_seeds names 100, which is none of the seeds (0, 1)",
        ),
        ({"methods": {"dpo": None, "dqo": None}}, "configs/methods/dqo.yaml"),
        (
            {"methods": {"dpo": {"options": {"model.objective.betta": 1}}}},
            "model.objective.betta: DPO has no such option; did you mean beta?",
        ),
        ({"methods": {"dpo": {"options": {"model.objective.beta": 0}}}}, "beta is 0"),
        ({"methods": {"dpo": {"options": {"modell.beta": 0}}}}, "modell"),
    ],
)
def test_bad_files(changes, message, write_sweep, capsys):
    assert message in fails(capsys, [write_sweep(**changes)])
    assert not Path("out").exists()


@pytest.mark.parametrize(("text", "message"), [("a: [", "is not YAML"), ("- a", "expected keys and values")])
def test_no_sweep(text, message, tmp_path, capsys):
    (tmp_path / "sweep.yaml").write_text(text)
    assert message in fails(capsys, [str(tmp_path / "sweep.yaml")])
    assert "cannot be read" in fails(capsys, [str(tmp_path / "nowhere.yaml")])


def first_values(path: Path) -> str:
    """The sweep with the first value of each varied option."""
    sweep = yaml.safe_load(path.read_text())
    for method in filter(None, sweep["methods"].values()):
        method["vary"] = {option: values[:1] for option, values in method.get("vary", {}).items()}
    return yaml.safe_dump(sweep, sort_keys=False)


def shipped(path: Path, whole: bool) -> object:
    """Parsing takes a third of a second a method: all values, and the many methods of one file, are slow."""
    slow = whole or path.stem in ("world_noise", "frontier")
    return pytest.param(
        path, whole, id=f"{path.stem}{'-whole' * whole}", marks=[pytest.mark.slow] if slow else []
    )


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_shipped_sweeps_measure_what_they_train(path, monkeypatch):
    """A run validates before it ends, and does nothing twice."""
    monkeypatch.chdir(ROOT)
    cell = cells(read_sweep(str(path)))[0]
    trainer = parser_of("fit").parse_args(cell.arguments[1:]).trainer
    names = [callback.class_path for callback in trainer.callbacks]
    assert len(names) == len(set(names))
    if (steps := trainer.max_steps) > 0:
        assert isinstance(trainer.val_check_interval, int) and trainer.val_check_interval <= steps


@pytest.mark.parametrize(
    ("path", "whole"), [shipped(path, whole) for path in SWEEPS for whole in (False, True)]
)
def test_shipped_sweeps(path, whole, tmp_path, monkeypatch, capsys):
    """Each option of each cell exists and is in range; nothing is run or written."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    assert len(cells(read_sweep(str(path.relative_to(ROOT))))) == SIZES[path.stem]
    Path("sweep.yaml").write_text(path.read_text() if whole else first_values(path))
    cli.main(["sweep", "sweep.yaml", "--dry_run"])
    assert {file.name for file in tmp_path.iterdir()} == {"configs", "sweep.yaml"}
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if re.match(r"\S+-seed\d+ \(.* pacmr fit --config configs/", line)]
    assert re.fullmatch(rf"{len(found)} cells( at most: .+)?", lines[-1])
    assert len(found) == SIZES[path.stem] or not whole
    without = path.stem in ("told_share", "sentiment_tiny", "sentiment_small", "sentiment_noise")
    assert without or any(line.startswith("pacmr-noise") for line in found)
    assert all("{" not in line for line in found)


def test_a_cell_knows_its_files(write_sweep, capsys):
    """It is no cell of other pairs under the same name; what other cells have made may change."""
    Path("pairs.jsonl").write_text("one")
    Path("out").mkdir()
    made = Path("out/made.parquet")
    options = OPTIONS | {"data.source.train": "pairs.jsonl", "data.augmentations": str(made)}
    (cell, *_) = cells(read_sweep(write_sweep(options=options)))
    prepare(cell)
    made.write_text("by a cell before")
    assert state(cell) == "waiting"
    Path("pairs.jsonl").write_text("two")
    with pytest.raises(UserError, match="holds a run with other files than the sweep file has now"):
        state(cell)
