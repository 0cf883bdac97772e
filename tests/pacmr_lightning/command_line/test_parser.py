"""Values of options, whatever order of types another package has left in typing's cache."""

from typing import Union

import pytest

from pacmr_lightning.command_line.parser import OneSentence


@pytest.mark.parametrize("word", ["1", "1.0", "0.25", "null"])
def test_whole_numbers_stay_whole(word):
    """``--trainer.limit_val_batches 1`` is one batch; as 1.0 it would be all of them."""

    def run(limit: Union[float, int, None] = None):  # noqa: UP007
        """Run."""

    parser = OneSentence()
    parser.add_function_arguments(run)
    found = parser.parse_args(["--limit", word]).limit
    assert repr(found) == word.replace("null", "None")
