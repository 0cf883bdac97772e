"""PerpCorrect (Kong et al., NeurIPS 2024): an own second pass, on labels corrected from a few clean pairs.

    python -m research.perp_correct runs/first --clean Files --clean.train clean.jsonl

After its public code; research/notebook/second-passes.md has the results and the differences.
"""

import gc
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from scipy.optimize import curve_fit
from scipy.special import logit
from scipy.stats import norm
from torch import Tensor

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.commands import refine
from pacmr_lightning.datamodules.cleaned import exchanged, plain_row
from pacmr_lightning.datamodules.sources import Source
from pacmr_lightning.errors import UserError, check_within
from pacmr_lightning.files import text_hash, write_frame, write_json, write_json_lines, write_text
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.token_layout import padded, separate_rows
from pacmr_lightning.runs.finished_run import NO_NOISE, FinishedRun, PreferenceData, find_run, load_run, ready
from pacmr_lightning.runs.folder import CONFIG, SUMMARY, read_summary
from research import command

RECORD, ROUNDS, PAIRS, TABLE = "correct.json", "rounds", "pairs.parquet", "rounds.csv"
"""Files of the second pass besides the run's: options, rounds, corrected labels, fits by round."""
SCORES = "scores.parquet"
"""Written at the end of a round."""
BINS = 100
WORST_DISTANCE = 0.1
"""Largest accepted distance between the fitted distribution function and that of the values."""
STARTS = (-0.25, -0.5, -0.75, -0.95)
"""Values of mu to start from, in units of the values' root mean square."""


@dataclass(frozen=True)
class SymmetricMixture:
    """alpha N(mu, sigma^2) + (1 - alpha) N(-mu, sigma^2) of right and wrong labels, mu below 0."""

    mu: float
    sigma: float
    alpha: float
    """Fraction of right labels."""
    distance: float
    """Maximum difference from the values' empirical distribution function."""

    @property
    def threshold(self) -> float:
        """t in [mu, -mu] that maximises the fraction of right labels; labels below it are kept."""
        with np.errstate(divide="ignore", over="ignore"):
            crossing = self.sigma**2 * logit(self.alpha) / (-2 * self.mu)
        return float(np.clip(crossing, self.mu, -self.mu))

    @property
    def separation(self) -> float:
        """Fraction of right labels after all pairs from the threshold on are swapped."""
        right = norm.cdf(self.threshold, self.mu, self.sigma)
        wrong = norm.sf(self.threshold, -self.mu, self.sigma)
        return float(self.alpha * right + (1 - self.alpha) * wrong)

    @property
    def problem(self) -> str:
        """Reason not to correct labels by this fit, if any."""
        if self.distance > WORST_DISTANCE:
            return f"misses the distribution by {self.distance:.2f}"
        return f"has a noise rate of {1 - self.alpha:.0%}" if self.alpha < 0.5 else ""


def fit_mixture(values: np.ndarray) -> SymmetricMixture:
    """Fit the mixture's density to a histogram of N values by least squares.

    Unlike the public code, it uses bin centres and several starting points.
    """
    scale = float(np.sqrt(np.mean(values**2)))
    scaled = np.sort(values / scale) if scale > 0 else values
    if not np.isfinite(scaled).all() or np.ptp(scaled) <= 1e-9:
        raise UserError(
            f"The {len(values)} perplexity differences are equal or not finite ({values[0]:g} for one); "
            "train the rounds with another --rounds.learning_rate."
        )
    heights, edges = np.histogram(scaled, bins=BINS, density=True)
    middles = (edges[1:] + edges[:-1]) / 2
    found = []
    for mu in STARTS:
        alpha = min(max((1 + float(scaled.mean()) / mu) / 2, 0.05), 0.95)
        start, bounds = [mu, np.sqrt(1 - mu**2), alpha], ([-np.inf, 1e-3, 0], [-1e-6, np.inf, 1])
        try:
            best, _ = curve_fit(_density, middles, heights, p0=start, bounds=bounds)
        except RuntimeError:
            continue
        found.append((float(np.square(_density(middles, *best) - heights).sum()), *map(float, best)))
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


