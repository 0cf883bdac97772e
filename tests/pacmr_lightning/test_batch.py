"""Micro-batches of a token budget; by pairs: test_same_numerics.py."""

import pytest

from pacmr_lightning.batch import Segment, TokenBudget
from pacmr_lightning.errors import UserError


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
    assert not list(batch[:0].micro_batches(TokenBudget(1)))
    message = f"pair-{int(lengths.argmax())} has {budget} tokens, but micro_batch_tokens is {budget - 1};"
    with pytest.raises(UserError, match=message):
        list(batch.micro_batches(TokenBudget(budget - 1)))
