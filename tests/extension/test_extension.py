"""A distribution of a user's own, installed beside this one and used by class paths from YAML.

``my_preferences`` is what docs/extending.md shows. It is imported from the folder it was installed into.
"""

import csv
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from functools import wraps
from pathlib import Path

import pandas as pd
import pytest
import torch

from pacmr_lightning import cli
from pacmr_lightning.datamodules import LabelNoise, Source
from pacmr_lightning.embedded_world import World
from pacmr_lightning.meta_gradient import MetaGradientEstimator, OuterObjective
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.objectives import Objective
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.runs.folder import read_weights
from pacmr_lightning.weighting import Weighting

from ..conftest import fails, short_fit

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "extending.md"
BASES = (Objective, Weighting, OuterObjective, MetaGradientEstimator, Source, LabelNoise)
FINAL = {"LabelNoise.flips"}
FINAL |= {f"Source.{name}" for name in ("check_output", "texts", "tokenized", "write_cleaned")}
"""Public methods that an extension leaves as they are."""
CALLS: dict[str, set[str]] = defaultdict(set)
"""By base class, the methods that were called on a class of the extension."""


ODD = """
import torch
from pacmr_lightning.weighting import Weighting, Weights

class Half(Weighting):
    every = 2

class Fixed(Half):
    def weights(self, rewards, batch):
        return Weights(torch.ones_like(rewards.u))

    def update(self, pairs, meta, learning_rate, peak):
        return {"met": torch.tensor(float(len(meta)))}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    source, target = tmp_path_factory.mktemp("source") / "my", tmp_path_factory.mktemp("installed")
    shutil.copytree(HERE, source, ignore=shutil.ignore_patterns("test_*", "__pycache__"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    install += ["--no-index", "--disable-pip-version-check", "--target", str(target), str(source)]
    subprocess.run(install, check=True, capture_output=True)
    (target / "odd_weighting.py").write_text(ODD)
    sys.path.insert(0, str(target))
    package = importlib.import_module("my_preferences")
    for name in package.__all__:
        for base in BASES:
            if issubclass(getattr(package, name), base):
                note_calls(getattr(package, name), base)
    yield target
    # The modules stay: their classes do too, and jsonargparse looks for all subclasses that there are.
    sys.path.remove(str(target))


def methods(base):
    """Names of the methods that the class documents, but for its constructor."""
    return {n for n, f in vars(base).items() if inspect.isfunction(f) and (n[0] != "_" or n == "__call__")}


def note_calls(cls, base):
    def noting(name, method):
        @wraps(method)
        def noted(*args, **options):
            CALLS[base.__name__].add(name)
            return method(*args, **options)

        return noted

    for name in methods(base) & vars(cls).keys():
        setattr(cls, name, noting(name, vars(cls)[name]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("extension")
    tiny_llama(folder / "model")
    rows = World().preference_rows(80, 0)
    with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        columns = ["id", "prompt", "chosen", "rejected", "category", "augmented_prompt"]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return folder


@pytest.fixture
def inside(folder, installed, monkeypatch):
    monkeypatch.chdir(folder)


def config(*names):
    return [word for name in names for word in ("--config", str(HERE / "configs" / f"{name}.yaml"))]


def arguments(*names, run=None, **options):
    """Words of a run with the named configs of the extension over the same small base."""
    words = """
        --data.global_batch_size 8 --data.meta_batch_size 8 --model.learning_rate 0.05
        --model.micro_batch_size 4 --model.max_new_tokens 3 --trainer.max_steps 8
        --trainer.log_every_n_steps 1
    """
    folder = [] if run is None else ["--trainer.default_root_dir", run]
    given = [word for name, value in options.items() for word in (f"--{name.replace('__', '.')}", str(value))]
    return [*short_fit("model", words)[1:], *folder, *config("source", *names), *given]


def checkpoint(run, name="last"):
    return torch.load(Path(run, "checkpoints", f"{name}.ckpt"), weights_only=True)


def pairs():
    return pd.read_csv("pairs.csv", dtype=str).to_dict("records")


def metrics(run, name):
    return pd.read_csv(Path(run, "metrics.csv"))[name].dropna().tolist()


@pytest.fixture(scope="module")
def run(folder, installed):
    kinds = ("objective", "weighting", "noise", "callback")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cli.main(["fit", *arguments(*kinds, checkpoint__every_n_train_steps=4, checkpoint__save_top_k=-1)])
    return "runs/mine-consensus-noiseLengthBias-seed42"


def test_a_run_with_all_of_it(run, inside, installed):
    assert Path(sys.modules["my_preferences"].__file__).is_relative_to(installed)
    assert (installed / "my_preferences-0.1.0.dist-info").is_dir()
    recorded = read_weights(run)
    assert len(recorded) == 64 and recorded["id"].is_unique
    # The noise flips what it was told to: some of the labels whose rejected response was the longer one.
    rows = {row["id"]: row for row in pairs()}
    longer = {name: len(row["rejected"]) > len(row["chosen"]) for name, row in rows.items()}
    flipped = dict(zip(recorded["id"], recorded["flipped"], strict=True))
    assert 0 < sum(flipped.values()) < sum(longer[name] for name in flipped)
    assert all(longer[name] for name, flip in flipped.items() if flip)
    summary = json.loads(Path(run, "summary.json").read_text())
    assert summary["noise_rate"] == sum(flipped.values()) / 64
    # The slope has learned from updates 0, 2, 4 and 6, and its weights are those that were recorded.
    state = checkpoint(run)["weighting"]
    assert state["slope"].abs() > 1e-3
    last = recorded[recorded["step"] == 7]
    expected = torch.sigmoid(state["slope"] * torch.tensor(last["u"].to_numpy()) / state["scale"])
    assert torch.allclose(torch.tensor(last["weight"].to_numpy()), expected, atol=1e-6)
    assert len(set(metrics(run, "train/consensus/slope"))) == 4
    least = Path(run, "least_trusted.txt").read_text().split()
    assert least == recorded.sort_values("weight", kind="stable")["id"].tolist()[:5]


WITH_THE_PATH = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from pacmr_lightning.cli import main

main(sys.argv[1:])
"""


