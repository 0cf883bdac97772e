from collections import Counter

import pytest

from pacmr_lightning.batch import Segment
from pacmr_lightning.datamodules.sampling import unit_hash
from pacmr_lightning.datamodules.stream import EvaluationStream, TrainingStream
from pacmr_lightning.datamodules.tokenization import tokenize_pairs
from pacmr_lightning.datamodules.tokenized_pairs import TokenizedPairs
from pacmr_lightning.errors import UserError

from .checked_rows import pairs


@pytest.fixture
def make_pairs(tokenizer, pair_rows):
    def make(count, noise_rate=0.0, plain=0):
        """``count`` pairs with an augmented prompt, and ``plain`` pairs without."""
        rows = pair_rows(count) + [row | {"augmented_prompt": row["prompt"]} for row in pair_rows(plain)]
        kept, _ = tokenize_pairs(pairs(*rows), tokenizer, 100)
        swapped = [unit_hash(name, 42) < noise_rate for name in kept["id"]] if noise_rate else None
        return TokenizedPairs(kept, tokenizer.pad_token_id, swapped)

    return make


def part(batch, row, segment):
    return batch.input_ids[row][batch.segment_ids[row] == segment].tolist()


def test_meta_batches_use_each_eligible_row_once_a_round(make_pairs):
    pairs = make_pairs(20, plain=10)
    batches = TrainingStream(pairs, 5, seed=0, meta_every=4, meta_batch_size=6)
    eligible = {pairs.rows[i]["id"] for i in pairs.with_augmented_prompt}
    for start in (0, 12, 24):
        ids = Counter(i for step in range(start, start + 12, 4) for i in batches[step].meta.ids)
        assert set(ids.values()) == {1} and len(ids) == 18
        assert set(ids) <= eligible


def test_noise_swaps_the_two_responses_and_says_so(make_pairs):
    clean, noisy = (EvaluationStream(make_pairs(40, noise_rate=rate), 40)[0] for rate in (0.0, 0.4))
    assert clean.ids == noisy.ids and set(clean.flipped.tolist()) == {-1}
    assert 0 < noisy.flipped.sum() < 40
    sides = (Segment.CHOSEN, Segment.REJECTED)
    for row, flip in enumerate(noisy.flipped.tolist()):
        found = [part(noisy, row, side) for side in sides]
        assert found == [part(clean, row, side) for side in sides[:: -1 if flip else 1]]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("count", [3, 16, 17, 18, 23])
def test_evaluation_loses_and_doubles_nothing(make_pairs, world, count):
    pairs = make_pairs(count)
    shares = [EvaluationStream(pairs, 8, rank=rank, world_size=world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    found = [i for share in shares for number in range(len(share)) for i in share[number].ids]
    assert sorted(found) == sorted(pairs.rows["id"])
    assert all(len(share[number]) for share in shares for number in range(len(share)))
    if world == 1:
        assert found == pairs.rows["id"][:]


def test_what_cannot_be_shared(make_pairs):
    """Global batches: test_cli.py; too few augmented prompts: test_preparation.py."""
    pairs = make_pairs(6, plain=4)
    with pytest.raises(UserError, match=r"Only 10 training pairs are left.*global_batch_size, which is 11"):
        TrainingStream(pairs, 11, seed=0)
    with pytest.raises(UserError, match="meta_batch_size is 3, which 2 processes cannot share"):
        TrainingStream(pairs, 4, seed=0, meta_every=1, meta_batch_size=3, world_size=2)
    with pytest.raises(UserError, match="each of 11 processes needs one"):
        EvaluationStream(pairs, 20, world_size=11)
