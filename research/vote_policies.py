"""Table of the policies of ``research/sweeps/vote_policies.yaml``, and their differences from DPO at one KL.

    python -m research.vote_policies runs/sweeps/vote_policies

``runs/vote-policies`` has the folds that ``research.vote_folds`` wrote.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from scipy.stats import t
from sklearn.metrics import roc_auc_score

from pacmr_lightning.analysis.last_pass import log_probs
from pacmr_lightning.batch import LogProbs
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import write_frame
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.runs.finished_run import FinishedRun, find_run, load_run, ready

from . import command


def vote_policies(folder: str, *, folds: str = "runs/vote-policies", output: str | None = None) -> None:
    """Print a row per method and beta, means over folds.

    Args:
        folder: of the sweep; each cell's u of the test pairs is kept there.
        folds: folder of the folds' files.
        output: CSV with a row per cell; it is read if the folder has no cells.
    """
    rows = list(cells(Path(folder), Path(folds)))
    if not rows and output is None:
        raise UserError(f"{folder} has no finished runs; name the sweep's folder, or a table by --output.")
    cell = pd.DataFrame(rows) if rows else pd.read_csv(str(output))
    if rows and output is not None:
        write_frame(output, cell)
    Console(width=160).print(summary(cell).to_string(index=False), highlight=False)


def cells(folder: Path, folds: Path) -> Iterator[dict[str, object]]:
    """Yield measures of each finished cell."""
    for path in sorted(folder.glob("*/summary.json")):
        found = json.loads(path.read_text())
        votes = pd.read_csv(folds / f"fold-{found['seed']}/votes.csv").set_index("id")["contradicted"]
        run = find_run(str(path.parent), "last")
        u = test_scores(run)
        wrong = votes.loc[u.index].to_numpy()
        yield {
            "method": found["method"],
            "beta": run.model["init_args"]["objective"]["init_args"]["beta"],
            "fold": found["seed"],
            "accuracy": (u > 0).mean(),
            "auroc": roc_auc_score(wrong, np.where(wrong, u, -u)),
            "kl": found["metrics"]["val/kl"],
            "gap": found["weight_gap"],
            "vnet_updates": found.get("vnet_updates"),
        }


def test_scores(run: FinishedRun) -> pd.Series:
    """Return u of the test pairs by id, where the majority's response is chosen."""
    kept = Path(run.folder) / "test-u.csv"
    if not kept.exists():
        module, data, _ = load_run(run, as_trained=True)
        data.setup("validate")
        policy, pairs = ready(module), data.validation_pairs
        if pairs.reference is None:
            pairs.reference = pairs.reference_log_probs(policy)
        # Not last_pass: it also asks for weights, and an audit has none for test pairs.
        values = pairs.values(log_probs, policy, kept.parent.name, of_adapter=True)
        now = LogProbs(*torch.from_numpy(values).unbind(1))
        batch = pairs.batch(list(range(len(pairs))))
        u = Rewards.of(now, batch, module.objective.beta).u
        write_frame(kept, pd.DataFrame({"id": batch.ids, "u": u.double().numpy()}))
    return pd.read_csv(kept, index_col="id")["u"]


def summary(cell: pd.DataFrame) -> pd.DataFrame:
    """Return means over folds, and the mean difference in accuracy from DPO at the same KL in its fold."""
    dpo = {fold: part.sort_values("kl") for fold, part in cell[cell["method"] == "dpo"].groupby("fold")}
    rows = []
    for (method, beta), part in cell.groupby(["method", "beta"], sort=False):
        difference = [
            row.accuracy - np.interp(np.log(row.kl), np.log(dpo[row.fold]["kl"]), dpo[row.fold]["accuracy"])
            for row in part.itertuples()
            if row.fold in dpo
        ]
        half = t.ppf(0.975, len(difference) - 1) * np.std(difference, ddof=1) / len(difference) ** 0.5
        rows.append(
            {
                "method": method,
                "beta": beta,
                "folds": len(part),
                **part[["accuracy", "auroc", "kl"]].mean().round(3),
                "lowest": round(part["accuracy"].min(), 3),
                "highest": round(part["accuracy"].max(), 3),
                "at DPO's KL": f"{np.mean(difference):+.3f} ± {half:.3f}",
            }
        )
    return pd.DataFrame(rows)


main = command("vote_policies", vote_policies)

if __name__ == "__main__":
    main()