def mean_nll(policy: PolicyModel, batch: PairBatch) -> Tensor:
    """Return (N, 2) mean negative log-likelihood in nats per token, of prompt with chosen or rejected."""
    rows = separate_rows(batch)
    assert rows.real is not None
    row, column = rows.real[:, 1:].nonzero(as_tuple=True)
    rows = replace(rows, source=(row, column), targets=rows.input_ids[row, column + 1], owner=row)
    sums = policy.log_probs(batch, padded(rows))
    counts = torch.bincount(row).view(2, -1)
    return torch.stack([-sums.chosen / counts[0], -sums.rejected / counts[1]], dim=1)


@dataclass(frozen=True)
class Rounds:
    """Settings of the rounds; the defaults are those of the public code.

    Args:
        count: number of rounds.
        share: fraction of the training pairs that each round adds to those of the previous one.
        beta: DPO's temperature.
        learning_rate: peak learning rate.
        batch_size: pairs per update.
        epochs: passes over a round's pairs.
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
            "micro_batch_size": math.gcd(micro, self.batch_size) if isinstance(micro, int) else micro,
        }
        # Unused, but without a file some prompts would be held out for validation.
        files = {"train": str(rows), "validation": str(rows)}
        ignored = (*NO_NOISE, "clean_meta", "augmentations")
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


def perp_correct(
    run: str,
    clean: Source | None = None,
    output: str | None = None,
    beta: float | None = None,
    rounds: Rounds = Rounds(),  # it is frozen
) -> None:
    """Trains a second pass from the reference on labels corrected by PerpCorrect.

    Each round trains DPO from the reference on the clean pairs and on the most confident training pairs of
    the previous round, and scores all pairs by perplexity. The round with the best separation of right and
    wrong labels gives the corrected labels. The same command resumes after an interruption.

    Args:
        run: folder of a finished preference run.
        clean: source of clean pairs; default: the run's clean_meta. PerpCorrect uses 50.
        output: folder of the second pass; default: the run's name with ``-corrected``.
        beta: DPO's temperature in the second pass; default: the first run's.
        rounds: settings of the rounds.
    """
    if beta is not None:
        DPO(beta)  # refuses one that is out of range
    read_summary(run)  # needed by the comparison at the end
    first = find_run(run, "last")
    data = _data(first, clean, rounds)
    folder = Path(output) if output else refine.folder_beside(run, "corrected")
    clean_rows = data.clean_meta.load_all()
    clean_pairs = text_hash(str([*zip(clean_rows["id"][:], clean_rows["texts"][:], strict=True)]))
    asked = {"run": str(run), "clean": f"{data.clean_meta.name} ({clean_pairs})", "beta": beta}
    asked |= {"checkpoint": refine.kept_file("last", first.checkpoint)}
    asked |= {f"rounds.{name}": value for name, value in asdict(rounds).items()}
    refine.check_folder(folder, asked, RECORD)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RECORD, asked)
    pairs, table = run_rounds(rounds, first, data, folder / ROUNDS)
    write_frame(folder / PAIRS, pairs)
    write_frame(folder / TABLE, table)
    print(table.to_string(index=False, float_format="{:.3f}".format))
    if not (folder / SUMMARY).exists():
        use = {
            "model.weighting": "AuditedWeights",
            "model.weighting.audit": str(folder / PAIRS),
            "model.weighting.soft_labels": "true",
            "data.clean_meta": "null",
        }
        refine.train_again(first, folder, "corrected", beta, use, (RECORD, ROUNDS, PAIRS, TABLE))
    refine.compare_passes(run, folder)


def _data(first: FinishedRun, clean: Source | None, rounds: Rounds) -> PreferenceData:
    """Return the run's data with all training pairs as trained, and the clean pairs."""
    if clean is None and not first.data["init_args"].get("clean_meta"):
        raise UserError(
            f"The run {first.folder} has no clean pairs, which PerpCorrect needs; give some, such as --clean "
            "Files --clean.train clean.jsonl of pacmr clean-meta, or use pacmr refine, which needs none."
        )
    _, data, _ = load_run(first, as_trained=True)
    clean = data.clean_meta if clean is None else clean
    # Setup holds clean pairs out, but the rounds score all training pairs.
    data.clean_meta = data.meta_every = None
    data.setup("fit")
    data.clean_meta = clean
    number = {"the number of clean pairs": len(clean.load_all())}
    check_within(f"[{rounds.batch_size}, inf)", " (rounds.batch_size)", **number)
    check_within(f"[{1 / len(data.train_pairs):g}, 1]", **{"rounds.share": rounds.share})
    return data


