"""Files of augmented prompts that are none, and the similarity that the report shows."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pacmr_lightning.datamodules.augmentation.augmentation_report import summary
from pacmr_lightning.datamodules.augmentation.files import AugmentedPrompt, read_augmentations
from pacmr_lightning.errors import UserError


def test_files_that_hold_no_augmentations(tmp_path):
    def write(name, columns):
        pq.write_table(pa.table(columns), tmp_path / name)

    write("other.parquet", {"prompt": ["a"], "text": ["b"]})
    write(
        "empty.parquet", {"prompt": pa.array([], pa.string()), "augmented_prompt": pa.array([], pa.string())}
    )
    write("numbers.parquet", {"prompt": ["a"], "augmented_prompt": [[1]]})
    (tmp_path / "text.parquet").write_text("prompt,augmented_prompt\n")
    for name, message in (
        ("nowhere.parquet", "There is no file .*nowhere.parquet with augmented prompts"),
        (".", "There is no file"),
        ("other.parquet", r"has no column 'augmented_prompt' \(columns found: prompt, text\)"),
        ("empty.parquet", "holds no augmented prompts"),
        ("numbers.parquet", "cannot be read as Parquet with texts"),
        ("text.parquet", "cannot be read as Parquet"),
    ):
        with pytest.raises(UserError, match=message):
            read_augmentations(tmp_path / name)
    write("some.parquet", {"augmented_prompt": ["b", None], "prompt": ["a", "c"], "more": [1, 2]})
    assert read_augmentations(tmp_path / "some.parquet") == {"a": "b"}


def test_the_report_s_similarity():
    """Of the contents: the frame of a post does not make two texts more alike."""

    def row(before, after):
        frame = "SUBREDDIT: r/x\n\nTITLE: t\n\nPOST: {}\n\nTL;DR:"
        return AugmentedPrompt(frame.format(before), False, None, 1, frame.format(after), 1)

    same = [row("the cat sat on the mat", "the cat sat on the mat")]
    other = [row("qqq", "zzz zzz")]
    assert "are: 1.00 (1 is the same text), of 1 prompts" in summary(same, "x")
    assert 0 <= float(summary(other, "x").split("are: ")[1][:4]) < 0.1
