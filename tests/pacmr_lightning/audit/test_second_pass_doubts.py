"""When a second pass is told to look worse than the first, and that it says so after the comparison."""

import copy
import json

import pytest

from pacmr_lightning.commands.second_pass import FURTHEST, compare_passes, doubts

FIRST = {
    **{"method": "dpo", "noise_rate": 0.3, "seed": 1, "val_accuracy": 0.594, "weight_gap": None},
    **{"seconds": 1.0, "metrics": {"val/sequence_kl": 9.4}, "val_pairs": 143},
}


def changed(kl=None, **values):
    result = copy.deepcopy(FIRST) | values
    if kl is not None:
        result["metrics"]["val/sequence_kl"] = kl
    return result


def test_nothing_to_say():
    """As good, or better, or as far as chance makes them differ, or not known."""
    for second in (FIRST, changed(kl=FURTHEST), changed(val_accuracy=0.7), changed(val_accuracy=0.5)):
        assert doubts(FIRST, second) == []
    none = changed(val_accuracy=None, metrics={}, val_pairs=None)
    assert doubts(none, none) == doubts(FIRST, none) == doubts(none, FIRST) == []


def test_too_far():
    (said,) = doubts(FIRST, changed(kl=51.14))
    assert said.startswith(
        "Its responses are 51.1 nats from the reference (the first run's: 9.4), which is far:"
    )
    (said,) = doubts(changed(metrics={}), changed(kl=51.14))
    assert said.startswith("Its responses are 51.1 nats from the reference, which is far: read some")


@pytest.mark.parametrize(("after", "pairs", "said"), [(0.469, 143, 1), (0.5, 143, 0), (0.5, 1000, 1)])
def test_fewer_labels(after, pairs, said):
    """Beyond two standard errors of the difference of two shares: 0.115 with 143 pairs, 0.044 with 1,000."""
    found = doubts(changed(val_pairs=pairs), changed(val_accuracy=after, val_pairs=pairs))
    assert len(found) == said
    assert not said or f"{after:.3f} of {pairs:,} and not 0.594, beyond chance: read some of its" in found[0]


def test_after_the_comparison(tmp_path, capsys):
    for name, summary in (("first", FIRST), ("second", changed(kl=51.14, val_accuracy=0.469))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    compare_passes(str(tmp_path / "first"), tmp_path / "second")
    output, errors = capsys.readouterr()
    assert "51.14" in output
    assert [line.split()[1] for line in errors.splitlines()] == ["responses", "agrees"]
