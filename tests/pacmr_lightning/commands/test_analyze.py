"""``pacmr analyze`` on real runs of a tiny model: values, labels, augmented prompts, files, bad input."""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from pacmr_lightning import cli
from pacmr_lightning.analysis.consistency import consistency_by_threshold
from pacmr_lightning.commands.analyze import analyze
from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError
from pacmr_lightning.modules import PreferenceModule

from ...conftest import edit_config, fails, files, short_fit, write_lines
from ..conftest import log_ratios

TAUS = [0.5, 0.55]
LAST = "checkpoints/last.ckpt"


def rows_of(count, seed):
    """World rows; every fourth has no augmented prompt, and labels of some are known to be wrong or right."""
    rows = list(World().preference_rows(count, seed))
    for i, row in enumerate(rows):
        if i % 4 == 0:
            del row["augmented_prompt"]  # the rules do not know how to reword it
        if i % 3 == 0:
            row["flipped"] = i % 2 == 0
    texts = {"chosen": " calm", "rejected": " rain", "id": f"by-rule-{seed}", "category": "books"}
    return [*rows, texts | {"prompt": "What is the best of all books? I do not know."}]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("analyze")
    tiny_llama(folder / "model", initializer_range=0.2)
    for name, count, seed in (("train", 31, 0), ("validation", 9, 1)):
        write_lines(folder / f"{name}.jsonl", rows_of(count, seed))
    options = f"""
        {files(folder / "train.jsonl", folder / "validation.jsonl")} --data.global_batch_size 8
        --data.task tiny --data.noise_rate 0.3 --model.objective DPO --model.objective.beta 1.0
        --model.learning_rate 0.01 --trainer.max_steps 3 --trainer.default_root_dir {folder}/run
        --checkpoint.every_n_train_steps 1 --checkpoint.save_top_k -1
    """
    cli.main(short_fit(folder / "model", options))
    return folder / "run"


def expected_u(run, rows, prompt="prompt"):
    ratios = log_ratios(PreferenceModule.load_from_checkpoint(run / LAST).policy, rows, prompt)
    return ratios[:, 0] - ratios[:, 1]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_values_of_every_pair(split, run):
    analyze([str(run)], split, TAUS)
    pairs = pd.read_parquet(run / f"analysis/pairs-{split}.parquet").set_index("id")
    rows = rows_of(*((31, 0) if split == "train" else (9, 1)))
    rows = [row for row in rows if "augmented_prompt" in row or row["id"].startswith("by-rule")]
    assert list(pairs.index) == [row["id"] for row in rows]
    np.testing.assert_allclose(pairs["u"], expected_u(run, rows), atol=1e-4)
    given = [row for row in rows if "augmented_prompt" in row]
    found = pairs.loc[[row["id"] for row in given]]
    np.testing.assert_allclose(found["augmented_u"], expected_u(run, given, "augmented_prompt"), atol=1e-4)
    assert found["given_view"].all() and not pairs["given_view"].all()
    assert (pairs["u"] - pairs["augmented_u"]).abs().max() > 0.01, "the two views must differ"
    assert pairs["clean"].tolist() == [0 if row.get("flipped") else 1 for row in rows]
    assert {0, 1} == set(pairs["clean"])
    assert pairs["category"].tolist() == [row["category"] for row in rows]
    prompts = [row["prompt"] for row in rows]
    assert pairs.groupby("prompt").ngroups == len(set(prompts))


