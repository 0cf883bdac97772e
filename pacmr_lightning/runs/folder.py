"""A run's folder: its name, its files' names, its numbers and the weights of its pairs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UserError
from ..files import local_path

# Names inside a run's folder.
CONFIG = "config.yaml"
METRICS = "metrics.csv"  # curves
SUMMARY = "summary.json"  # numbers at the end
CHECKPOINTS = "checkpoints"  # default folder
ANALYSIS = "analysis"  # figures, and their values
WEIGHT_GAP_TABLE = f"{ANALYSIS}/weight-gap.csv"  # mean weights by flip
AUDIT = "audit"  # default folder of the run's audit
AUDITED_PAIRS = "pairs.parquet"  # an audit's table
WEIGHTS = "weights"  # parts with one row per pair per visit
NOISE_MASK = "noise_mask.parquet"  # injected label noise
RESPONSES = "responses.jsonl"  # to a few fixed prompts during training
GENERATIONS = "generations.jsonl"  # responses to evaluation prompts
SAMPLES = "samples.jsonl"  # responses sampled from the policy


def default_folder(model: Any, data: Any, seed: int) -> str:
    """Return ``runs/<task>-<method>-noise<percent>-seed<seed>``; ``runs/<task>-sft`` for SFT."""
    if "method" not in model:
        return str(Path("runs", f"{data.task}-sft"))
    noise = f"{100 * data.noise_rate:g}"
    if kind := data.get("noise"):
        options = kind.get("init_args", {})
        rates = options.get("rates") if isinstance(options.get("rates"), list) else [options.get("share")]
        noise = kind.class_path.rpartition(".")[2] + "-".join(f"{100 * rate:g}" for rate in rates if rate)
    return str(Path("runs", f"{data.task}-{model.method}-noise{noise}-seed{seed}"))


def read_summary(run: str | Path) -> dict[str, Any]:
    """Return the numbers of a finished run; UserError if its folder has no readable summary."""
    path = local_path(run) / SUMMARY
    try:
        summary = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path} does not exist; name the folder of a run that has finished with the RunSummary callback."
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); train again.") from None
    if "metrics" not in summary:
        raise UserError(f"{path} is not of a run of preferences; name the folder of one.")
    return summary


def weight_parts(run_folder: str | Path) -> list[Path]:
    """Return the files of a run's per-pair weights, by rank and number."""
    return sorted((local_path(run_folder) / WEIGHTS).glob("part-*.parquet"))


def read_weights(run_folder: str | Path) -> pd.DataFrame:
    """Return the recorded values of every pair at every visit.

    One row per pair per visit, by step: ``id``, ``step`` (policy updates before the visit), ``u`` and
    ``delta`` (implicit reward margin and sum before the update), ``a`` and ``b`` (NaN if undefined),
    ``weight``, and ``flipped`` (pandas' ``boolean``, NA if unknown).

    Raises:
        UserError: the folder holds no weights, or a part of them cannot be read.
    """
    parts = weight_parts(run_folder)
    if not parts:
        raise UserError(
            f"There are no weights in {Path(run_folder) / WEIGHTS}; name the folder of a run that was "
            "trained with the WeightRecorder callback."
        )
    tables = []
    for part in parts:
        try:
            tables.append(pq.read_table(part))
        except (OSError, pa.ArrowInvalid):
            raise UserError(
                f"{part} is not a readable Parquet file; train again, or delete it and continue without."
            ) from None
    frame = pa.concat_tables(tables).to_pandas(types_mapper={pa.bool_(): pd.BooleanDtype()}.get)
    return frame.sort_values("step", kind="stable", ignore_index=True)


MARGIN, KL = 0.005, 1e-4
"""Validation margin u, and KL per token to the reference, in nats, of a policy that has moved."""


def unmoved(metrics: Mapping[str, Any]) -> str | None:
    """Return a sentence if the policy still equals its reference; None if it moved or was not validated.

    Also None where KLGuard went back, which has said why.
    """
    if "val/guard/restored_step" in metrics:
        return None
    loss, margin, kl = (metrics.get(f"val/{name}") for name in ("loss", "rewards/margins", "kl"))
    if loss is None or margin is None or kl is None or abs(margin) >= MARGIN or kl >= KL:
        return None
    return f"The policy did not move: its validation loss is {loss:.4f} and its KL to the reference {kl:.2g}"
