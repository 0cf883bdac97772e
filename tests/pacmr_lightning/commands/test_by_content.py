"""Noise masks and clean pairs: files that name pairs by id are bound to the texts of the pairs."""

import json
from pathlib import Path

import pandas as pd
import pytest

from pacmr_lightning import cli
from pacmr_lightning.embedded_world import World
from pacmr_lightning.runs.folder import read_weights

from ...conftest import fails, files, read_lines, short_fit, write_lines

FROM_MASK = "--data.noise NoiseFromMask --data.noise.mask"
ROWS = [row | {"id": str(i)} for i, row in enumerate(World().preference_rows(32, 1))]


@pytest.fixture
def words(inside, tiny_llama):
    tiny_llama("base")
    write_lines("ours.jsonl", ROWS)

    def words(train, more=""):
        options = "--data.global_batch_size 8 --trainer.max_steps 2 --trainer.callbacks+=WeightRecorder"
        options += f" --trainer.callbacks+=RunSummary --data.task x {more}"
        return short_fit("base", f"{files(train, 'ours.jsonl')} {options}")

    return words


@pytest.mark.parametrize(
    ("noise", "name"),
    [
        ("--data.noise TwoRateNoise --data.noise.rates [0.1,0.6]", "TwoRateNoise10-60"),
        ("--data.noise AnnotatorNoise --data.noise.share 0.3 --model.objective RDPO", "AnnotatorNoise30"),
    ],
)
def test_a_mask_is_kept_and_can_be_used_again(noise, name, words):
    first, second = (Path(f"runs/x-a-noise{kind}-seed42") for kind in (name, "NoiseFromMask"))
    cli.main(words("ours.jsonl", f"{noise} --model.method a"))
    mask = pd.read_parquet(first / "noise_mask.parquet").set_index("id")
    cli.main(words("ours.jsonl", f"{FROM_MASK} {first}/noise_mask.parquet --model.method a"))
    seen = [read_weights(run)[["step", "id", "flipped"]] for run in (first, second)]
    assert seen[0].equals(seen[1])
    assert len(mask) == 32 and (seen[0]["flipped"] == mask["flipped"][seen[0]["id"]].to_numpy()).all()
    again = pd.read_parquet(second / "noise_mask.parquet").set_index("id")
    assert again["flipped"].equals(mask["flipped"])
    rate = json.loads((first / "summary.json").read_text())["noise_rate"]
    assert rate == pytest.approx(mask["flipped"].mean()) and rate > 0
    if "Annotator" in name:
        assert mask["annotator"].str.fullmatch(r"annotator-\d+").all()


def test_masks_and_clean_pairs_of_other_texts(words, capsys, caplog):
    """They are found by id in one data set only: another with the same ids is refused."""
    other = write_lines("other.jsonl", [row | {"prompt": f"Say: {row['prompt']}"} for row in ROWS])
    cli.main(words("ours.jsonl", "--data.noise_rate 0.4 --output first"))
    said = fails(capsys, words(other, f"{FROM_MASK} first/noise_mask.parquet --output second"))
    assert "there 32 of the 32 training pairs have other texts, '0' for one" in said
    bare = write_lines("bare.jsonl", [{"id": str(i), "flipped": i < 9} for i in range(32)])
    cli.main(words(other, f"{FROM_MASK} {bare} --output second"))
    assert "bare.jsonl has no texts of 32 of 32 pairs, which are found by id alone" in caplog.text

    clean = "--model.weighting VNetWeighting --model.weighting.outer CleanPreference --data.clean_meta Files"
    clean += " --data.meta_batch_size 4 --data.clean_meta.train"
    half = write_lines("clean.jsonl", read_lines(other)[:8])
    said = fails(capsys, words("ours.jsonl", f"{clean} {half} --output third"))
    assert "clean_meta has the id '0' of a training pair with other texts (8 of 8 common ids)" in said
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS[:8]]
    half = write_lines("swapped.jsonl", swapped)
    caplog.clear()
    cli.main(words("ours.jsonl", f"{clean} {half} --output fourth"))
    assert "An epoch: 3 updates" in caplog.text, "corrected labels are of the same pairs"