def test_the_table(run, capsys):
    table = analyze([str(run)], "train", TAUS)
    pairs = pd.read_parquet(run / "analysis/pairs-train.parquet")
    kinds = [pairs[pairs["given_view"]], pairs[~pairs["given_view"]]]
    measured = pd.concat([consistency_by_threshold(kind, TAUS) for kind in kinds], ignore_index=True)
    pd.testing.assert_frame_equal(table[measured.columns], measured)
    assert table["pairs"].tolist() == [23, 23, 1, 1] and set(table["step"]) == {3}
    assert table["task"].tolist() == ["tiny", "tiny", "tiny, by rules", "tiny, by rules"]
    folder = run / "analysis"
    pd.testing.assert_frame_equal(pd.read_csv(folder / "consistency-train.csv"), table)
    lines = (folder / "consistency-train.md").read_text().splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    row = table.iloc[0]
    means = [f"{100 * row[name]:.2f}" for name in ("coverage", "clean_accuracy", "direction_agreement")]
    assert cells == ["tiny", "23", f"{row['l1']:.4f}", "0.5", *means]
    notes = " ".join("\n".join(lines[7:]).split())
    assert "trained with injected noise (noise_rate 0.3)" in notes and "after 3 updates" in notes
    assert "23 from the data, 1 by rules" in notes
    assert "without an augmented prompt, excluded: 8 pairs" in notes
    printed = capsys.readouterr().out
    assert all(cell in printed for cell in cells) and "Direction" in printed


def test_a_sample(run):
    def ids(**options):
        analyze([str(run)], pairs=6, **options)
        return set(pd.read_parquet(run / "analysis/pairs-train.parquet")["id"])

    first = ids(seed=1)
    assert len(first) == 6 and first != ids(seed=2)


def test_two_runs(run, finished, inside, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    runs = ["run", shutil.copytree(finished, "run-with-a-long-name")]
    table = analyze(runs, "validation", output=str(tmp_path / "both"))
    assert table["run"].tolist() == [runs[0]] * 6 + [runs[1]] * 6
    assert [*table["task"].unique()][::2] == runs and capsys.readouterr().out.count(f" {runs[1]} ") == 3
    one, two = (part.drop(columns=["task", "run"]).to_numpy()[:, 1:] for _, part in table.groupby("run"))
    np.testing.assert_array_equal(one.astype(str), two.astype(str))
    assert len(pd.read_parquet(tmp_path / "both" / "pairs-validation.parquet")) == 2 * 7


def test_second_wordings_of_a_file(run, tmp_path):
    prompts = sorted({row["prompt"] for row in rows_of(31, 0)})[:5]
    file = pd.DataFrame({"prompt": prompts, "augmented_prompt": ["The sea, " + p for p in prompts]})
    file.to_parquet(tmp_path / "augmented.parquet")
    table = analyze([str(run)], augmentations=str(tmp_path / "augmented.parquet"))
    pairs = pd.read_parquet(run / "analysis/pairs-train.parquet")
    expected = [r | {"other": "The sea, " + r["prompt"]} for r in rows_of(31, 0) if r["prompt"] in prompts]
    assert pairs["id"].tolist() == [row["id"] for row in expected] and len(table) == 3
    np.testing.assert_allclose(pairs["augmented_u"], expected_u(run, expected, "other"), atol=1e-4)
    assert pairs["given_view"].all()


def test_a_file_of_augment_by_rules(run, finished, tmp_path):
    """As the augmented prompts that analyze makes itself by rules, also in its table."""
    train, output = finished.parent / "train.jsonl", tmp_path / "rules.parquet"
    words = ["augment", "--rewriter", "Rules", "--source", "Files", "--source.train", str(train)]
    cli.main([*words, "--source.validation", str(train), "--output", str(output)])
    cli.main(["analyze", str(run), "--augmentations", str(output)])
    lines = (run / "analysis/consistency-train.md").read_text().splitlines()
    assert any("0 from the data, 1 by rules" in line for line in lines)
    assert all(line.startswith("| tiny, by rules | 1 |") for line in lines[2:5]) and "| 0.6 |" in lines[3]


def refused(arguments, capsys):
    return fails(capsys, ["analyze", *arguments])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--taus", "0.6", "1"], "one of taus is 1.0"),
        (["--checkpoint", "step-9"], "has no checkpoint step-9; choose one of last, step-1, step-2, step-3"),
        (["--pairs", "0"], "pairs is 0, but a sample of the 24 train pairs"),
        (["--augmentations", "nowhere.parquet"], "There is no file nowhere.parquet"),
        (["--augmentations", "any.parquet", "--split", "validation"], "it is for training pairs only"),
    ],
)
def test_bad_options(options, message, run, capsys, tmp_path):
    assert message in refused([str(run), *options, "--output", str(tmp_path / "out")], capsys)
    assert not (tmp_path / "out").exists()


