"""Sweep files: what a cell is, and one sentence for what is wrong before anything runs."""

from pathlib import Path

import pytest

from pacmr_lightning import cli
from pacmr_lightning.errors import UserError
from pacmr_lightning.sweep.cells import cells
from pacmr_lightning.sweep.spec import read_sweep
from pacmr_lightning.sweep.state import prepare, state_of

from ...conftest import fails as run_fails
from .conftest import OPTIONS, check_dry_run, check_measures

ROOT = Path(__file__).parents[3]
PAPER = {"": 21, "_tau": 12, "_clean_meta": 9}
PAPER |= {f"{kind}_4gpu": number for kind, number in PAPER.items()}
SIZES = {
    **{"world": 450, "tldr_small": 30, "sentiment_tiny": 4, "sentiment_small": 4},
    **{f"{task}{kind}": n for task in ("tldr", "hh") for kind, n in PAPER.items()},
    **{f"{task}_consistency": 1 for task in ("tldr", "hh")},
}
"""Cells of every sweep file in configs/sweeps and examples."""


def shipped(name: str) -> Path:
    return ROOT / ("examples" if name.startswith("sentiment") else "configs/sweeps") / f"{name}.yaml"


def fails(capsys, arguments: list[str]) -> str:
    return run_fails(capsys, ["sweep", *arguments])


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
        ({"noise_rates": [20]}, "one of noise_rates is 20.0, but it must be at least 0 and below 1"),
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


@pytest.mark.parametrize("path", SIZES, ids=str)
def test_shipped_sweeps_measure_what_they_train(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_measures(read_sweep(str(shipped(path))))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    # Those of one task say all that the other's would.
    "path",
    [pytest.param(name, marks=[pytest.mark.slow] * ("hh_" in name)) for name in SIZES],
    ids=str,
)
def test_shipped_sweeps(path, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = shipped(path)
    assert (
        check_dry_run(file, lambda words: cli.main(["sweep", *words]), whole, capsys) == SIZES[path]
        or not whole
    )
    assert len(cells(read_sweep(str(file)))) == SIZES[path]


def test_a_cell_knows_its_files(write_sweep, capsys):
    """It is no cell of other pairs under the same name; what other cells have made may change."""
    Path("pairs.jsonl").write_text("one")
    Path("out").mkdir()
    made = Path("out/made.parquet")
    options = OPTIONS | {"data.source.train": "pairs.jsonl", "data.augmentations": str(made)}
    (cell, *_) = cells(read_sweep(write_sweep(options=options)))
    prepare(cell)
    made.write_text("by a cell before")
    assert state_of(cell) == "waiting"
    Path("pairs.jsonl").write_text("two")
    with pytest.raises(UserError, match="holds a run with other files than the sweep file has now"):
        state_of(cell)
