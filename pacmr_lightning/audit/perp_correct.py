"""PerpCorrect: DPO on a few clean pairs, and how unlikely its policy finds all other pairs' responses.

The differences of log-perplexity of right and wrong labels are modelled by two normal distributions that
mirror each other at 0. The round that tells them apart best corrects the labels.
"""

from __future__ import annotations

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

from ..analysis.pair_log_probs import pair_log_probs
from ..batch import PairBatch
from ..errors import UserError
from ..files import replacing
from ..policy import PolicyModel
from ..policy.rows import padded, row_multiple, separate_rows
from ..runs.finished_run import NO_NOISE, PreferenceData, Run, find_run, load
from ..runs.folder import CONFIG

_SCORES = "scores.parquet"
"""Inside a round's folder: it is complete."""
_FITTED = ("mu", "sigma", "alpha", "threshold", "separation")
"""What the table says of a round's mixture."""
BINS = 100
"""Of the histogram that the curve is fitted to."""
WORST_DISTANCE = 0.1
"""Between the fitted distribution and that of the values, at most, for a fit to count."""
_STARTS = (-0.25, -0.5, -0.75, -0.95)
"""Of mu, in units of the values' root mean square, which mu^2 + sigma^2 is the square of."""


@dataclass(frozen=True)
class SymmetricMixture:
    """alpha N(mu, sigma^2) + (1 - alpha) N(-mu, sigma^2), of pairs whose label is right and wrong."""

    mu: float
    """Mean of pairs whose label is right; below 0."""
    sigma: float
    alpha: float
    """Share of right labels."""
    distance: float
    """Largest difference between its distribution function and that of the values it was fitted to."""

    @property
    def threshold(self) -> float:
        """t in [mu, -mu], below which labels are kept: where both kinds are alike often, if inside.

        It maximises ``accuracy``: alpha phi((t - mu) / sigma) = (1 - alpha) phi((t + mu) / sigma).
        """
        with np.errstate(divide="ignore", over="ignore"):
            crossing = self.sigma**2 * logit(self.alpha) / (-2 * self.mu)
        return float(np.clip(crossing, self.mu, -self.mu))

    def accuracy(self, threshold: float) -> float:
        """Share of labels that are right once all pairs from a threshold on have the other."""
        right = norm.cdf(threshold, self.mu, self.sigma)
        return float(self.alpha * right + (1 - self.alpha) * norm.sf(threshold, -self.mu, self.sigma))

    @property
    def separation(self) -> float:
        """The best such share for a threshold in [mu, -mu]."""
        return self.accuracy(self.threshold)

    def wrong(self, values: np.ndarray) -> np.ndarray:
        """(N,) posterior probability that the label of a pair with such a value is wrong."""
        return expit(-2 * self.mu / self.sigma**2 * values - logit(self.alpha))

    @property
    def problem(self) -> str | None:
        """Why labels should not be corrected by this fit; None where nothing speaks against it."""
        if self.distance > WORST_DISTANCE:
            return f"misses the distribution by {self.distance:.2f}"
        if self.alpha < 0.5:
            return f"takes {1 - self.alpha:.0%} of the labels for wrong"
        return None


