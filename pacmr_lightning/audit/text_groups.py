"""Groups of pairs with common texts: labels of one group are scored by those of others."""

import numpy as np
import pandas as pd
from datasets import Dataset
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..datamodules.tokenized_pairs import row_bytes
from ..errors import UserError

FOLDS = 5


def text_groups(rows: Dataset) -> tuple[np.ndarray, list[str]]:
    """Return (N,) group numbers from 0, and notes if the groups are not those of a prompt.

    If a prompt has more than a fold's pairs, such as one instruction for all, groups are pairs connected by
    common responses instead: no response is in two groups, so that none is scored by its own labels.
    """
    prompts = pd.factorize(np.array(rows["prompt"][:], dtype=object))[0]
    if (most := np.bincount(prompts).max()) * FOLDS <= len(prompts):
        return prompts, []
    texts = np.array(list(row_bytes(rows, "chosen_ids", "rejected_ids")), dtype=object)
    ends = pd.factorize(texts.ravel())[0].reshape(-1, 2)
    graph = coo_array((np.ones(len(ends)), tuple(ends.T)), shape=(ends.max() + 1,) * 2)
    groups = pd.factorize(connected_components(graph, directed=False)[1][ends[:, 0]])[0]
    return groups, [
        f"{most:,} of {len(prompts):,} pairs have the same prompt, so pairs with common responses are one "
        f"group of {groups.max() + 1:,}, and labels are scored by those of other groups, not other prompts."
    ]


def check_groups(groups: np.ndarray) -> None:
    """Raise UserError if there are fewer groups than a linear probe has folds."""
    if (number := len(np.unique(groups))) < FOLDS:
        raise UserError(
            f"The pairs form {number} groups without common texts, but a linear probe needs {FOLDS}; give "
            "pairs with other prompts or responses, or audit an adapter or run with --scorer policy."
        )
