"""Train a reward model to judge with: a linear head on a pretrained model, from pairs with trusted labels.

    python examples/reward_model.py runs/examples/model --source AnthropicHH \\
      --source.subsets '[harmless-base]' --min_length 193 --max_length 512 --dtype bfloat16 \\
      --output runs/examples/judge
    pacmr judge A.jsonl B.jsonl --judge RewardModelJudge --judge.model runs/examples/judge

Take pairs that no policy is trained on: here those that configs/hh/small_preference.yaml drops as too long.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from jinja2 import TemplateError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, GroupKFold
from torch import nn
from tqdm import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    logging,
)

from pacmr_lightning.audit.linear_probe import FOLDS, VARIANCES, feature_scale, mirror_signs
from pacmr_lightning.command_line.output import print_result
from pacmr_lightning.command_line.parser import run_script
from pacmr_lightning.datamodules.chat import decode_messages
from pacmr_lightning.datamodules.reading import response_text
from pacmr_lightning.datamodules.sources import Source
from pacmr_lightning.datamodules.token_report import summary_line
from pacmr_lightning.datamodules.tokenization import tokenize_pairs
from pacmr_lightning.datamodules.tokenizer import load_tokenizer
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.reward_model import classified, judged_tokens
from pacmr_lightning.policy.numerics import AskedDtype, base_dtype


def reward_model(
    model: str,
    *,
    source: Source,
    output: str,
    min_length: int = 0,
    max_length: int = 1024,
    dtype: AskedDtype = "float32",
    batch_size: int = 8,
) -> None:
    """Learns a reward model from pairs with trusted labels, and says how often it agrees with unseen ones.

    Args:
        model: folder or Hub id of a causal language model.
        source: of the pairs, as in pacmr fit; all that it trains on.
        output: folder to write a sequence classifier to, in float32.
        min_length: tokens of prompt + longer response; shorter pairs are left out.
        max_length: longer pairs are left out.
        dtype: of the model while it reads the pairs.
        batch_size: texts at a time.
    """
    folder = Path(output)
    if folder.exists():
        raise UserError(f"{output} exists already; remove it, or name another folder.")
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}, but it must be at least 1.")
    rows = source.load_all()
    tokenizer = load_tokenizer(model)
    pairs, counts = tokenize_pairs(rows, tokenizer, max_length)
    print(summary_line(source.name, "read", counts))
    columns = (pairs[name][:] for name in ("id", "prompt_ids", "chosen_ids", "rejected_ids"))
    lengths = ((name, len(x) + max(len(y), len(z))) for name, x, y, z in zip(*columns, strict=True))
    kept = {name for name, length in lengths if length >= min_length}
    prompts, texts = _texts(rows, kept, tokenizer)
    if len(set(prompts)) < FOLDS:
        raise UserError(
            f"{len(set(prompts))} prompts have pairs of {min_length} to {max_length} tokens, but a reward "
            f"model is checked on {FOLDS} parts of them; widen the lengths."
        )
    net = _classifier(model, tokenizer, base_dtype(dtype))
    net.score = nn.Identity()  # its "logits" are then the head's inputs
    states = _states(net, texts, batch_size)
    head, accuracy = fit_head(states[0::2] - states[1::2], pd.factorize(np.array(prompts, dtype=object))[0])

    net = _classifier(model, tokenizer, torch.float32)  # again, since bfloat16 rounded the weights
    with torch.no_grad():
        net.score.weight.copy_(torch.from_numpy(head)[None])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        net.save_pretrained(Path(temporary) / "made")
        tokenizer.save_pretrained(Path(temporary) / "made")
        (Path(temporary) / "made").rename(folder)
    agrees = f"on prompts it has not seen it agrees with {accuracy:.1%} of the labels"
    print_result(f"{output}: learned from {len(prompts):,} pairs; {agrees}.")


def fit_head(differences: np.ndarray, prompts: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the linear Bradley-Terry reward, (D,) per unit of state, and its cross-validated accuracy.

    ``differences`` are (N, D) states, chosen minus rejected; ``prompts`` are (N,) groups of the folds.
    """
    scale, mirror = feature_scale(differences), mirror_signs(len(differences))
    search = GridSearchCV(
        LogisticRegression(fit_intercept=False, max_iter=1000),
        {"C": VARIANCES},
        scoring={"likelihood": _likelihood, "accuracy": "accuracy"},
        refit="likelihood",
        cv=GroupKFold(FOLDS, shuffle=True, random_state=0),
    )
    search.fit(differences / scale * mirror[:, None], mirror, groups=prompts)
    accuracy = search.cv_results_["mean_test_accuracy"][search.best_index_]
    return search.best_estimator_.coef_[0] / scale, float(accuracy)


def _likelihood(model: LogisticRegression, differences: np.ndarray, labels: np.ndarray) -> float:
    return -log_loss(labels, model.predict_proba(differences), labels=[-1, 1])


def _texts(
    rows: Dataset, wanted: set[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], list[list[int]]]:
    """Return N prompts, and token ids of 2 N texts, chosen and rejected in turn."""
    prompts, texts = [], []
    for row in rows:
        if row["id"] in wanted:
            prompt = decode_messages(row["prompt"]) if row["chat"] else row["prompt"]
            prompts.append(row["prompt"])
            sides = [response_text(row[side], row["chat"]) for side in ("chosen", "rejected")]
            try:
                texts += [judged_tokens(tokenizer, prompt, text) for text in sides]
            except TemplateError as error:
                raise UserError(
                    f"The chat template refuses pair {row['id']} ({error}); take it out, as the judge could "
                    "not read it either."
                ) from None
    return prompts, texts


def _classifier(model: str, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> PreTrainedModel:
    try:
        net = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=dtype)
    except (OSError, RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise UserError(
            f"{model} cannot be loaded as a sequence classifier ({why}); name another model."
        ) from None
    if not isinstance(getattr(net, "score", None), nn.Linear):
        raise UserError(f"{type(net).__name__} has no linear head named score; take a decoder such as Llama.")
    net.config.pad_token_id = tokenizer.pad_token_id
    return net.to("cuda" if torch.cuda.is_available() else "cpu").eval()


@torch.inference_mode()
def _states(net: PreTrainedModel, texts: list[list[int]], batch_size: int) -> np.ndarray:
    states = np.zeros((len(texts), net.config.hidden_size), dtype=np.float32)
    longest_first = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
    for start in tqdm(range(0, len(texts), batch_size), desc="Reading", unit="batch"):
        rows = longest_first[start : start + batch_size]
        found = classified(net, [texts[row] for row in rows], net.config.pad_token_id)
        states[rows] = found.float().cpu().numpy()
    return states


if __name__ == "__main__":
    logging.set_verbosity_error()  # the head is missing, as it should be
    run_script(reward_model)
