"""PairBatch: how pairs are laid out, sorted and cut."""

import pytest
import torch

from pacmr_lightning.batch import PairBatch, Segment, TokenBudget
from pacmr_lightning.errors import UserError


def test_no_pairs():
    nothing = PairBatch.collate([], [], [], [])
    assert len(nothing) == 0 and nothing.input_ids.shape == nothing.segment_ids.shape == (0, 0)
    assert nothing.input_ids.dtype == nothing.segment_ids.dtype == torch.long


def test_longest_first(make_batch):
    batch = make_batch(9, augmented=True)
    found = batch.longest_first()
    assert sorted(found.ids) == sorted(batch.ids) and found.ids != batch.ids
    lengths = (found.segment_ids != Segment.PAD).sum(1)
    assert (lengths.diff() <= 0).all()
    for row, name in enumerate(found.ids):
        old = batch.ids.index(name)
        for view, before in ((found, batch), (found.augmented, batch.augmented)):
            assert view.ids[row] == name and view.flipped[row] == before.flipped[old]
            for column in ("input_ids", "segment_ids"):
                a, b = getattr(view[row : row + 1], column), getattr(before[old : old + 1], column)
                assert torch.equal(a, b)
    assert [part.input_ids.shape[1] for part in found.micro_batches(3)] == lengths[::3].tolist()


def test_micro_batches_by_tokens(make_batch):
    batch = make_batch(9)
    lengths = (batch.segment_ids != Segment.PAD).sum(1)
    budget = int(lengths.max())
    for tokens in (budget, 2 * budget, batch.token_count):
        parts = list(batch.micro_batches(TokenBudget(tokens)))
        assert [name for part in parts for name in part.ids] == batch.ids
        counts = [part.token_count for part in parts]
        assert max(counts) <= tokens
        # Not one could take the next pair, too.
        nexts = [part[:1].token_count for part in parts[1:]]
        assert all(count + more > tokens for count, more in zip(counts, nexts, strict=False))
    assert len(parts) == 1 and not list(batch[:0].micro_batches(TokenBudget(1)))
    message = f"pair-{int(lengths.argmax())} has {budget} tokens, but micro_batch_tokens is {budget - 1};"
    with pytest.raises(UserError, match=message):
        list(batch.micro_batches(TokenBudget(budget - 1)))
