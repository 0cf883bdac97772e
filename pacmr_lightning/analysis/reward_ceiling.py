"""The best that any policy can do in the embedded world at each KL from its reference, by enumeration.

Of all policies with KL(pi || pi_ref) = k, the one with the highest mean reward is proportional to
pi_ref exp(r / b) for some b (equation 4 of the DPO paper, arXiv 2305.18290). In the world r looks at a
response's first four words only, so responses fall into 69,905 kinds: up to four of 16 attributes, in order.
That policy leaves the choice within a kind to the reference. So its KL and reward are sums over kinds, whose
probabilities a reference of few layers gives in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

import numpy as np
import pandas as pd
import torch
from scipy.special import logsumexp
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..embedded_world import ATTRIBUTES, RESPONSE_WORDS, World
from ..errors import UserError

TEMPERATURES = tuple(np.geomspace(0.05, 200, 120).tolist())
"""b, in units of the reward."""
BEST_OF = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


NONE = -1
"""In place of an attribute where a response has ended."""


@torch.no_grad()
def kinds_of_responses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str
) -> tuple[np.ndarray, np.ndarray]:
    """The kinds of responses to a prompt, and how probable they are.

    Args:
        model: in eval mode.
        tokenizer: the model's, in which each attribute is one token.
        prompt: of the world.

    Returns:
        (K, 4) numbers of the attributes in order, ``NONE`` after the end, and (K,) log-probabilities in nats.
        Their probabilities sum to 1 less that of a token among the first four that is neither an attribute
        nor the end.

    Raises:
        UserError: an attribute is several tokens.
    """
    words = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in ATTRIBUTES]
    if any(len(tokens) != 1 for tokens in words):
        raise UserError(
            "An attribute of the world is several tokens of this model; train one as "
            "configs/quickstart/sft.yaml does."
        )
    tokens = torch.tensor(words)[:, 0]
    cache = DynamicCache(config=model.config)
    # The first is the name from transformers 5.24 on.
    cached = {"cache" if "cache" in signature(model.forward).parameters else "past_key_values": cache}
    found = model(**tokenizer([prompt], return_tensors="pt"), **cached)
    kind, total = torch.full((1, RESPONSE_WORDS), NONE), torch.zeros(1, dtype=torch.double)
    kinds, log_probs = [], []
    for place in range(RESPONSE_WORDS):
        following = found.logits[:, -1].double().log_softmax(-1)
        kinds.append(kind)
        log_probs.append(total + following[:, tokenizer.eos_token_id])
        row = torch.arange(len(kind)).repeat_interleave(len(ATTRIBUTES))
        word = torch.arange(len(ATTRIBUTES)).repeat(len(kind))
        total = total[row] + following[row, tokens[word]]
        kind = kind[row]
        kind[:, place] = word
        if place < RESPONSE_WORDS - 1:
            cache.batch_select_indices(row)
            found = model(input_ids=tokens[word][:, None], **cached)
    kinds.append(kind)
    log_probs.append(total)
    return torch.cat(kinds).numpy(), torch.cat(log_probs).numpy()


def gold_rewards(world: World, prompt: str, kinds: np.ndarray) -> np.ndarray:
    """(K,) gold rewards of kinds of responses; a word that stood there before counts nothing."""
    by_word = np.array([*(world.gold_reward(prompt, f" {word}") for word in ATTRIBUTES), 0.0])
    rewards = np.zeros(len(kinds))
    for place, word in enumerate(kinds.T):
        again = (kinds[:, :place] == word[:, None]).any(1)
        rewards += np.where(again, 0.0, by_word[word])
    return rewards


def ceiling(
    log_probs: np.ndarray, rewards: np.ndarray, temperatures: Sequence[float] = TEMPERATURES
) -> pd.DataFrame:
    """KL and mean reward of pi_ref exp(r / b), averaged over prompts.

    Args:
        log_probs: (P, K) of the reference; they are made to sum to 1.
        rewards: (P, K).
        temperatures: b of each row.

    Returns:
        ``b``, ``kl`` (nats), ``reward``.
    """
    reference = log_probs - logsumexp(log_probs, axis=1, keepdims=True)
    rows = []
    for b in temperatures:
        tilted = reference + rewards / b
        tilted -= logsumexp(tilted, axis=1, keepdims=True)
        p = np.exp(tilted)
        rows.append((b, (p * (tilted - reference)).sum(1).mean(), (p * rewards).sum(1).mean()))
    return pd.DataFrame(rows, columns=["b", "kl", "reward"])


def best_of_n(log_probs: np.ndarray, rewards: np.ndarray, numbers: Sequence[int] = BEST_OF) -> pd.DataFrame:
    """KL and mean reward of the best of n samples of the reference, exactly, averaged over prompts.

    Of samples with equal rewards the first counts.

    Returns:
        ``n``, ``kl`` (nats), ``reward``; the arguments are those of ``ceiling``.
    """
    reference = np.exp(log_probs - logsumexp(log_probs, axis=1, keepdims=True))
    rows = []
    for n in numbers:
        kl, reward = [], []
        for p, r in zip(reference, rewards, strict=True):
            levels, level = np.unique(r, return_inverse=True)
            mass = np.bincount(level, p)
            below = np.concatenate([[0.0], np.cumsum(mass).clip(max=1)])
            best = np.diff(below**n)
            # Within a level the best is distributed as the reference is.
            kept = best > 0
            kl.append(float((best[kept] * np.log(best[kept] / mass[kept])).sum()))
            reward.append(float((best * levels).sum()))
        rows.append((n, np.mean(kl), np.mean(reward)))
    return pd.DataFrame(rows, columns=["n", "kl", "reward"])
