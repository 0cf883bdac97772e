"""PerpCorrect: rounds of DPO on a few clean pairs and on labels corrected by log-perplexities."""

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from scipy.optimize import curve_fit
from scipy.special import expit, logit
from scipy.stats import norm
from torch import Tensor

from ..batch import PairBatch
from ..errors import UserError, check_within
from ..files import write_frame, write_text
from ..policy import PolicyModel
from ..policy.token_layout import padded, row_multiple, separate_rows
from ..runs.finished_run import NO_NOISE, FinishedRun, PreferenceData, find_run, load_run, ready
from ..runs.folder import CONFIG

_SCORES = "scores.parquet"
"""Written at the end of a round."""
_FITTED = ("mu", "sigma", "alpha", "threshold", "separation")
BINS = 100
WORST_DISTANCE = 0.1
"""Largest accepted distance between the fitted distribution function and that of the values."""
_STARTS = (-0.25, -0.5, -0.75, -0.95)
"""In units of the values' root mean square."""


@dataclass(frozen=True)
class SymmetricMixture:
    """alpha N(mu, sigma^2) + (1 - alpha) N(-mu, sigma^2), of right and wrong labels."""

    mu: float
    """Mean of right labels; below 0."""
    sigma: float
    alpha: float
    """Fraction of right labels."""
    distance: float
    """Maximum difference from the values' empirical distribution function."""

    @property
    def threshold(self) -> float:
        """t in [mu, -mu] that maximises ``accuracy``; labels below it are kept."""
        with np.errstate(divide="ignore", over="ignore"):
            crossing = self.sigma**2 * logit(self.alpha) / (-2 * self.mu)
        return float(np.clip(crossing, self.mu, -self.mu))

    def accuracy(self, threshold: float) -> float:
        """Return the fraction of right labels after all pairs from a threshold on are swapped."""
        right = norm.cdf(threshold, self.mu, self.sigma)
        return float(self.alpha * right + (1 - self.alpha) * norm.sf(threshold, -self.mu, self.sigma))

    @property
    def separation(self) -> float:
        """Accuracy at the best threshold."""
        return self.accuracy(self.threshold)

    def wrong(self, values: np.ndarray) -> np.ndarray:
        """Return (N,) P(wrong) of pairs with (N,) values."""
        return expit(-2 * self.mu / self.sigma**2 * values - logit(self.alpha))

    @property
    def problem(self) -> str | None:
        """Reason not to correct labels by this fit; None if it is usable."""
        if self.distance > WORST_DISTANCE:
            return f"misses the distribution by {self.distance:.2f}"
        if self.alpha < 0.5:
            return f"has a noise rate of {1 - self.alpha:.0%}"
        return None


def fit_mixture(values: np.ndarray) -> SymmetricMixture:
    """Fit the mixture's density to a histogram of N values by least squares, as PerpCorrect does.

    Unlike its code, it uses bin centres and several starting points.
    """
    if not np.isfinite(values).all() or np.ptp(values) <= 1e-9 * np.abs(values).max():
        raise UserError(
            f"The {len(values)} perplexity differences are all {values[0]:g}, or one is not finite, so "
            "labels cannot be corrected; train the rounds with another --rounds.learning_rate."
        )
    scale = float(np.sqrt(np.mean(values**2)))
    scaled = np.sort(values / scale)
    heights, edges = np.histogram(scaled, bins=BINS, density=True)
    middles = (edges[1:] + edges[:-1]) / 2
    found = []
    for mu in _STARTS:
        alpha = min(max((1 + float(scaled.mean()) / mu) / 2, 0.05), 0.95)
        try:
            best, _, info, *_ = curve_fit(
                _density,
                middles,
                heights,
                p0=[mu, np.sqrt(1 - mu**2), alpha],
                bounds=([-np.inf, 1e-3, 0], [-1e-6, np.inf, 1]),
                full_output=True,
            )
        except RuntimeError:
            continue
        found.append((float(np.square(info["fvec"]).sum()), *map(float, best)))
    if not found:
        raise UserError(
            f"No mixture of two normal distributions fits the {len(values)} perplexity differences; train "
            "the rounds with another --rounds.learning_rate."
        )
    _, mu, sigma, alpha = min(found)
    # The empirical distribution function jumps, so compare on either side.
    fitted = alpha * norm.cdf(scaled, mu, sigma) + (1 - alpha) * norm.cdf(scaled, -mu, sigma)
    steps = np.arange(len(scaled) + 1) / len(scaled)
    distance = max(np.abs(fitted - steps[1:]).max(), np.abs(fitted - steps[:-1]).max())
    return SymmetricMixture(mu * scale, sigma * scale, alpha, float(distance))


