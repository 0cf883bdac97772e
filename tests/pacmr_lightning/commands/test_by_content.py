"""Files that name pairs by id are bound to the texts of the pairs."""

import pytest

from pacmr_lightning import cli
from pacmr_lightning.embedded_world import World

from ...conftest import fails, read_lines, short_fit, write_lines


@pytest.fixture
def base(tmp_path, tiny_llama):
    return tiny_llama(tmp_path / "base")


def test_masks_and_clean_pairs_of_other_texts(base, tmp_path, capsys, caplog):
    """They are found by id in one data set only: another with the same ids is refused."""
    rows = [row | {"id": str(i)} for i, row in enumerate(World().preference_rows(32, 1))]
    ours = write_lines(tmp_path / "ours.jsonl", rows)
    other = write_lines(tmp_path / "other.jsonl", [row | {"prompt": f"Say: {row['prompt']}"} for row in rows])

    def words(train, run, more=""):
        options = f"--data.source Files --data.source.train {train} --data.source.validation {ours} {more}"
        options += f" --data.global_batch_size 8 --output {tmp_path / run} --trainer.max_steps 1"
        return short_fit(base, options)

    cli.main(words(ours, "first", "--data.noise_rate 0.4"))
    mask = tmp_path / "first/noise_mask.parquet"
    masked = "--data.noise NoiseFromMask --data.noise.mask"
    said = fails(capsys, words(other, "second", f"{masked} {mask}"))
    assert "there 32 of the 32 training pairs have other texts, '0' for one" in said
    cli.main(words(ours, "second", f"{masked} {mask}"))
    bare = write_lines(tmp_path / "bare.jsonl", [{"id": str(i), "flipped": i < 9} for i in range(32)])
    cli.main(words(other, "third", f"{masked} {bare}"))
    assert "bare.jsonl has no texts of 32 of 32 pairs, which are found by id alone" in caplog.text

    clean = "--model.weighting VNetWeighting --model.weighting.outer CleanPreference --data.clean_meta Files"
    clean += " --data.meta_batch_size 4 --data.clean_meta.train"
    half = write_lines(tmp_path / "clean.jsonl", read_lines(other)[:8])
    said = fails(capsys, words(ours, "fourth", f"{clean} {half}"))
    assert "clean_meta has the id '0' of a training pair with other texts (8 of 8 common ids)" in said
    cli.main(words(ours, "fourth", f"{clean} {half} --data.hold_out_clean_meta false"))
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:8]]
    half = write_lines(tmp_path / "swapped.jsonl", swapped)
    caplog.clear()
    cli.main(words(ours, "fifth", f"{clean} {half}"))
    assert "An epoch: 3 updates" in caplog.text, "corrected labels are of the same pairs"
