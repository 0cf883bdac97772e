"""What a trained policy prefers in each pair, under the prompt as it is and under its second wording."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

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
    frame = _frame(known, indices, u)
    if split == "train" and data.augmentations:
        frame["given_view"] = True
    else:
        rows = data.source.load(split)
        given = {name for name, view in zip(rows["id"], rows["augmented_prompt"], strict=True) if view}
        frame["given_view"] = [name in given for name in frame["id"]]
    frame.attrs["no_second_view"] = len(known) - len(eligible)
    return frame


def _frame(known: Any, indices: list[int], u: np.ndarray) -> pd.DataFrame:
    columns = {name: list(known.rows[name]) for name in ("id", "prompt", "category")}
    frame = pd.DataFrame({name: [column[i] for i in indices] for name, column in columns.items()})
    frame["prompt"] = pd.factorize(frame["prompt"])[0]
    first, second = u.T
    frame.insert(2, "u", first)
    frame.insert(3, "augmented_u", second)
    frame.insert(4, "clean", [int(known.flipped[i] != 1) for i in indices])
    return frame