def run_rounds(
    rounds: Rounds, first: FinishedRun, data: PreferenceData, folder: Path
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Train the rounds that are not on disk yet; return labels by the best round, and one row per round.

    Labels have ``id``, ``observed``, ``suggested``, ``texts``, ``p`` (1 or 0) and ``d``, the difference of
    log perplexities of chosen and rejected.
    """
    pairs, number = data.train_pairs, len(data.train_pairs)
    kept: list[int] = []
    swap: list[int] = []
    rows, found = [], []
    for i in range(1, rounds.count + 1):
        place = folder / str(i)
        if not (place / SCORES).exists():
            print(f"Round {i} of {rounds.count}: {len(kept)} labels kept, {len(swap)} swapped.")
            write_pairs(data, folder / f"{i}.jsonl", kept, swap)
            config = rounds.config(first, place, folder / f"{i}.jsonl")
            write_text(folder / f"{i}.yaml", yaml.safe_dump(config))
            refine.fit(place, ["--config", str(folder / f"{i}.yaml")])
            score(place, pairs)
        d = pd.read_parquet(place / SCORES)["d"].to_numpy()
        mixture = fit_mixture(d)
        found.append((mixture, d))
        row = {"round": i, "kept": len(kept), "swapped": len(swap), **asdict(mixture)}
        row |= {"threshold": mixture.threshold, "separation": mixture.separation}
        rows.append(row | {"changed": int((d >= mixture.threshold).sum()), "problem": mixture.problem})
        # The most confident: alpha of them keep their label, the others get the swapped one.
        size = min(i * round(rounds.share * number), number)
        order = np.argsort(d, kind="stable").tolist()
        kept = order[: round(size * mixture.alpha)]
        swap = order[::-1][: size - len(kept)]
    table = pd.DataFrame(rows)
    if not (good := [i for i, row in enumerate(rows) if not row["problem"]]):
        reasons = "; ".join(f"{row['round']} {row['problem']}" for row in rows)
        raise UserError(
            f"In no round do perplexity differences separate right from wrong labels (the fit of round "
            f"{reasons}); give more clean pairs, or another --rounds.learning_rate, --rounds.epochs or "
            "--rounds.beta, with another --output."
        )
    best = max(good, key=lambda i: found[i][0].separation)
    table["best"] = table["round"] == best + 1
    mixture, d = found[best]
    wrong = d >= mixture.threshold
    observed = np.where(pairs.swapped, "rejected", "chosen")
    suggested = np.where(wrong, "swap", "keep")
    labels = {"id": pairs.rows["id"][:], "observed": observed, "suggested": suggested}
    labels["texts"] = pairs.rows["texts"][:]
    right = 1 - wrong.astype(float)
    return pd.DataFrame(labels | {"p": right, "p_majority": right, "d": d}), table


def write_pairs(data: PreferenceData, path: Path, kept: list[int], swap: list[int]) -> None:
    """Write clean pairs, training pairs as trained, and others with the label swapped."""
    found = data.source.load("train")
    places = {name: i for i, name in enumerate(found["id"][:])}
    rows = list(data.clean_meta.load_all())
    for indices, opposite in ((kept, False), (swap, True)):
        for i in indices:
            row = found[places[data.train_pairs.rows[i]["id"]]]
            rows.append(exchanged(row) if data.train_pairs.swapped[i] != opposite else row)
    # Ids must be unique, and a pair can be both clean and selected.
    write_json_lines(path, (plain_row({**row, "id": None}) for row in rows))


def score(folder: Path, pairs: Any) -> None:
    """Write d = log PPL(chosen) - log PPL(rejected) of N pairs by a round's policy."""
    module, *_ = load_run(find_run(str(folder), "last"), as_trained=True)
    nll = pairs.values(mean_nll, ready(module), f"Round {folder.name}", of_adapter=True).astype(float)
    write_frame(folder / SCORES, pd.DataFrame({"d": nll[:, 0] - nll[:, 1]}))
    del module
    gc.collect()  # frees memory for the next round


main = command("perp_correct", perp_correct)

if __name__ == "__main__":
    main()
