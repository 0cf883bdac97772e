"""pacmr correct: PerpCorrect's score, and its rounds and second pass on a tiny model, killed in between."""

import json
import random
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from pacmr_lightning import cli
from pacmr_lightning.audit import perp_correct
from pacmr_lightning.audit.perp_correct import Rounds, fit_mixture, mean_nll, selection
from pacmr_lightning.batch import PairBatch
from pacmr_lightning.commands.correct import _show
from pacmr_lightning.errors import UserError
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.runs.folder import read_weights

from ...conftest import read_lines as lines
from ...conftest import short_fit, write_lines
from .conftest import refused

PAIRS, CLEAN, COUNT = 160, 24, 2
OPTIONS = (
    *("--rounds.count", str(COUNT), "--rounds.share", "0.1", "--rounds.learning_rate", "0.01"),
    *("--rounds.epochs", "3", "--rounds.beta", "0.3"),
)


def rows(count):
    """Good responses speak of books, bad ones of rain; every fourth label is wrong."""
    draw = random.Random(0)
    for i in range(count):
        good = " ".join(draw.choices(["book", "best", "calm", "know"], k=4))
        bad = " ".join(draw.choices(["rain", "sea", "mood", "because"], k=4))
        row = {"id": str(i), "prompt": f"What of {i} books?", "chosen": f" {good}", "rejected": f" {bad}"}
        if wrong := i % 4 == 3:
            row |= {"chosen": row["rejected"], "rejected": row["chosen"]}
        yield row | {"flipped": wrong}


@pytest.fixture(scope="module")
def first(tmp_path_factory, tiny_llama):
    """A run that has learned from noisy labels, some of them flipped by it, and has clean pairs."""
    folder = tmp_path_factory.mktemp("correct")
    tiny_llama(folder / "model", initializer_range=0.2)
    found = list(rows(PAIRS))
    clean = [row for row in found if not row["flipped"]][:CLEAN]
    for name, part in (("train", found), ("clean", clean), ("validation", found[:8])):
        write_lines(folder / f"{name}.jsonl", part)
    options = f"""
        --model.learning_rate 0.001 --model.micro_batch_size 8 --model.method mwn
        --model.weighting VNetWeighting --model.weighting.outer CleanPreference
        --data.noise_rate 0.1 --data.global_batch_size 8 --data.meta_batch_size 8
        --data.source Files --data.source.train {folder}/train.jsonl
        --data.source.validation {folder}/validation.jsonl
        --data.clean_meta Files --data.clean_meta.train {folder}/clean.jsonl
        --trainer.max_epochs 1 --trainer.limit_val_batches 0 --trainer.callbacks+ WeightRecorder
        --trainer.callbacks+ RunSummary --trainer.default_root_dir {folder}/first
    """
    cli.main(short_fit(folder / "model", options))
    return folder / "first"


@pytest.fixture(scope="module")
def corrected(first):
    """What the command leaves after it was killed between a round's training and its scores."""
    score = perp_correct._score

    def killed(folder, *arguments):
        if folder.name == "2":
            raise KeyboardInterrupt
        score(folder, *arguments)

    words = ["correct", str(first), *OPTIONS, "--cleaned", str(first.parent / "corrected.jsonl")]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(perp_correct, "_score", killed)
        cli.main(words)
    folder = first.with_name("first-corrected")
    done = (folder / "rounds" / "1" / "scores.parquet").stat().st_mtime_ns
    steps = (folder / "rounds" / "2" / "checkpoints" / "last.ckpt").stat().st_mtime_ns
    cli.main(words)
    assert done == (folder / "rounds" / "1" / "scores.parquet").stat().st_mtime_ns
    assert steps == (folder / "rounds" / "2" / "checkpoints" / "last.ckpt").stat().st_mtime_ns
    return folder


