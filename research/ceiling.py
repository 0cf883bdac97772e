"""Highest reward of any policy at each KL to the reference in the synthetic benchmark, by enumeration.

    python -m research.ceiling runs/quickstart/sft/model --output ceiling.csv

Of all policies with KL(pi || pi_ref) = k, the one with the highest mean reward is proportional to
pi_ref exp(r / b) for some b (equation 4 of the DPO paper, arXiv 2305.18290). There r depends on a
response's first four words only, so responses fall into 69,905 kinds: up to four of 16 attributes, in order.
That policy leaves the choice within a kind to the reference. So its KL and reward are sums over kinds, whose
probabilities a reference of few layers gives in seconds.
"""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.special import logsumexp
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from pacmr_lightning.datamodules.tokenizer import load_tokenizer
from pacmr_lightning.embedded_world import ATTRIBUTES, RESPONSE_WORDS, World
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import check_writable, write_frame
from pacmr_lightning.policy.base_model import load_base

from . import command

TEMPERATURES = tuple(np.geomspace(0.05, 200, 120).tolist())
"""b, in units of the reward."""
BEST_OF = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


NONE = -1
"""In place of an attribute where a response has ended."""


def reward_ceiling(model: str, *, output: str, world_seed: int = 0) -> pd.DataFrame:
    """Enumerate a reference's responses in the synthetic benchmark, and compute the best policies at each KL.

    Args:
        model: folder of the reference, such as runs/quickstart/sft/model.
        output: .csv file to write, with ``curve`` ("optimal" or "best of n"), ``parameter`` (b or n), ``kl``
            in nats per response, and ``reward``, means over the benchmark's prompts.
        world_seed: seed of the benchmark that the reference was trained in.

    Returns:
        The rows of the file.

    Raises:
        UserError: the model cannot be loaded, or the file has another ending.
    """
    if Path(output).suffix != ".csv":
        raise UserError(f"output is {output}, but its name must end in .csv.")
    check_writable("output", output, Path(output).parent)
    if not (Path(model) / "config.json").is_file():
        raise UserError(f"There is no model in {model}; train one with configs/quickstart/sft.yaml.")
    network = load_base(model, torch.float32).eval()
    tokenizer = load_tokenizer(model)
    world = World(world_seed)
    log_probs, rewards = [], []
    for prompt in tqdm(world.prompts(), desc="Responses", unit="prompt"):
        kinds, values = kinds_of_responses(network, tokenizer, prompt)
        log_probs.append(values)
        rewards.append(gold_rewards(world, prompt, kinds))
    both = np.stack(log_probs), np.stack(rewards)
    optimal = ceiling(*both).rename(columns={"b": "parameter"}).assign(curve="optimal")
    best = best_of_n(*both).rename(columns={"n": "parameter"}).assign(curve="best of n")
    table = pd.concat([optimal, best])[["curve", "parameter", "kl", "reward"]]
    write_frame(output, table)
    reference = best.loc[best["parameter"] == 1, "reward"].item()
    print(
        f"{output}: the reference has {reference:.2f}, and no policy more than "
        f"{np.interp(1.0, optimal['kl'][::-1], optimal['reward'][::-1]):.2f} at a KL of 1 nat per response."
    )
    return table


@torch.no_grad()
def kinds_of_responses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the kinds of responses to a prompt, and their log-probabilities.

    Args:
        model: in eval mode.
        tokenizer: the model's, in which each attribute is one token.
        prompt: of the benchmark.

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
            "An attribute of the benchmark is several tokens of this model; train one as "
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


main = command("ceiling", reward_ceiling)

if __name__ == "__main__":
    main()
