"""AUROC of a linear probe of a base model for injected label noise, by noise rate and number of pairs.

    python -m research.probe path/to/model --source AnthropicHH --source.path hh-rlhf \
      --source.subsets '[harmless-base]' --figure probe.png

Original labels count as right; some are swapped at random, and all are ranked by the scores of
``pacmr audit --scorer probe``. Repetitions draw other noise and, where not all pairs are taken, other pairs.
The model runs once.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from rich.console import Console
from sklearn.metrics import average_precision_score, roc_auc_score
from tqdm import tqdm

from pacmr_lightning.audit.linear_probe import probe_log_odds
from pacmr_lightning.datamodules.sources import Source
from pacmr_lightning.datamodules.tokenization import of_min_length, summary_line, tokenize_pairs
from pacmr_lightning.datamodules.tokenized_pairs import TokenizedPairs
from pacmr_lightning.datamodules.tokenizer import load_tokenizer
from pacmr_lightning.files import replacing
from pacmr_lightning.numerics import AskedDtype
from pacmr_lightning.policy import PolicyModel

from . import run_command


def probe(
    model: str,
    *,
    source: Source,
    max_length: int = 192,
    min_length: int = 0,
    dtype: AskedDtype = "float32",
    numbers: tuple[int, ...] = (150, 300, 600),
    shares: tuple[float, ...] = (0.2, 0.3, 0.4),
    repetitions: int = 10,
    figure: str | None = None,
) -> None:
    """Measure, print a table and draw a figure.

    Args:
        model: folder or Hub id of the base model.
        source: of the pairs.
        max_length: tokens of prompt + longer response; longer pairs are left out.
        min_length: pairs of fewer tokens are left out, too.
        dtype: of the model.
        numbers: of pairs, beside all of them.
        shares: noise rates.
        repetitions: draws of noise and pairs.
        figure: PNG to draw to.
    """
    tokenizer = load_tokenizer(model)
    rows = source.load_all()
    tokens, counts = tokenize_pairs(rows, tokenizer, max_length)
    print(summary_line(source.name, "measured", counts))
    if min_length:
        tokens = of_min_length(tokens, min_length)
        print(f"{len(tokens):,} of them have {min_length} tokens or more.")
    policy = PolicyModel(model, rank=1, dtype=dtype)
    policy.build()
    differences = TokenizedPairs(tokens, tokenizer.pad_token_id).state_differences(policy)
    prompts = pd.factorize(np.array(tokens["prompt"][:], dtype=object))[0]
    rows = []
    asked = [(share, n) for share in shares for n in (*(n for n in numbers if n < len(tokens)), len(tokens))]
    for share, n in tqdm(asked, desc="Shares and numbers of pairs"):
        for seed in range(repetitions):
            rng = np.random.default_rng(seed)
            some = rng.permutation(len(tokens))[:n]
            flipped = rng.random(n) < share
            signs = np.where(flipped, -1, 1)
            score = probe_log_odds(differences[some] * signs[:, None], prompts[some])
            right = (score * signs > 0).mean()
            first = flipped[np.argsort(score)[:100]].mean()
            ranks = roc_auc_score(flipped, -score), average_precision_score(flipped, -score)
            rows.append((share, n, *ranks, first, right))
    columns = ["flips", "pairs", "auroc", "average_precision", "precision_in_first_100", "accuracy"]
    table = pd.DataFrame(rows, columns=columns)
    means = table.groupby(["flips", "pairs"]).agg(["mean", "std"])
    Console().print(means.round(3).to_string(), highlight=False)
    if figure is not None:
        _draw(means["auroc"], figure)


def _draw(auroc: pd.DataFrame, path: str) -> None:
    drawing, axis = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    colors = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
    for i, (color, (share, part)) in enumerate(zip(colors, auroc.groupby("flips"), strict=False)):
        numbers = part.index.get_level_values("pairs")
        style = {"marker": "o", "color": color, "capsize": 3, "label": f"{share:.0%} noise"}
        axis.errorbar(numbers * 1.04 ** (i - 1), part["mean"], part["std"], **style)  # side by side
    axis.axhline(0.5, color="0.6", linewidth=1, linestyle=":")
    axis.set(xlabel="pairs", ylabel="AUROC for injected label noise", xscale="log")
    axis.set_xticks(numbers, [f"{n:,}" for n in numbers])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    with replacing(path) as temporary:
        drawing.savefig(temporary, dpi=160, format="png")


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m research.probe MODEL`` and the options of ``probe``."""
    run_command("probe", probe, arguments)


if __name__ == "__main__":
    main()