def fit_mixture(values: np.ndarray) -> SymmetricMixture:
    """Fit the mixture's density to a histogram of N values by least squares, as PerpCorrect does.

    The curve is taken at the middle of each bin (the method's own code: at its left edge), from several
    starting points (its single one suits values of a few nats only).

    Raises:
        UserError: the values do not differ, one is not finite, or the fit does not converge.
    """
    if not np.isfinite(values).all() or np.ptp(values) == 0:
        raise UserError(
            f"The {len(values)} perplexity differences are all {values[0]:g}, or one is not finite, so they "
            "say nothing of labels; train the rounds with another --rounds.learning_rate."
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
    # The distribution function of the values jumps, and is compared on either side.
    fitted = alpha * norm.cdf(scaled, mu, sigma) + (1 - alpha) * norm.cdf(scaled, -mu, sigma)
    steps = np.arange(len(scaled) + 1) / len(scaled)
    distance = max(np.abs(fitted - steps[1:]).max(), np.abs(fitted - steps[:-1]).max())
    return SymmetricMixture(mu * scale, sigma * scale, alpha, float(distance))


def _density(x: np.ndarray, mu: float, sigma: float, alpha: float) -> np.ndarray:
    return alpha * norm.pdf(x, mu, sigma) + (1 - alpha) * norm.pdf(x, -mu, sigma)


def selection(values: np.ndarray, alpha: float, size: int) -> tuple[list[int], list[int]]:
    """Return indices of pairs to learn from next, the surest first: whose label is kept, and exchanged.

    A share alpha of ``size`` pairs has the lowest values, the rest the highest.
    """
    order = np.argsort(values, kind="stable").tolist()
    keep = round(size * alpha)
    return order[:keep], order[::-1][: size - keep]


def mean_nll(policy: PolicyModel, batch: PairBatch) -> Tensor:
    """(N, 2) mean negative log-likelihood in nats a token, of prompt with chosen and prompt with rejected.

    The mean runs over all tokens that have one before them: prompt, response and EOS. It is the logarithm of
    the perplexity, and what transformers' models return as the loss of a text.
    """
    rows = separate_rows(batch)
    assert rows.real is not None
    row, column = rows.real[:, 1:].nonzero(as_tuple=True)
    rows = replace(rows, source=(row, column), targets=rows.input_ids[row, column + 1], owner=row)
    sums = policy.log_probs(batch, padded(rows, row_multiple(batch.input_ids.device)))
    counts = torch.bincount(row).view(2, -1)
    return torch.stack([-sums.chosen / counts[0], -sums.rejected / counts[1]], dim=1)


@dataclass(frozen=True)
class Rounds:
    """How PerpCorrect's rounds are trained; the defaults are those of its code.

    Args:
        count: how many.
        share: of the training pairs, which each round learns from beyond those of the round before.
        beta: of DPO.
        learning_rate: at its peak.
        batch_size: pairs of an update.
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
        for name, value in asdict(self).items():
            if not (value > 0 and math.isfinite(value)):
                raise UserError(f"rounds.{name} is {value}, but it must be above 0.")
        if (self.count - 1) * self.share > 1:
            raise UserError(
                f"rounds.share is {self.share}, but the last of {self.count} rounds would then learn from "
                f"more than all training pairs; give at most {1 / (self.count - 1):.3g}."
            )

    def config(self, first: Run, folder: Path, rows: Path) -> dict[str, Any]:
        """Configuration of one round: the first run's model and machine, and DPO on a file of rows."""
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
        # Nothing is validated, but without a file for it some of the prompts would be set aside.
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
        first: Run,
        data: PreferenceData,
        folder: Path,
        write: Callable[[Path, list[int], list[int]], object],
        fit: Callable[[Path, list[str]], object],
        micro_batch_size: int | None = None,
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Train the rounds that are not on disk yet.

        Args:
            first: the run whose labels are to be corrected.
            data: its datamodule, with all N training pairs under their labels as trained.
            folder: of the rounds.
            write: writes a round's file: clean pairs, pairs under their label, and others under the opposite
                one.
            fit: trains in a folder, with the words of a command line.
            micro_batch_size: pairs in one forward pass that scores; None is that of training.

        Returns:
            N rows of labels by the best round: ``id``, ``observed``, ``suggested``, ``p_wrong`` (1 from the
            threshold on, else 0), ``posterior`` (by the fitted mixture) and ``d``. And one row a round.

        Raises:
            UserError: in no round the differences tell right labels from wrong ones.
        """
        pairs, number = data.train_pairs, len(data.train_pairs)
        learned: tuple[list[int], list[int]] = ([], [])
        rows, found = [], []
        for i in range(1, self.count + 1):
            place = folder / str(i)
            if not (place / _SCORES).exists():
                print(
                    f"Round {i} of {self.count}: {len(learned[0])} labels kept, {len(learned[1])} exchanged."
                )
                # Written on every start, and the same each time.
                write(folder / f"{i}.jsonl", *learned)
                config = self.config(first, place, folder / f"{i}.jsonl")
                with replacing(folder / f"{i}.yaml") as temporary:
                    temporary.write_text(yaml.safe_dump(config), encoding="utf-8")
                fit(place, ["--config", str(folder / f"{i}.yaml")])
                _score(place, pairs, micro_batch_size)
            d = pd.read_parquet(place / _SCORES)["d"].to_numpy()
            mixture = fit_mixture(d)
            found.append((mixture, d))
            fitted = {name: getattr(mixture, name) for name in _FITTED}
            fitted |= {"changed": int((d >= mixture.threshold).sum()), "problem": mixture.problem or ""}
            rows.append({"round": i, "kept": len(learned[0]), "exchanged": len(learned[1]), **fitted})
            learned = selection(d, mixture.alpha, min(i * round(self.share * number), number))
        table = pd.DataFrame(rows)
        best = _best(found)
        table["best"] = table["round"] == best + 1
        mixture, d = found[best]
        wrong = d >= mixture.threshold
        labels = {
            "id": pairs.rows["id"][:],
            "observed": np.where(pairs.swapped, "rejected", "chosen"),
            "suggested": np.where(wrong, "flip", "keep"),
            "p_wrong": wrong.astype(float),  # PerpCorrect decides; the next is what it decides by
            "posterior": mixture.wrong(d),
            "d": d,
        }
        return pd.DataFrame(labels), table


def _score(folder: Path, pairs: Any, micro_batch_size: int | None) -> None:
    """Writes d = log PPL(chosen) - log PPL(rejected) of N pairs by a round's policy."""
    module, *_ = load(find_run(str(folder), "last"), as_trained=True)
    nll = pair_log_probs(
        module,
        pairs,
        list(range(len(pairs))),
        folder / "answers.sqlite",
        name=f"Round {folder.name}",
        micro_batch_size=micro_batch_size,
        ask=mean_nll,
    ).squeeze(1)
    with replacing(folder / _SCORES) as temporary:
        pd.DataFrame({"d": (nll[:, 0] - nll[:, 1]).double().numpy()}).to_parquet(temporary)
    del module
    gc.collect()  # the next round's model needs its memory


def _best(found: list[tuple[SymmetricMixture, np.ndarray]]) -> int:
    good = [i for i, (mixture, _) in enumerate(found) if mixture.problem is None]
    if not good:
        reasons = "; ".join(f"{i} {mixture.problem}" for i, (mixture, _) in enumerate(found, start=1))
        raise UserError(
            f"In no round the perplexity differences tell right labels from wrong ones (the fit of round "
            f"{reasons}); give more clean pairs, or other --rounds.learning_rate, --rounds.epochs or "
            "--rounds.beta, with another --output."
        )
    return max(good, key=lambda i: found[i][0].separation)
