"""Agreement of a policy's preferences under original and augmented prompts (appendix of Qu et al.)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd
from scipy.special import expit, logit

from ..errors import UserError, check_within
from ..modules import PreferenceModule
from ..policy.numerics import clustered_standard_error
from ..runs.finished_run import PreferenceData, ready
from .last_pass import log_probs


def judged_pairs(
    module: PreferenceModule,
    data: PreferenceData,
    split: Literal["train", "validation"],
    pairs: int | None,
    seed: int,
) -> pd.DataFrame:
    """Compute u of pairs (``pairs``: a random number) under both prompts; log-probabilities are cached.

    Returns one row per pair: ``id``, ``prompt`` (index among distinct prompts), ``u`` and ``augmented_u``
    (nats), ``clean`` (0 if ``flipped``, NaN for a tie, else 1), ``category``, ``given_view`` (false if rules
    made the augmented prompt). ``attrs["no_augmented_prompt"]`` counts pairs without one.
    """
    data.setup("fit" if split == "train" else "validate")
    known = data.train_pairs if split == "train" else data.validation_pairs
    eligible = known.with_augmented_prompt
    if not eligible:
        raise UserError(
            f"None of the {len(known)} {split} pairs has an augmented prompt; give the rows an "
            "augmented_prompt (no rewriting rule applied)."
        )
    indices = eligible
    if pairs is not None:
        if not 1 <= pairs <= len(eligible):
            raise UserError(
                f"pairs is {pairs}, but a sample of the {len(eligible)} {split} pairs with an "
                f"augmented prompt must have 1 to {len(eligible)}."
            )
        indices = sorted(np.random.default_rng(seed).choice(eligible, pairs, replace=False).tolist())
    policy, chosen, u = ready(module), known.select(indices), []
    for augmented, prompts in ((False, "prompts"), (True, "augmented prompts")):
        title = f"{data.task}, {split}, {prompts}"
        ours = chosen.values(log_probs, policy, title, augmented=augmented, of_adapter=True)
        base = chosen.reference_log_probs(policy, f"{title}, reference", augmented=augmented)
        u.append(module.objective.beta * np.subtract(*(ours - base).astype(float).T))
    rows = chosen.rows.select_columns(["id", "prompt", "category", "by_rules"]).to_pandas()
    frame = pd.DataFrame(
        {
            "id": rows["id"],
            "prompt": pd.factorize(rows["prompt"])[0],
            "u": u[0],
            "augmented_u": u[1],
            "clean": np.where(chosen.ties, np.nan, np.not_equal(chosen.flipped, 1)),
            "category": rows["category"],
            "given_view": ~rows["by_rules"],
        }
    )
    frame.attrs["no_augmented_prompt"] = len(known) - len(eligible)
    return frame


def consistency_by_threshold(pairs: pd.DataFrame, taus: Sequence[float]) -> pd.DataFrame:
    """Compute the appendix's measures for N pairs of ``judged_pairs``; u = 0 counts half for either response.

    Returns one row per threshold: ``tau``, ``pairs`` (N), ``prompts`` (distinct), ``l1`` (mean distance of
    the binary preference distributions), ``retained`` (count), ``coverage``, ``clean_accuracy`` and
    ``direction_agreement`` (shares; NaN if none retained), and standard errors ``..._stderr``, clustered by
    prompt.
    """
    u, augmented_u, clean, prompts = (
        pairs[name].to_numpy() for name in ("u", "augmented_u", "clean", "prompt")
    )
    first = np.heaviside(u, 0.5)
    right, better = np.where(clean == 1, first, 1 - first), ~np.isnan(clean)
    same = ((u > 0) == (augmented_u > 0)) / 2 + ((u >= 0) == (augmented_u >= 0)) / 2
    l1 = 2 * np.abs(expit(u) - expit(augmented_u))
    rows = []
    for tau, kept in zip(taus, passes(u, taus).T, strict=True):
        row = {"tau": tau, "pairs": len(u), "prompts": len(np.unique(prompts)), **_mean("l1", l1, prompts)}
        row |= {"retained": kept.sum(), **_mean("coverage", kept.astype(float), prompts)}
        row |= _mean("clean_accuracy", right[kept & better], prompts[kept & better])
        rows.append(row | _mean("direction_agreement", same[kept], prompts[kept]))
    return pd.DataFrame(rows)


def _mean(name: str, values: np.ndarray, prompts: np.ndarray) -> dict[str, float]:
    mean = values.mean() if len(values) else np.nan
    return {name: mean, f"{name}_stderr": clustered_standard_error(values, prompts)}


def passes(u: np.ndarray, taus: Sequence[float]) -> np.ndarray:
    """Return (N, T) whether sigma(u) >= tau or <= 1 - tau (ties count, unlike in Qu et al.)."""
    # Compare u with logit(tau), since sigma(u) rounds to 1 for large u.
    return np.abs(u)[:, None] >= logit(np.asarray(taus))


def check_taus(taus: Sequence[float]) -> None:
    """Raise UserError unless there are thresholds, all in [0.5, 1)."""
    if not taus:
        raise UserError("taus is empty, but at least one confidence threshold is needed, such as 0.6.")
    for tau in taus:
        check_within("[0.5, 1)", " (Qu et al. use 0.6)", **{"one of taus": tau})