def _density(x: np.ndarray, mu: float, sigma: float, alpha: float) -> np.ndarray:
    return alpha * norm.pdf(x, mu, sigma) + (1 - alpha) * norm.pdf(x, -mu, sigma)


def selection(values: np.ndarray, alpha: float, size: int) -> tuple[list[int], list[int]]:
    """Return the ``size`` most confident indices: alpha of them to keep (lowest values), the rest to swap."""
    order = np.argsort(values, kind="stable").tolist()
    keep = round(size * alpha)
    return order[:keep], order[::-1][: size - keep]


def mean_nll(policy: PolicyModel, batch: PairBatch) -> Tensor:
    """Return (N, 2) mean negative log-likelihood in nats per token, of prompt with chosen or rejected."""
    rows = separate_rows(batch)
    assert rows.real is not None
    row, column = rows.real[:, 1:].nonzero(as_tuple=True)
    rows = replace(rows, source=(row, column), targets=rows.input_ids[row, column + 1], owner=row)
    sums = policy.log_probs(batch, padded(rows, row_multiple(batch.input_ids.device)))
    counts = torch.bincount(row).view(2, -1)
    return torch.stack([-sums.chosen / counts[0], -sums.rejected / counts[1]], dim=1)


@dataclass(frozen=True)
class Rounds:
    """Settings of PerpCorrect's rounds; the defaults are those of its code.

    Args:
        count: number of rounds.
        share: fraction of the training pairs that each round adds to those of the previous one.
        beta: DPO's temperature.
        learning_rate: peak learning rate.
        batch_size: pairs per update.
        epochs: passes over a round's pairs.

    Raises:
        UserError: a number is not above 0, or the shares add up to more than all pairs.
    """

    count: int = 6
    share: float = 0.02
    beta: float = 0.1
    learning_rate: float = 1e-3
    batch_size: int = 4
    epochs: int = 3

    def __post_init__(self) -> None:
        check_within("(0, inf)", **{f"rounds.{name}": value for name, value in asdict(self).items()})
        if (self.count - 1) * self.share > 1:
            raise UserError(
                f"rounds.share is {self.share}, but the last of {self.count} rounds would then learn from "
                f"more than all training pairs; give at most {1 / (self.count - 1):.3g}."
            )

    def config(self, first: FinishedRun, folder: Path, rows: Path) -> dict[str, Any]:
        """Return the configuration of one round: the first run's, with DPO on a file of rows."""
        found = yaml.safe_load((Path(first.folder) / CONFIG).read_text(encoding="utf-8"))
        model, data, trainer = (found[section] for section in ("model", "data", "trainer"))
        micro = model["init_args"].get("micro_batch_size")
        model["init_args"] |= {
            "objective": {"class_path": "pacmr_lightning.objectives.DPO", "init_args": {"beta": self.beta}},
            "weighting": {"class_path": "pacmr_lightning.weighting.Unweighted"},
            "method": "perp-correct",
            "learning_rate": self.learning_rate,
            "micro_batch_size": micro and math.gcd(micro, self.batch_size),
        }
        # Unused, but without a file some prompts would be held out for validation.
        files = {"train": str(rows), "validation": str(rows)}
        ignored = (*NO_NOISE, "clean_meta", "hold_out_clean_meta", "augmentations")
        ignored += ("curriculum", "curriculum_share")
        data["init_args"] = {name: value for name, value in data["init_args"].items() if name not in ignored}
        data["init_args"] |= {
            "source": {"class_path": "pacmr_lightning.datamodules.Files", "init_args": files},
            "global_batch_size": self.batch_size,
            "reference": "live",
        }
        kept = ("accelerator", "precision", "deterministic", "enable_progress_bar")
        found["trainer"] = {name: trainer[name] for name in kept} | {
            "devices": 1,
            "max_epochs": self.epochs,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
        }
        return {name: found[name] for name in ("seed_everything", "model", "data", "trainer")}

    def run(
        self,
        first: FinishedRun,
        data: PreferenceData,
        folder: Path,
        write: Callable[[Path, list[int], list[int]], object],
        fit: Callable[[Path, list[str]], object],
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Train the rounds that are not on disk yet; return labels by the best round, and one row per round.

        ``data`` has all N training pairs as trained. ``write`` writes a round's file from the indices of
        pairs with their own label and of pairs with the swapped one; ``fit`` trains in a folder with
        command-line arguments. Labels have ``id``, ``observed``, ``suggested``, ``p_wrong`` (0 or 1),
        ``posterior`` (by the mixture) and ``d``.

        Raises:
            UserError: no round separates right from wrong labels.
        """
        pairs, number = data.train_pairs, len(data.train_pairs)
        learned: tuple[list[int], list[int]] = ([], [])
        rows, found = [], []
        for i in range(1, self.count + 1):
            place = folder / str(i)
            if not (place / _SCORES).exists():
                print(f"Round {i} of {self.count}: {len(learned[0])} labels kept, {len(learned[1])} swapped.")
                write(folder / f"{i}.jsonl", *learned)
                config = self.config(first, place, folder / f"{i}.jsonl")
                write_text(folder / f"{i}.yaml", yaml.safe_dump(config))
                fit(place, ["--config", str(folder / f"{i}.yaml")])
                _score(place, pairs)
            d = pd.read_parquet(place / _SCORES)["d"].to_numpy()
            mixture = fit_mixture(d)
            found.append((mixture, d))
            fitted = {name: getattr(mixture, name) for name in _FITTED}
            fitted |= {"changed": int((d >= mixture.threshold).sum()), "problem": mixture.problem or ""}
            rows.append({"round": i, "kept": len(learned[0]), "swapped": len(learned[1]), **fitted})
            learned = selection(d, mixture.alpha, min(i * round(self.share * number), number))
        table = pd.DataFrame(rows)
        best = _best(found)
        table["best"] = table["round"] == best + 1
        mixture, d = found[best]
        wrong = d >= mixture.threshold
        labels = {
            "id": pairs.rows["id"][:],
            "observed": np.where(pairs.swapped, "rejected", "chosen"),
            "suggested": np.where(wrong, "swap", "keep"),
            "p_wrong": wrong.astype(float),
            "posterior": mixture.wrong(d),
            "d": d,
        }
        return pd.DataFrame(labels), table


def _score(folder: Path, pairs: Any) -> None:
    """Write d = log PPL(chosen) - log PPL(rejected) of N pairs by a round's policy."""
    module, *_ = load_run(find_run(str(folder), "last"), as_trained=True)
    nll = pairs.values_as_trained(mean_nll, ready(module), f"Round {folder.name}")
    write_frame(folder / _SCORES, pd.DataFrame({"d": (nll[:, 0] - nll[:, 1]).double().numpy()}))
    del module
    gc.collect()  # frees memory for the next round


def _best(found: list[tuple[SymmetricMixture, np.ndarray]]) -> int:
    good = [i for i, (mixture, _) in enumerate(found) if mixture.problem is None]
    if not good:
        reasons = "; ".join(f"{i} {mixture.problem}" for i, (mixture, _) in enumerate(found, start=1))
        raise UserError(
            f"In no round do perplexity differences separate right from wrong labels (the fit of round "
            f"{reasons}); give more clean pairs, or another --rounds.learning_rate, --rounds.epochs or "
            "--rounds.beta, with another --output."
        )
    return max(good, key=lambda i: found[i][0].separation)
