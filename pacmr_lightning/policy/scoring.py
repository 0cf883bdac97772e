"""Log-probabilities of responses from one forward pass over rows, and what held-out pairs are judged by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch import LogProbs, PairBatch
from ..ranks import max_over_ranks
from .adapted_model import AdaptedModel
from .attention import AskedLayout
from .logprobs import token_values, upcast
from .masks import attention_inputs
from .rows import Layout, Rows, rows_of


class Judged(NamedTuple):
    """What policy and reference say of N pairs' responses, in nats."""

    policy: LogProbs
    reference: LogProbs
    token_kl: Tensor
    """(N,) KL(pi || pi_ref) of the next token, averaged over the positions of both responses."""
    chosen_kl: Tensor
    """(N,) the same KL, summed over the positions of the chosen response."""


class ScoringModel(AdaptedModel):
    """An adapted model that scores responses, in whatever layout it is told."""

    layout: AskedLayout
    """What is asked for."""
    logit_chunk: int
    """Rows of logits (response tokens) that exist at a time."""

    def log_probs_in(self, layout: Layout, batch: PairBatch) -> LogProbs:
        """Summed response log-probabilities of N pairs in a given layout, with the attention in use now."""
        return self.score(rows_of(layout, batch), layout == "plain")

    def score(self, rows: Rows, whole_logits: bool, entropies: bool = False) -> LogProbs:
        """Summed response log-probabilities of N pairs as the adapter is, on or off: (N,) values in nats.

        Args:
            rows: of the pairs.
            whole_logits: take the model's own logits, which it may transform, and not its head's.
            entropies: of the next token too.
        """
        states, head = self._predictions(rows, whole_logits)
        frozen = not any(p.requires_grad for p in self.model.get_output_embeddings().parameters())
        frozen = frozen and not whole_logits
        tokens = token_values(states, head, rows.targets, self._pieces(rows), frozen, entropies)
        found = rows.log_probs(tokens.log_probs)
        if tokens.entropies is not None:
            found.entropies = rows.log_probs(tokens.entropies)
        return found

    @torch.no_grad()
    def score_both(self, rows: Rows, whole_logits: bool, reference: LogProbs | None) -> Judged:
        """Log-probabilities under policy and reference, and their KL, from one forward pass of each.

        Args:
            rows: of N pairs.
            whole_logits: see ``score``.
            reference: its log-probabilities, if they are known.
        """
        states, head = self._predictions(rows, whole_logits)
        with self.reference():
            states_reference, _ = self._predictions(rows, whole_logits)
        parts = []
        pieces = self._pieces(rows)
        for h, h_reference, target in zip(
            *(x.tensor_split(pieces) for x in (states, states_reference, rows.targets)), strict=True
        ):
            log_p = upcast(head(h)).log_softmax(1)
            with self.reference():
                log_q = upcast(head(h_reference)).log_softmax(1)
            chosen = (log.gather(1, target[:, None])[:, 0] for log in (log_p, log_q))
            parts.append(torch.stack([*chosen, (log_p.exp() * (log_p - log_q)).sum(1)]))
        tokens_p, tokens_q, tokens_kl = torch.cat(parts, dim=1)
        pair = rows.owner % rows.pairs
        sums = tokens_kl.new_zeros(rows.pairs).index_add(0, pair, tokens_kl)
        kl = sums / torch.bincount(pair, minlength=rows.pairs)
        return Judged(
            rows.log_probs(tokens_p),
            reference or rows.log_probs(tokens_q),
            kl,
            rows.log_probs(tokens_kl).chosen,
        )

    @torch.no_grad()
    def response_states(self, rows: Rows) -> Tensor:
        """What the model's layers hold of N pairs' responses, as the adapter is: (N, 2, 2H) in fp32.

        For chosen and rejected: the mean of the middle layer's states over the tokens that predict the
        response, in which words' meanings stand, and the last layer's state at the last of them, which has
        seen the whole response.
        """
        found = self.model.base_model(**self._inputs(rows), output_hidden_states=True)
        middle = found.hidden_states[len(found.hidden_states) // 2][rows.source].float()
        count = 2 * rows.pairs
        sums = middle.new_zeros(count, middle.shape[1]).index_add(0, rows.owner, middle)
        means = sums / torch.bincount(rows.owner, minlength=count)[:, None]
        places = torch.arange(len(rows.owner), device=middle.device)
        ends = torch.zeros_like(places[:count]).scatter_reduce(0, rows.owner, places, "amax")
        last = found.last_hidden_state[rows.source][ends].float()
        return torch.cat([means, last], dim=1).view(2, rows.pairs, -1).transpose(0, 1)

    def _pieces(self, rows: Rows) -> int:
        """How often the head is asked; as often on every rank where it is gathered each time."""
        pieces = -(-len(rows.targets) // self.logit_chunk)
        return max_over_ranks(pieces, rows.targets.device) if self.is_sharded else pieces

    def _predictions(self, rows: Rows, whole_logits: bool) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """(K, H) states that predict the response tokens, and what makes logits of them."""
        inputs = self._inputs(rows)
        if whole_logits:
            return self.model(**inputs).logits[rows.source], nn.Identity()
        states = self.model.base_model(**inputs).last_hidden_state[rows.source]
        return states, self.model.get_output_embeddings()

    def _inputs(self, rows: Rows) -> dict[str, Any]:
        inputs = attention_inputs(rows, self.model.config, self.model.dtype)
        if rows.position_ids is not None:
            inputs["position_ids"] = rows.position_ids
        return inputs | {"input_ids": rows.input_ids, "use_cache": False}