def test_the_score_is_the_loss_of_transformers(tiny_llama, tmp_path):
    """The loss of a whole text, prompt and EOS included, minus that of the other."""
    policy = PolicyModel(tiny_llama(tmp_path / "model", initializer_range=0.5), rank=2)
    policy.build()
    generator = torch.Generator().manual_seed(0)
    for name, value in policy.adapter().items():
        if "lora_B" in name:
            value.data.normal_(generator=generator)
    lengths = [(3, 2, 5), (1, 4, 1), (6, 3, 3), (2, 7, 2)]
    parts = [[torch.randint(3, 300, (n,), generator=generator).tolist() for n in row] for row in lengths]
    found = mean_nll(policy, PairBatch.collate(["a", "b", "c", "d"], *map(list, zip(*parts, strict=True))))
    for (prompt, *responses), values in zip(parts, found, strict=True):
        for response, value in zip(responses, values, strict=True):
            tokens = torch.tensor([prompt + response])
            loss = policy.peft(input_ids=tokens, labels=tokens).loss
            torch.testing.assert_close(value, loss, rtol=1e-5, atol=1e-5)
    assert (found[:, 0] - found[:, 1]).detach().std() > 0.1


def test_each_round_learns_from_what_the_last_was_surest_of(corrected, first):
    table = pd.read_csv(corrected / "rounds.csv")
    trained = {row["id"]: row for row in rows(PAIRS)}
    mask = pd.read_parquet(first / "noise_mask.parquet").set_index("id")["flipped"]
    names, clean = list(trained), lines(first.parent / "clean.jsonl")
    texts = [(row["prompt"], row["chosen"], row["rejected"]) for row in clean]
    expected = list(texts)
    for number in range(1, COUNT + 1):
        written = lines(corrected / "rounds" / f"{number}.jsonl")
        assert [(row["prompt"], row["chosen"], row["rejected"]) for row in written] == expected
        d = pd.read_parquet(corrected / "rounds" / str(number) / "scores.parquet")["d"].to_numpy()
        mixture = fit_mixture(d)
        kept, exchanged = selection(d, mixture.alpha, number * PAIRS // 10)
        row = table.iloc[number - 1]
        assert row["kept"] + row["swapped"] == (number - 1) * PAIRS // 10 == len(expected) - CLEAN
        assert row["changed"] == (d >= mixture.threshold).sum()
        np.testing.assert_allclose(row[["mu", "sigma", "alpha"]].astype(float), [*vars(mixture).values()][:3])
        expected = list(texts)
        for indices, opposite in ((kept, False), (exchanged, True)):
            for name in (names[i] for i in indices):
                sides = [trained[name][side] for side in ("chosen", "rejected")]
                # The label as trained has the first run's own noise in it.
                expected.append(
                    (trained[name]["prompt"], *(sides[::-1] if mask[name] != opposite else sides))
                )
        config = yaml.safe_load((corrected / "rounds" / str(number) / "config.yaml").read_text())
        assert config["model"]["init_args"]["objective"]["init_args"]["beta"] == 0.3
        assert config["data"]["init_args"]["noise_rate"] == 0


def test_the_best_round_corrects_the_labels(corrected, first):
    table, pairs = pd.read_csv(corrected / "rounds.csv"), pd.read_parquet(corrected / "pairs.parquet")
    best = table[table["best"]].squeeze()
    assert best["separation"] == table[table["problem"].isna()]["separation"].max()
    d = pd.read_parquet(corrected / "rounds" / str(best["round"]) / "scores.parquet")["d"]
    assert pairs["id"].tolist() == [str(i) for i in range(PAIRS)] and (pairs["d"] == d).all()
    changed = pairs["d"] >= best["threshold"]
    assert (pairs["suggested"].eq("swap") == changed).all() and (pairs["p_wrong"] == changed).all()
    flips = pd.read_parquet(first / "noise_mask.parquet").set_index("id")["flipped"][pairs["id"]].to_numpy()
    assert (pairs["observed"].eq("rejected") == flips).all()
    wrong = np.array([row["flipped"] for row in rows(PAIRS)]) ^ flips
    assert (changed != wrong).mean() < 0.5 * wrong.mean()
    assert best["alpha"] == pytest.approx(1 - wrong.mean(), abs=0.1)
    # The corrected file starts from the labels as trained.
    written = lines(first.parent / "corrected.jsonl")
    for row, found, flip in zip(rows(PAIRS), written, flips ^ changed, strict=True):
        assert found["chosen"] == row["rejected" if flip else "chosen"]
        assert found["flipped"] == row["flipped"] ^ flip


def test_the_second_pass_learns_the_corrected_labels(corrected):
    changed = pd.read_parquet(corrected / "pairs.parquet").set_index("id")["p_wrong"]
    recorded = read_weights(corrected)
    assert len(recorded) == PAIRS and (recorded["weight"] == 1 - changed[recorded["id"]].to_numpy()).all()
    config = yaml.safe_load((corrected / "config.yaml").read_text())
    assert config["model"]["init_args"]["weighting"]["init_args"]["soft_labels"]
    assert json.loads((corrected / "summary.json").read_text())["method"] == "mwn-corrected"


def test_what_is_done_is_not_done_again(corrected, first, capsys):
    seen = {path: path.stat().st_mtime_ns for path in corrected.rglob("*.ckpt")}
    cli.main(["correct", str(first), *OPTIONS])
    said = capsys.readouterr()
    result = said.out[: said.out.index("Estimated noise rate: ")].split()
    assert result[:2] == ["round", "kept"] and "used" in result, "which is all that stands before it"
    assert "by the audit of the first run" in said.out and "mwn-corrected" in said.out
    assert "Round 1 of" not in said.err and "wall time: " in said.err and len(seen) > COUNT
    assert seen == {path: path.stat().st_mtime_ns for path in corrected.rglob("*.ckpt")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["{run}", "--clean", "Files", "--clean.train", "{clean}", "--rounds.batch_size", "64"],
            "has 24 clean",
        ),
        (["{run}", "--rounds.count", "0"], "rounds.count is 0, but it must be above 0"),
        (["{run}", "--rounds.share", "0.5"], "rounds.share is 0.5, but the last of 6 rounds would then"),
        (["{run}", "--rounds.share", "0.001"], "less than one of 160 training pairs"),
        (["{run}", "--cleaned", "{train}"], "which is the run's own data; name another file"),
        (["{run}", "--output", "{done}"], "already holds a second pass with rounds.count 2;"),
        (["{plain}"], "has no clean pairs, which PerpCorrect needs; give some"),
    ],
)
def test_bad_input(words, message, corrected, first, tmp_path, capsys):
    plain = shutil.copytree(first, tmp_path / "plain")
    config = yaml.safe_load((plain / "config.yaml").read_text())
    config["data"]["init_args"]["clean_meta"] = None
    (plain / "config.yaml").write_text(yaml.safe_dump(config))
    places = {"run": first, "plain": plain, "done": corrected}
    places |= {name: first.parent / f"{name}.jsonl" for name in ("clean", "train")}
    assert message in refused(capsys, "correct", *(word.format(**places) for word in words))
    assert not plain.with_name("plain-corrected").exists()


def test_what_is_said_of_the_rounds(corrected, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    table = pd.read_csv(corrected / "rounds.csv", keep_default_na=False)
    table.loc[~table["best"], "problem"] = "has a noise rate of 80%"
    _show(table, PAIRS, corrected)
    said = capsys.readouterr().out
    assert "used" in said and said.count("noise rate of 80%") == COUNT - 1 and "such a fit can be" not in said
    table.loc[table["best"], ["alpha", "separation"]] = 0.89, 0.86
    _show(table, PAIRS, corrected)
    assert "89.0% of the labels are right as they are and 86.0% after correction" in capsys.readouterr().out


def test_rounds_that_tell_nothing(corrected):
    noise = fit_mixture(np.random.default_rng(0).exponential(size=500))
    with pytest.raises(UserError, match=r"In no round .*the fit of round 1 misses the distribution by"):
        perp_correct._best([(noise, np.zeros(1))])


def test_a_round_takes_micro_batches_that_fit(first):
    from pacmr_lightning.runs.finished_run import find_run

    config = Rounds(batch_size=6).config(find_run(str(first), "last"), first / "x", first / "y.jsonl")
    assert config["model"]["init_args"]["micro_batch_size"] == 2  # of the run's 8