def test_bad_runs(run, capsys, tmp_path):
    with pytest.raises(UserError, match="runs is empty"):
        analyze([])
    with pytest.raises(UserError, match="taus is empty"):
        analyze([str(run)], taus=[])

    def refuses(message):
        # A good run first: nothing is computed of it either.
        good = str(tmp_path / "good")
        assert message in refused([good, str(run), "--output", str(tmp_path / "out")], capsys)

    shutil.copytree(run, tmp_path / "good")
    assert "nowhere/config.yaml does not exist" in refused(["nowhere"], capsys)
    config = (run / "config.yaml").read_text()
    for text in ("a: [", "- 1", "model: {init_args: {}}"):
        (run / "config.yaml").write_text(text)
        refuses("is not the configuration of a run")
    (run / "config.yaml").write_text(config.replace("policy:", "from_scratch:"))
    refuses("is not that of a preference run")
    (run / "config.yaml").write_text(config)
    shutil.rmtree(f"{run}/checkpoints")
    refuses("has no checkpoint last; train it until it has one")
    (run / LAST).mkdir(parents=True)
    refuses("is a folder, as sharding strategies write it")
    assert not (tmp_path / "out").exists()


def test_checkpoints_that_do_not_fit_or_have_diverged(run, capsys):
    config, checkpoint = (run / "config.yaml").read_text(), (run / LAST).read_bytes()
    policy = yaml.safe_load(config)["model"]["init_args"]["policy"]
    for change, message in (
        ({"rank": 3}, "rank 3 instead of"),
        ({"target_modules": ["q_proj"]}, "does not fit"),
    ):
        edit_config(run, "model", policy=policy | {"init_args": policy["init_args"] | change})
        assert message in refused([str(run)], capsys)
    edit_config(run, "model", policy=policy, learning_rate="fast")
    assert "expected float or null, but got fast" in refused([str(run)], capsys)
    (run / "config.yaml").write_text(config)
    for content in (b"", b"no checkpoint", checkpoint[:1000]):
        (run / LAST).write_bytes(content)
        assert "unusable: it is damaged" in refused([str(run)], capsys)
    torch.save({"weights": torch.zeros(1)}, run / LAST)
    assert "does not fit" in refused([str(run)], capsys)
    (run / LAST).write_bytes(checkpoint)
    diverged = torch.load(run / LAST, weights_only=True)
    for value in diverged["state_dict"].values():
        value.fill_(torch.nan)
    torch.save(diverged, run / LAST)
    assert "is not finite, so the policy has diverged" in refused([str(run)], capsys)


def test_no_augmented_prompt(run, capsys, tmp_path):
    rows = [row for row in rows_of(31, 0) if "augmented_prompt" not in row][:8]
    write_lines(tmp_path / "plain.jsonl", rows)
    source = yaml.safe_load((run / "config.yaml").read_text())["data"]["init_args"]["source"]
    source["init_args"]["train"] = str(tmp_path / "plain.jsonl")
    edit_config(run, "data", source=source)
    message = refused([str(run), "--output", str(tmp_path / "out")], capsys)
    assert "plain.jsonl differ from those of the run" in message
    checkpoint = torch.load(run / LAST, weights_only=True)
    del checkpoint["options"]["texts of the training pairs"]  # as where another datamodule made the pairs
    torch.save(checkpoint, run / LAST)
    message = refused([str(run), "--output", str(tmp_path / "out")], capsys)
    assert "None of the 8 train pairs has an augmented prompt" in message
    assert not (tmp_path / "out").exists()
