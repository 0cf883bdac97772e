"""A distribution of a user's own, installed beside this one and used by class paths from YAML.

``my_preferences`` is what docs/extending.md shows. It is imported from the folder it was installed into.
"""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from pacmr_lightning import cli
from pacmr_lightning.embedded_world import World
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.runs.folder import read_weights

from ..conftest import fails, short_fit, with_callback

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "extending.md"


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
    importlib.import_module("my_preferences")
    yield target
    # The modules stay: their classes do too, and jsonargparse looks for all subclasses that there are.
    sys.path.remove(str(target))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("extension")
    tiny_llama(folder / "model")
    rows = World().preference_rows(80, 0)
    columns = ["id", "prompt", "chosen", "rejected", "category", "augmented_prompt"]
    pd.DataFrame(rows)[columns].to_csv(folder / "pairs.csv", index=False)
    return folder


@pytest.fixture
def inside(folder, installed, monkeypatch):
    monkeypatch.chdir(folder)


def fit_words(*names, options=""):
    """Words of a run with the named configs of the extension over the same small base."""
    base = """
        --data.global_batch_size 8 --data.meta_batch_size 8 --model.learning_rate 0.05
        --model.micro_batch_size 4 --model.max_new_tokens 3 --trainer.max_steps 8
        --trainer.log_every_n_steps 1
    """
    configs = (f"--config={HERE}/configs/{name}.yaml" for name in ("source", *names))
    return [*short_fit("model", base), *configs, *options.split()]


def checkpoint(run):
    return torch.load(Path(run, "checkpoints", "last.ckpt"), weights_only=True)


def pairs():
    return pd.read_csv("pairs.csv", dtype=str).to_dict("records")


def metrics(run, name):
    return pd.read_csv(Path(run, "metrics.csv"))[name].dropna().tolist()


@pytest.fixture(scope="module")
def run(folder, installed):
    options = "--checkpoint.every_n_train_steps 4 --checkpoint.save_top_k -1"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cli.main(fit_words("objective", "weighting", "noise", "callback", options=options))
    return "runs/mine-consensus-noiseLengthBias-seed42"


def test_a_run_with_all_of_it(run, inside, installed):
    assert Path(sys.modules["my_preferences"].__file__).is_relative_to(installed)
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
    expected = torch.sigmoid(state["slope"] * torch.tensor(last["u"].to_numpy()))
    assert torch.allclose(torch.tensor(last["weight"].to_numpy()), expected, atol=1e-6)
    assert len(set(metrics(run, "train/consensus/slope"))) == 4
    least = Path(run, "least_trusted.txt").read_text().split()
    assert least == recorded.sort_values("weight", kind="stable")["id"].tolist()[:5]


def test_going_on(run, inside):
    again = shutil.copytree(run, "again", ignore=shutil.ignore_patterns("*.ckpt"))
    shutil.copy(f"{run}/checkpoints/step-4.ckpt", f"{again}/checkpoints/last.ckpt")
    half = checkpoint(again)
    assert half["global_step"] == 4
    words = ["fit", "--config", f"{again}/config.yaml", "--ckpt_path", "last"]
    cli.main([*words, "--trainer.default_root_dir", again])
    before, after = checkpoint(run), checkpoint(again)
    assert before["global_step"] == after["global_step"] == 8
    assert not torch.equal(half["weighting"]["slope"], after["weighting"]["slope"])
    assert torch.equal(before["weighting"]["slope"], after["weighting"]["slope"])
    assert all(torch.equal(value, after["state_dict"][name]) for name, value in before["state_dict"].items())
    assert read_weights(run).equals(read_weights(again))
    assert Path(again, "least_trusted.txt").read_text() == Path(run, "least_trusted.txt").read_text()


def test_tools_of_a_run(run, inside, capsys):
    cli.main(["audit", run, "--cleaned", "cleaned.jsonl", "--action", "drop"])
    said = " ".join(capsys.readouterr().err.split())
    assert "injected label noise (my_preferences.LengthBias {'strength': 0.6})" in said
    assert 0 < len(Path("cleaned.jsonl").read_text().splitlines()) <= 80
    cli.main(["export", run, "exported"])
    card = Path("exported", "README.md").read_text()
    assert "LengthBias" in card and "ConsensusWeights" in card and "margin" in card
    module = PreferenceModule.load_from_checkpoint(f"{run}/checkpoints/last.ckpt")
    assert type(module.objective).__name__ == "SLiC" and module.objective.margin == 0.5
    assert torch.equal(module.weighting.slope, checkpoint(run)["weighting"]["slope"])
    cli.main(["predict", "--config", f"{run}/config.yaml", "--ckpt_path", "last"])
    answered = pd.read_json(Path(run, "generations.jsonl"), lines=True)["prompt"]
    assert sorted(answered) == sorted({row["prompt"] for row in pairs()[-16:]})


def test_outer_objective_and_estimator(inside):
    options = f"{with_callback('GoldReward', samples=4, max_new_tokens=3)} --trainer.max_steps 6"
    cli.main(fit_words("noise", "outer", options=f"{options} --trainer.default_root_dir brier"))
    assert checkpoint("brier")["weighting"]["updates"] >= 1
    samples = pd.read_json(Path("brier", "samples.jsonl"), lines=True)
    assert (samples["gold_reward"] == -samples["response"].str.len()).all()


def test_mistakes_end_in_one_sentence(inside, capsys):
    words = fit_words(options="--trainer.default_root_dir bad")
    line = fails(capsys, [*words, "--model.objective", "my_preferences.Slick"])
    assert "model.objective: my_preferences.Slick is no class that fits here (module" in line
    assert "has no attribute 'Slick'); choose one of" in line
    line = fails(capsys, [*words, "--model.weighting", "odd_weighting.Half"])
    assert "odd_weighting.Half is no class that fits here; choose one of" in line
    assert not Path("bad").exists()


def test_every_of_a_class_brings_meta_pairs(inside):
    options = "--trainer.default_root_dir fixed --trainer.max_steps 3"
    cli.main(fit_words(options=f"{options} --model.weighting odd_weighting.Fixed"))
    assert set(metrics("fixed", "train/met")) == {8.0}


def test_the_page_shows_these_files():
    files = {*HERE.glob("my_preferences/*.py"), *HERE.glob("configs/*.yaml"), HERE / "pyproject.toml"}
    included = re.findall(r"^```\{literalinclude\} (.+)$", PAGE.read_text(), re.MULTILINE)
    shown = {(PAGE.parent / name).resolve() for name in included}
    assert {file.name for file in files - shown} == {"__init__.py"}
