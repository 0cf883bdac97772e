"""A lexicon's reward, from the packages themselves and from a file."""

import pytest

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.reward_function import LexiconReward


def test_words_count_once(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("good\t2.5\t0.1\nbad\t-1.5\ncan't stand\t-3\nWon't\t-0.5\n\n")
    reward = LexiconReward(str(file))
    assert reward("good", " Good, good GOOD! it won’t be-bad_1") == 2.5 - 1.5 - 0.5
    assert reward("good", "goods; ungood") == 0
    assert reward("good", "") == 0


@pytest.mark.parametrize(("lexicon", "good", "bad"), [("vader", 3.1, -2.5), ("afinn", 3, -3)])
def test_packages(lexicon, good, bad):
    reward = LexiconReward(lexicon)
    assert (reward("", "great"), reward("", "a bad film")) == (good, bad)


def test_bad_lexicons(tmp_path, monkeypatch):
    (tmp_path / "words.txt").write_text("good\t1\nbad 1\n")
    with pytest.raises(UserError, match="line 2: 'bad 1' is no word with its valence"):
        LexiconReward(str(tmp_path / "words.txt"))
    monkeypatch.setitem(__import__("sys").modules, "vaderSentiment", None)
    with pytest.raises(UserError, match=r"install \"pacmr-lightning\[sentiment\]\""):
        LexiconReward()
