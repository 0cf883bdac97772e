"""Influence functions with clean pairs, and CHES, as scorers of labels that people made.

    python -m research.label_influence votes.jsonl --model path/to/model

The influence of a label (arXiv 2501.05790, here exact and on a linear probe) is what a Newton step without it
would change in the loss of the clean pairs; its first-order form leaves out the Hessian, as VNet's
coefficients do. CHES (arXiv 2410.08847) is <a, b> - <a, a>, a and b the summed last states of chosen and
rejected response.
"""

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from pacmr_lightning.audit.linear_probe import mirror_signs

from . import command
from .votes import SIDES, state_differences

DRAWS = 5
"""Halves of the debates, and clean pairs from the other half."""


def label_influence(
    file: str,
    *,
    model: str,
    variance: float = 1e-4,
    clean: tuple[int, ...] = (50, 200, 1000),
    folder: str = "runs/votes",
) -> None:
    """Print AUROCs for labels that most other votes contradict.

    Args:
        file: pairs with votes, as for ``research.votes``.
        model: folder of the base model.
        variance: prior variance of the probe's weights; influence ranks worse with larger ones.
        clean: numbers of pairs whose majority is known.
        folder: keeps states of models, as for ``research.votes``.
    """
    pairs = pd.read_json(file, lines=True, dtype=False)
    decided = pairs["flipped"].notna().to_numpy()
    wrong = pairs["flipped"].eq(True).to_numpy()
    chosen, rejected, tokens = (np.stack(part) for part in zip(*last_states(model, pairs), strict=True))
    print_table = Console(width=160).print
    rows = {}
    for name, factor in (("CHES", tokens), ("CHES, length-normalised", np.ones_like(tokens))):
        a, b = chosen * factor[:, :1], rejected * factor[:, 1:]
        rows[name] = ((a * b).sum(1) - (a * a).sum(1))[decided]
    lengths = pairs[["chosen", "rejected"]].map(len)[decided]
    rows["the shorter response"] = (lengths["rejected"] - lengths["chosen"]).to_numpy()
    similar = (lengths.max(axis=1) < 1.25 * lengths.min(axis=1)).to_numpy()
    for name, score in rows.items():
        all_pairs = roc_auc_score(wrong[decided], score)
        print_table(f"{name}: {all_pairs:.3f}, at similar length "
                    f"{roc_auc_score(wrong[decided][similar], score[similar]):.3f}")  # fmt: skip
    x = state_differences(model, pairs, folder).astype(float)
    x /= np.sqrt((x**2).mean(0))
    debates = pd.factorize(pairs["prompt"].str.extract(r"Debate: (.*)")[0])[0]
    found = [
        {"clean pairs": number, **scores(x, wrong, decided, debates, number, variance, seed)}
        for number in clean
        for seed in range(DRAWS)
    ]
    table = pd.DataFrame(found).groupby("clean pairs")
    print_table(table.agg(["mean", "std"]).round(3).T.to_string(), highlight=False)


def last_states(model: str, pairs: pd.DataFrame) -> list[tuple[np.ndarray, np.ndarray, tuple[int, int]]]:
    """Return of each pair (H,) means of the last states of both responses, and their tokens."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    network.eval()
    found = {}
    keys = [list(zip(pairs["prompt"], pairs[side], strict=True)) for side in SIDES]
    for prompt, text in tqdm(dict.fromkeys(keys[0] + keys[1]), desc="States"):
        start = tokenizer(prompt).input_ids
        end = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            last = network.base_model(torch.tensor([start + end])).last_hidden_state[0]
        found[prompt, text] = last[len(start) - 1 : -1].mean(0).numpy(), len(end)
    both = ((found[a], found[b]) for a, b in zip(*keys, strict=True))
    return [(a, b, (n, m)) for (a, n), (b, m) in both]


def fit(x: np.ndarray, variance: float) -> np.ndarray:
    """Return (H,) weights of a probe to which each row of ``x`` is chosen minus rejected."""
    model, mirror = LogisticRegression(fit_intercept=False, C=variance, max_iter=2000), mirror_signs(len(x))
    return model.fit(x * mirror[:, None], mirror).coef_[0]


def scores(
    x: np.ndarray,
    wrong: np.ndarray,
    decided: np.ndarray,
    debates: np.ndarray,
    number: int,
    variance: float,
    seed: int,
) -> dict[str, float]:
    """Return AUROCs on half of the debates, with clean pairs of the other half."""
    rng = np.random.default_rng(seed)
    other = np.isin(debates, rng.permutation(debates.max() + 1)[: (debates.max() + 1) // 2])
    picked = rng.choice(np.flatnonzero(other & decided), number, replace=False)
    clean = x[picked] * np.where(wrong[picked], -1, 1)[:, None]
    own, checked = x[~other], x[~other & decided]
    theta = fit(own, variance)
    doubt = expit(-own @ theta)
    towards = (expit(-clean @ theta)[:, None] * clean).mean(0)  # minus the gradient of the clean loss
    hessian = (own * (doubt * (1 - doubt))[:, None]).T @ own + np.eye(x.shape[1]) / variance
    pull = expit(-checked @ theta)[:, None] * checked
    ranked = {
        "influence": pull @ np.linalg.solve(hessian, towards),
        "influence, first order": pull @ towards,
        "probe on the clean pairs alone": checked @ fit(clean, variance),
        "probe on votes of the other half": checked @ fit(x[other], variance),
    }
    return {name: roc_auc_score(wrong[~other & decided], -score) for name, score in ranked.items()}


main = command("label_influence", label_influence)

if __name__ == "__main__":
    main()