def test_going_on_in_a_process_of_its_own(run, inside, installed, tmp_path, monkeypatch, forked):
    """As an installed package, from an empty folder: the second half again, exactly."""
    again = tmp_path / "again"
    shutil.copytree(run, again)
    for file in (again / "checkpoints").glob("*.ckpt"):
        file.unlink()
    shutil.copy(Path(run, "checkpoints", "step-4.ckpt"), again / "checkpoints" / "last.ckpt")
    half = checkpoint(again)
    assert half["global_step"] == 4
    for name in ("model", "pairs.csv"):
        (tmp_path / name).symlink_to(Path(name).resolve())
    run = Path(run).resolve()
    monkeypatch.chdir(tmp_path)
    words = ["fit", "--config", again / "config.yaml", "--ckpt_path", "last"]
    words += ["--trainer.default_root_dir", again]
    process = forked(WITH_THE_PATH, installed, *words, OMP_NUM_THREADS="1")
    errors = process.communicate()[1]
    assert process.returncode == 0, errors[-3000:]
    before, after = checkpoint(run), checkpoint(again)
    assert before["global_step"] == after["global_step"] == 8
    assert not torch.equal(half["weighting"]["slope"], after["weighting"]["slope"])
    assert torch.equal(before["weighting"]["slope"], after["weighting"]["slope"])
    assert torch.equal(before["weighting"]["scale"], after["weighting"]["scale"])
    assert all(torch.equal(value, after["state_dict"][name]) for name, value in before["state_dict"].items())
    assert read_weights(run).equals(read_weights(again))
    assert (again / "least_trusted.txt").read_text() == Path(run, "least_trusted.txt").read_text()


def test_tools_of_a_run(run, inside, capsys):
    cli.main(["audit", run, "--cleaned", "cleaned.jsonl", "--action", "drop"])
    said = " ".join(capsys.readouterr().err.split())
    assert "injected label noise (my_preferences.LengthBias {'strength': 0.6})" in said
    assert 0 < len(Path("cleaned.jsonl").read_text().splitlines()) <= 80
    cli.main(["export", run, "exported"])
    card = Path("exported", "README.md").read_text()
    assert Path("exported", "adapter_config.json").exists()
    assert "LengthBias" in card and "ConsensusWeights" in card and "margin" in card
    module = PreferenceModule.load_from_checkpoint(f"{run}/checkpoints/last.ckpt")
    assert type(module.objective).__name__ == "SLiC" and module.objective.margin == 0.5
    assert torch.equal(module.weighting.slope, checkpoint(run)["weighting"]["slope"])
    cli.main(["predict", "--config", f"{run}/config.yaml", "--ckpt_path", "last"])
    answered = pd.read_json(Path(run, "generations.jsonl"), lines=True)["prompt"]
    assert sorted(answered) == sorted({row["prompt"] for row in pairs()[-16:]})


