"""AUROC of a linear probe of a base model for injected label noise, by noise rate and number of pairs.

    python -m research.probe path/to/model --source AnthropicHH --source.path hh-rlhf \
      --source.subsets '[harmless-base]'
    python -m research.probe path/to/model --source TLDR --source.path tldr --lengths_by other/model \
      --max_length 300 --per_prompt 3 --most 400 --numbers '[300]' --output rows.csv

Original labels count as right; some are swapped at random, and all are ranked by the scores of
``pacmr audit --scorer probe``. Repetitions draw other noise and, where not all pairs are taken, other pairs.
The model runs once. Several models see the same pairs where ``lengths_by`` names one of them.
"""

import numpy as np
import pandas as pd
from rich.console import Console
from sklearn.metrics import average_precision_score, roc_auc_score
from tqdm import tqdm

from pacmr_lightning.audit.linear_probe import probe_log_odds
from pacmr_lightning.datamodules.sources import Source
from pacmr_lightning.datamodules.token_report import summary_line
from pacmr_lightning.datamodules.tokenization import tokenize_pairs
from pacmr_lightning.datamodules.tokenized_pairs import TokenizedPairs
from pacmr_lightning.datamodules.tokenizer import load_tokenizer
from pacmr_lightning.files import write_frame
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.numerics import AskedDtype

from . import command

LONGEST = 2048
"""Tokens of a pair where the lengths are of another tokenizer."""
MEASURES = ("auroc", "average_precision", "precision_in_first_100", "accuracy")


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
    lengths_by: str | None = None,
    per_prompt: int | None = None,
    most: int | None = None,
    output: str | None = None,
) -> None:
    """Measure, and print a table.

    Args:
        model: folder or Hub id of the base model.
        source: of the pairs.
        max_length: tokens of prompt + longer response; longer pairs are left out.
        min_length: pairs of fewer tokens are left out, too.
        dtype: of the model.
        numbers: of pairs, beside all of them.
        shares: noise rates.
        repetitions: draws of noise and pairs.
        lengths_by: model whose tokenizer the lengths are of; by default ``model``.
        per_prompt: pairs of one prompt at most; all by default.
        most: pairs that are drawn before anything else; all by default.
        output: CSV with a row per repetition.
    """
    tokenizer = load_tokenizer(lengths_by or model)
    read = source.load_all()
    tokens, counts = tokenize_pairs(read, tokenizer, max_length)
    print(summary_line(source.name, "measured", counts))
    if min_length:
        columns = (tokens[f"{part}_ids"][:] for part in ("prompt", "chosen", "rejected"))
        lengths = (len(x) + max(len(y), len(z)) for x, y, z in zip(*columns, strict=True))
        tokens = tokens.select([i for i, length in enumerate(lengths) if length >= min_length])
        print(f"{len(tokens):,} of them have {min_length} tokens or more.")
    order = pd.Series(tokens["prompt"][:]).sample(frac=1, random_state=0)
    if per_prompt is not None:
        order = order.groupby(order).head(per_prompt)
    places = order.index[:most].tolist()
    if lengths_by is not None:
        ids, tokenizer = tokens.select(places)["id"][:], load_tokenizer(model)
        tokens, _ = tokenize_pairs(read, tokenizer, LONGEST)
        place = {name: i for i, name in enumerate(tokens["id"][:])}
        places = [place[name] for name in ids]
    tokens = tokens.select(places)
    policy = PolicyModel(model, rank=1, dtype=dtype)
    policy.build()
    differences = TokenizedPairs(tokens, tokenizer.pad_token_id).state_differences(policy)
    prompts = pd.factorize(np.array(tokens["prompt"][:], dtype=object))[0]
    rows = []
    asked = [(share, n) for share in shares for n in (*(n for n in numbers if n < len(tokens)), len(tokens))]
    for share, n in tqdm(asked, desc="Shares and numbers of pairs"):
        rows += [measured(differences, prompts, share, n, seed) for seed in range(repetitions)]
    table = pd.DataFrame(rows)
    if output is not None:
        write_frame(output, table)
    means = table.groupby(["flips", "pairs"])[list(MEASURES)].agg(["mean", "std"])
    Console().print(means.round(3).to_string(), highlight=False)


def measured(
    differences: np.ndarray, prompts: np.ndarray, share: float, number: int, seed: int
) -> dict[str, float]:
    """Return ``MEASURES`` of some of the pairs under injected noise."""
    rng = np.random.default_rng(seed)
    some = rng.permutation(len(differences))[:number]
    flipped = rng.random(number) < share
    signs = np.where(flipped, -1, 1)
    names = pd.factorize(prompts[some])[0]
    score = probe_log_odds(differences[some] * signs[:, None], names)
    return {
        "flips": share,
        "pairs": number,
        "seed": seed,
        "auroc": roc_auc_score(flipped, -score),
        "average_precision": average_precision_score(flipped, -score),
        "precision_in_first_100": flipped[np.argsort(score)[:100]].mean(),
        "accuracy": (score * signs > 0).mean(),
        "agreement": (score > 0).mean(),
        "injected": flipped.mean(),
    }


main = command("probe", probe)

if __name__ == "__main__":
    main()
