"""How unlikely a policy finds a pair's two texts, prompt and response each: PerpCorrect's score."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..batch import PairBatch
from ..policy import PolicyModel
from ..policy.rows import padded, row_multiple, separate_rows


def mean_nll(policy: PolicyModel, batch: PairBatch) -> Tensor:
    """(N, 2) mean negative log-likelihood in nats a token, of prompt with chosen and prompt with rejected.

    The mean runs over all tokens that have one before them: prompt, response and EOS. It is the logarithm of
    the perplexity, and what transformers' models return as the loss of a text.
    """
    rows = separate_rows(batch)
    assert rows.real is not None
    row, column = rows.real[:, 1:].nonzero(as_tuple=True)
    rows = replace(rows, source=(row, column), targets=rows.input_ids[row, column + 1], owner=row)
    sums = policy.log_probs(batch, padded(rows, row_multiple(batch.input_ids.device)))
    counts = torch.bincount(row).view(2, -1)
    return torch.stack([-sums.chosen / counts[0], -sums.rejected / counts[1]], dim=1)
