"""Every sweep file of research/ is one that its command takes, with as many cells as its pages say."""

from pathlib import Path

import pytest

from pacmr_lightning import cli
from pacmr_lightning.sweep.cells import cells
from pacmr_lightning.sweep.spec import Sweep, read_sweep
from research import frontier
from tests.conftest import write_lines
from tests.pacmr_lightning.sweep.conftest import check_dry_run, check_measures

ROOT = Path(__file__).parents[2]
FRONTIERS = {"frontier": 7020, "sentiment": 88, "pacmr_variants": 330, "pacmr_variants_long": 36}
PLAIN = {
    **{"world_tau": 120, "world_long": 24, "world_noise": 515, "told_share": 510, "sentiment_noise": 24},
    **{"sentiment_seeds": 15, "hh_small": 15, "hh_half_billion": 5, "tldr_cpu": 7, "tldr_reproduction": 6},
    **{"world_alpha": 90, "sft_term": 36, "vote_policies": 56, "when_dpo_goes_wrong": 12},
}
SIZES = FRONTIERS | PLAIN


def file(name: str) -> Path:
    return ROOT / f"research/sweeps/{name}.yaml"


def read(name: str) -> Sweep:
    return frontier.read_frontier(str(file(name)))[0] if name in FRONTIERS else read_sweep(str(file(name)))


def test_all_files_are_listed():
    assert {path.stem for path in (ROOT / "research/sweeps").glob("*.yaml")} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_runs_measure_what_they_train(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_measures(read(name))


def case(name: str, whole: bool) -> object:
    slow = whole or name not in ("world_tau", "sentiment", "vote_policies", "hh_small")
    return pytest.param(name, whole, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("name", "whole"), [case(name, whole) for name in SIZES for whole in (False, True)])
def test_files(name, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/tldr").mkdir(parents=True)
    write_lines(tmp_path / "data/tldr/prompts.jsonl.gz", [{"prompt": "A post"}])
    main = frontier.main if name in FRONTIERS else lambda words: cli.main(["sweep", *words])
    assert check_dry_run(file(name), main, whole, capsys) == SIZES[name] or not whole
    assert len(cells(read(name))) == SIZES[name]
