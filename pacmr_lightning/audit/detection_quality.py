"""How well each score finds the labels that are known to be wrong, beside confident learning's choice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import expit
from sklearn.metrics import average_precision_score, roc_auc_score


@dataclass(frozen=True)
class Method:
    """One way to find wrong labels, with what it found among N pairs."""

    name: str
    suspicion: np.ndarray
    """(N,) higher where the label is more suspect."""
    suspects: np.ndarray
    """(N,) whether the label is taken for wrong."""
    expected: float = np.nan
    """Its own expected share of wrong labels; NaN where it has none."""
    stderr: float = np.nan


def same_number(name: str, suspicion: np.ndarray, number: int) -> Method:
    """A score without a threshold of its own, which suspects a given number of labels."""
    suspects = np.zeros(len(suspicion), dtype=bool)
    suspects[np.argsort(-suspicion, kind="stable")[:number]] = True
    return Method(name, suspicion, suspects)


def confident_learning(name: str, u: np.ndarray, ids: Sequence[str]) -> Method | None:
    """The choice of cleanlab's confident learning on sigmoid(u); None where cleanlab is not installed.

    It compares two classes, but the labelled response always stands first. So each pair is turned round or
    not by a hash of its id, which knows nothing of labels: the classes are "the first is better" and "the
    second is better", and both are there in equal numbers.

    Args:
        name: what tables call it.
        u: (N,) implicit reward differences in the order of the labels.
        ids: N ids.
    """
    try:
        from cleanlab.count import estimate_joint
        from cleanlab.filter import find_label_issues
    except ImportError:
        return None
    turned = np.array([hashlib.blake2b(pair.encode(), digest_size=1).digest()[0] % 2 for pair in ids])
    if turned.min() == turned.max():
        return None
    first = expit(np.where(turned, -u, u))
    probabilities = np.stack([first, 1 - first], axis=1)
    suspects = find_label_issues(turned, probabilities, n_jobs=1)
    joint = estimate_joint(turned, probabilities)
    return Method(name, -u, suspects, float(1 - np.trace(joint)))


def compare(methods: Sequence[Method], flipped: pd.Series) -> pd.DataFrame:
    """What methods found, and how much of it is true.

    Args:
        methods: what they found among N pairs.
        flipped: (N,) pandas' ``boolean``, whether the label is wrong; NA where nobody knows.

    Returns:
        One row a method: ``method``, ``suspects`` (count), ``expected`` and ``expected_stderr`` (share of
        wrong labels), and, over the pairs whose truth is known: ``precision`` and ``recall`` of the suspects,
        ``auroc`` and ``average_precision`` of the score (NaN where there is nothing to divide by, or only one
        kind of label).
    """
    known = flipped.notna().to_numpy()
    truth = flipped[known].to_numpy(dtype=bool)
    both = 0 < truth.sum() < len(truth)
    rows = []
    for method in methods:
        score, suspects = method.suspicion[known], method.suspects[known]
        hits = (truth & suspects).sum()
        rows.append(
            {
                "method": method.name,
                "suspects": int(method.suspects.sum()),
                "expected": method.expected,
                "expected_stderr": method.stderr,
                "precision": hits / suspects.sum() if suspects.any() else np.nan,
                "recall": hits / truth.sum() if truth.any() else np.nan,
                "auroc": roc_auc_score(truth, score) if both else np.nan,
                "average_precision": average_precision_score(truth, score) if both else np.nan,
            }
        )
    return pd.DataFrame(rows)
