"""What a trained policy prefers in each pair, under the prompt as it is and under its second wording."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from ..batch import LogProbs
from ..errors import UserError
from ..modules import PreferenceModule
from ..rewards import Rewards
from ..runs.finished_run import PreferenceData
from .pair_log_probs import pair_log_probs

Split = Literal["train", "validation"]


def judged_pairs(
    module: PreferenceModule,
    data: PreferenceData,
    split: Split,
    answers: Path,
    *,
    pairs: int | None,
    seed: int,
    micro_batch_size: int | None,
) -> pd.DataFrame:
    """u of the pairs that have a second view, under both; what is on disk is not computed again.

    Args:
        module: with the policy.
        data: the pairs, with labels as found.
        split: which of them.
        answers: file where values go as soon as they are there.
        pairs: how many, at random; None for all.
        seed: which, where ``pairs`` is given.
        micro_batch_size: pairs in one forward pass; None is the module's, or 32 where that has none.

    Returns:
        One row a pair: ``id``, ``prompt`` (its number among the distinct prompts), ``u`` and ``augmented_u``
        (in nats), ``clean`` (1: the response found as chosen is better; 0: the row's ``flipped`` says that
        the other one is), ``category``, and ``given_view`` (the row brings its second wording; otherwise it
        is the rule-based one). The frame's ``attrs`` say how many pairs had ``no_second_view``.

    Raises:
        UserError: no pair has a second view, ``pairs`` is out of range, or u is not finite.
    """
    data.setup("fit" if split == "train" else "validate")
    known = data.train_pairs if split == "train" else data.validation_pairs
    eligible = known.with_second_view
    if not eligible:
        raise UserError(
            f"None of the {len(known)} {split} pairs has a second view of its prompt; give the rows an "
            "augmented_prompt (no rule for rewording applied)."
        )
    indices = eligible
    if pairs is not None:
        if not 1 <= pairs <= len(eligible):
            raise UserError(
                f"pairs is {pairs}, but a sample of the {len(eligible)} {split} pairs with a second view "
                f"must have 1 to {len(eligible)}."
            )
        indices = sorted(np.random.default_rng(seed).choice(eligible, pairs, replace=False).tolist())
    found = pair_log_probs(
        module,
        known,
        indices,
        answers,
        name=f"{data.task}, {split}",
        augmented=True,
        micro_batch_size=micro_batch_size,
    )
    policy, reference = found.unbind(2)[:2], found.unbind(2)[2:]
    u = Rewards(LogProbs(*policy), LogProbs(*reference), module.objective.beta).u.double().numpy()
    rows = known.rows.select_columns(["id", "prompt", "category"]).select(indices).to_pandas()
    frame = pd.DataFrame(
        {
            "id": rows["id"],
            "prompt": pd.factorize(rows["prompt"])[0],
            "u": u[:, 0],
            "augmented_u": u[:, 1],
            "clean": [int(known.flipped[i] != 1) for i in indices],
            "category": rows["category"],
            "given_view": True,
        }
    )
    if split != "train" or not data.augmentations:
        found = data.source.load(split)
        views = zip(found["id"], found["augmented_prompt"], strict=True)
        frame["given_view"] = frame["id"].isin([name for name, view in views if view])
    frame.attrs["no_second_view"] = len(known) - len(eligible)
    return frame