def test_outer_objective_and_estimator(inside):
    words = ["fit", *arguments("noise", "outer", run="brier", model__objective="my_preferences.SmallLoss")]
    words += ["--trainer.callbacks+=GoldReward", "--trainer.callbacks.samples", "4"]
    words += ["--trainer.callbacks.max_new_tokens", "3", "--trainer.max_steps"]
    cli.main([*words, "6"])
    kept = checkpoint("brier")
    assert kept["weighting"]["updates"] >= 1
    state = kept["objective"]
    assert state["updates"] == 6 and len(state["last_loss"]) == 48
    assert metrics("brier", "train/largest_loss")[-1] == pytest.approx(max(state["last_loss"].values()))
    assert 0 < state["label_noise"] < 0.6
    samples = pd.read_json(Path("brier", "samples.jsonl"), lines=True)
    assert (samples["gold_reward"] == -samples["response"].str.len()).all()
    # It goes on with what the objective has seen.
    cli.main([*words, "8", "--ckpt_path", "last"])
    assert checkpoint("brier")["objective"]["updates"] == 8
    cli.main(["export", "brier", "exported-brier"])
    assert "SmallLoss" in Path("exported-brier", "README.md").read_text()
    assert Path("exported-brier", "adapter_config.json").exists()


def test_grouped_objective(inside):
    words = arguments(run="hard", trainer__max_steps=2, model__objective="my_preferences.HardPairs")
    cli.main(["fit", *words])
    losses = metrics("hard", "train/loss")
    assert losses[0] == pytest.approx(1.0)  # u is 0, and the margin of all pairs 1
    assert len(losses) == 2 and losses[1] > 0


def test_a_weighting_in_full(inside, capsys):
    words = ["--model.weighting", "my_preferences.CautiousConsensus", "--model.weighting.every", "1"]
    line = fails(capsys, ["fit", *arguments(run="short", trainer__max_steps=1), *words])
    assert "the run has 1 update; train on" in line
    cli.main(["fit", *arguments(run="cautious", trainer__max_steps=3), *words])
    assert len(metrics("cautious", "train/consensus/slope")) == 3
    assert float(checkpoint("cautious")["weighting"]["slope"]) != 0


def test_all_that_can_be_overridden_was(run, inside, capsys, monkeypatch):
    """After the tests above: each documented method of the base classes was called on the extension's."""
    monkeypatch.setattr(PolicyModel, "is_sharded", property(lambda self: True))
    words = ["fit", *arguments(run="sharded"), "--model.weighting", "my_preferences.CautiousConsensus"]
    assert "CautiousConsensus has not been tried under ZeRO-3" in fails(capsys, words)
    for base in BASES:
        missing = {
            name for name in methods(base) - CALLS[base.__name__] if f"{base.__name__}.{name}" not in FINAL
        }
        assert not missing, f"{base.__name__}: {missing}"


def test_mistakes_end_in_one_sentence(inside, capsys):

    def said(*words):
        return fails(capsys, ["fit", *arguments(run="bad"), *words])

    line = said("--model.objective", "my_preferences.Slick")
    assert "model.objective: my_preferences.Slick cannot be imported (module" in line
    assert "has no attribute 'Slick'); choose one of" in line
    line = said("--data.noise", "my_preference.LengthBias")
    assert "my_preference.LengthBias cannot be imported (No module named 'my_preference'); choose" in line
    line = said("--model.weighting", "my_preferences.SLiC")
    assert "model.weighting: my_preferences.SLiC is no Weighting; choose one of" in line
    line = said("--model.weighting", "odd_weighting.Half")
    assert "odd_weighting.Half lacks an abstract method of its base class; define it, or" in line
    assert "margin is 0" in said("--model.objective", "my_preferences.SLiC", "--model.objective.margin", "0")
    assert not Path("bad").exists()


def test_every_of_a_class_brings_meta_pairs(inside):
    words = [*arguments(run="fixed", trainer__max_steps=3), "--model.weighting", "odd_weighting.Fixed"]
    cli.main(["fit", *words])
    assert set(metrics("fixed", "train/met")) == {8.0}


def test_the_page_shows_these_files():
    """docs/extending.md includes each file of the package, all but the longer ones."""
    files = {*HERE.glob("my_preferences/*.py"), *HERE.glob("configs/*.yaml"), HERE / "pyproject.toml"}
    included = re.findall(r"^```\{literalinclude\} (.+)$", PAGE.read_text(), re.MULTILINE)
    shown = {(PAGE.parent / name).resolve() for name in included}
    assert shown <= files, "a file is not there"
    left_out = {file.name for file in files - shown}
    assert left_out == {"__init__.py", "objectives_in_full.py", "weighting_in_full.py"}
