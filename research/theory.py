"""Weights and calibration of finished runs against the theory of Qu et al., with true probabilities.

    python -m research.theory runs/a runs/b --output runs/theory

Swapping a pair's two responses changes the sign of u, s, logit(q) and log(g+ / g-), and turns a probability p
into 1 - p. The order is arbitrary, so every number here is over the pairs in both orders.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from scipy.special import expit
from scipy.stats import rankdata
from torch import Tensor

from pacmr_lightning.analysis.last_pass import last_pass
from pacmr_lightning.batch import LogProbs, PairBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import save_figure, write_frame
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.runs.finished_run import FinishedRun, find_run, load_run
from pacmr_lightning.weighting import AuditedWeights, DropFlipped, OracleWeights, Unweighted, VNet, Weighting

from . import command
from .formulas import noisy_posterior, two_rate_log_ratio

RATIOS, CALIBRATION, RELIABILITY, PAIRS = "weight-ratios", "calibration", "reliability", "pairs.parquet"
"""Files of the output folder, the first two as .csv, .png and .pdf."""
RESAMPLES = 1000
"""Resamples of the bootstrap over prompts."""
BINS = 10
"""Bins of a reliability diagram: tenths of sigma(u)."""
_CLIP = 1e-12
"""Probabilities that rounded to 0 or 1 have no finite logit."""
COLUMNS = 4
"""Runs in a row."""
BLUE, ORANGE = "#0072B2", "#D55E00"
"""Colour-blind safe colours (Okabe and Ito)."""
KINDS = {"eta": ("clean preference $\\eta$", BLUE, "o"), "noisy": ("noisy label", ORANGE, "s")}
"""Heading, colour and marker of each curve of a reliability diagram."""
DASHED: dict[str, Any] = {"linestyle": "--", "color": "0.2", "linewidth": 1}
TICKS = (0, 0.2, 0.4, 0.6, 0.8, 1)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of the weights' log-ratio in each bin: two bands and the median."""
_MEDIANS = 20
"""Bins of the horizontal axis, of equal numbers of pairs."""


def theory_check(
    runs: Sequence[str],
    *,
    output: str,
    split: Literal["train", "validation"] = "validation",
    checkpoint: str = "last",
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compare finished runs with Theorem 1 and with the true preference probabilities.

    Theorem 1 is about functions of a pair z: log g+/g- = logit(eta) - logit(q). It has
    no drawn label, only q, the probability that a noisy label agrees with the order of the pair; so labels of
    any kind will do. Training on a pair moves u towards its own label, while the theorem's optimum
    is a mean over labels. Validation pairs therefore test generalisation, with the q of the run's noise.
    Training pairs, with the labels of the run, show the effect of memorisation.

    Writes ``weight-ratios`` and ``calibration`` (.csv, .png, .pdf), ``reliability.csv`` and
    ``pairs.parquet``. Log-probabilities are cached on disk, so that a second call goes on where the first was
    killed.

    Args:
        runs: folders of preference runs on pairs with a known eta.
        output: folder to write to.
        split: validation pairs, or train pairs with labels as trained.
        checkpoint: which of the folder ``checkpoints``, by its name without .ckpt.

    Returns:
        Two tables with one row per run: ``label``, ``run``, ``method``, ``noise_rate``, ``step``, ``split``,
        ``pairs``, and for runs with weights the columns of ``agreement``, and ``slope_at_u`` (the same
        slope where Theorem 1's optimum is taken at s = u: the weights' own steepness; NaN for weights that
        do not depend on u); of all runs ``ece_eta`` (of sigma(u) against eta)
        and ``ece_noisy`` (against the labels as trained, or, on validation pairs, their probability q). All
        have 95% intervals, ``..._low`` and ``..._high``, from a bootstrap over prompts.

    Raises:
        UserError: a run's files are missing or do not fit, its pairs have no eta, or its noise has several
            rates.
    """
    folder = Path(output)
    if folder.is_file():
        raise UserError(f"output is {output}, which is a file; name a folder.")
    # All of them before the first is computed.
    found = [find_run(run, checkpoint) for run in dict.fromkeys(runs)]
    labels = _labels(found)
    pairs: dict[str, pd.DataFrame] = {}
    ratios, errors, notes = [], [], []
    for label, run in zip(labels, found, strict=True):
        module, data, step = load_run(run, as_trained=True)
        if not data.uniform_noise:
            raise UserError(
                f"The labels of {run.folder} were not flipped at one rate ({run.noise}), which Theorem 1's "
                "optimum is computed from; name runs with a noise_rate."
            )
        data.setup("fit" if split == "train" else "validate")
        known = data.train_pairs if split == "train" else data.validation_pairs
        weighting, rate = module.weighting, data.noise_rate
        frame = judged_pairs(module, known, rate, run.folder)
        frame["noisy"] = 1.0 if split == "train" else frame["q"]
        pairs[label] = frame
        names = {"label": label, "run": run.folder, "method": module.method, "noise_rate": rate}
        names |= {"step": step, "split": split, "pairs": len(frame)}
        errors.append(names | with_intervals(_calibration, *_columns(frame, "prompt", "u", "eta", "noisy")))
        if not weighs(weighting):
            notes.append(f"{label}: left out of the weights, {type(weighting).__name__} has none to compare.")
        elif rate == 0:
            notes.append(f"{label}: left out of the weights, without noise every optimal log-ratio is 0.")
        else:
            of_weights = _columns(frame, "prompt", "optimum", "optimum_at_u", "log_ratio")
            ratios.append(names | with_intervals(_agreement, *of_weights))
    tables = pd.DataFrame(ratios), pd.DataFrame(errors)
    _write(folder, pairs, *tables)
    _show(folder, *tables, notes)
    return tables


def _labels(runs: Sequence[FinishedRun]) -> list[str]:
    """Names of the runs in tables and figures: method and noise, or their folders where two have the same."""
    options = [(run.model["init_args"], run.data["init_args"]) for run in runs]
    labels = [f"{m.get('method', 'dpo')}, {d.get('noise_rate', 0):.0%} noise" for m, d in options]
    folders = [Path(run.folder).resolve().name for run in runs]
    choices = (labels, folders, [run.folder for run in runs])
    return next(names for names in choices if len(set(names)) == len(names))


def _agreement(optimum: np.ndarray, at_u: np.ndarray, log_ratio: np.ndarray) -> dict[str, float]:
    return agreement(optimum, log_ratio) | {"slope_at_u": slope(at_u, log_ratio)}


def _calibration(u: np.ndarray, eta: np.ndarray, noisy: np.ndarray) -> dict[str, float]:
    return calibration_error(u, eta=eta, noisy=noisy)


def _columns(frame: pd.DataFrame, *names: str) -> list[np.ndarray]:
    return [frame[name].to_numpy() for name in names]


def _write(folder: Path, pairs: dict[str, pd.DataFrame], ratios: pd.DataFrame, errors: pd.DataFrame) -> None:
    everything = pd.concat([frame.assign(label=label) for label, frame in pairs.items()], ignore_index=True)
    write_frame(folder / PAIRS, everything)
    bins = {}
    for label, frame in pairs.items():
        u, eta, noisy = _columns(frame, "u", "eta", "noisy")
        bins[label] = reliability(u, eta=eta, noisy=noisy)
    tables = {CALIBRATION: errors}
    tables[RELIABILITY] = pd.concat([table.assign(label=label) for label, table in bins.items()])
    figures = {CALIBRATION: draw_reliability(list(bins.values()), list(bins), errors)}
    if len(ratios):
        tables[RATIOS] = ratios
        figures[RATIOS] = draw_ratios([pairs[label] for label in ratios["label"]], ratios)
    for name, table in tables.items():
        write_frame(folder / f"{name}.csv", table)
    for name, figure in figures.items():
        save_figure(figure, folder / name)


def _show(folder: Path, ratios: pd.DataFrame, errors: pd.DataFrame, notes: Sequence[str]) -> None:
    console = Console()
    shown = (
        (ratios, {"pearson": "r", "spearman": "rho", "slope": "slope", "slope_at_u": "slope at s = u"}),
        (errors, {"ece_eta": "ECE, eta", "ece_noisy": "ECE, noisy label"}),
    )
    for rows, columns in shown:
        if len(rows):
            table = rows.set_index("label")[list(columns)].rename(columns=columns)
            console.print(table.to_string(float_format="{:.3f}".format, na_rep="-"), highlight=False)
    for note in notes:
        console.print(f"  {note}", highlight=False, markup=False, style="dim")
    console.print("  95% intervals are in the tables.", highlight=False, style="dim")
    console.print(f"Tables, figures and every pair's values: {folder}", highlight=False, markup=False)


def judged_pairs(module: PreferenceModule, pairs: Any, rate: float, name: str) -> pd.DataFrame:
    """Return a run's margins and weights of N pairs, beside the true probabilities.

    Args:
        module: of the finished run; its weighting is used as it is.
        pairs: the datamodule's ``train_pairs`` or ``validation_pairs``.
        rate: probability that the noise flips a label.
        name: of the progress bar.

    Returns:
        One row per pair, in the order in which it is labelled: ``id``, ``prompt`` (its number), ``flipped``,
        ``u`` and ``delta`` (nats), ``eta`` (probability that the first response is better), ``q``
        (probability that a noisy label agrees), ``log_ratio`` (log g+ - log g- of the run's weights, NaN
        if weights do not depend on the pair), ``optimum`` (Theorem 1's) and ``optimum_at_u`` (Theorem 1's if
        u were the clean preference strength s; NaN if the weights do not depend on u).

    Raises:
        UserError: eta of a pair is unknown, or a log-probability is not finite.
    """
    found = pairs.rows["eta"][:]
    unknown = sum(value is None for value in found)
    if unknown:
        raise UserError(
            f"eta, the probability that the chosen response is better, is unknown for {unknown} of the "
            f"{len(found)} pairs of {name}; name runs of the synthetic benchmark, or add the column eta."
        )
    eta = torch.tensor(found, dtype=torch.float64).clip(_CLIP, 1 - _CLIP)
    eta = torch.where(torch.tensor(pairs.swapped), 1 - eta, eta)
    weighting, module.weighting = module.weighting, Unweighted()  # requested below, for both orders
    frame = last_pass(module, pairs, name)
    frame = frame[["id", "prompt", "flipped", "u", "delta"]]
    u, delta = (torch.tensor(frame[column].to_numpy()) for column in ("u", "delta"))
    batch = replace(pairs.batch(range(len(pairs))), eta=eta)
    at_u = two_rate_log_ratio(u, rate, rate)
    if isinstance(weighting, OracleWeights):
        at_u = torch.full_like(u, torch.nan)
    return frame.assign(
        eta=eta.numpy(),
        q=noisy_posterior(eta, rate, rate).numpy(),
        log_ratio=weight_log_ratio(weighting, u, delta, batch).numpy(),
        optimum=two_rate_log_ratio(torch.logit(eta), rate, rate).numpy(),
        optimum_at_u=at_u.numpy(),
    )


def weighs(weighting: Weighting) -> bool:
    """Return true if the weights depend on the pair's u or eta, so that g+ and g- can be compared."""
    own_network = weighting.vnet is not None and not isinstance(weighting.vnet, VNet)
    return not isinstance(weighting, (Unweighted, DropFlipped, AuditedWeights)) and not own_network


@torch.no_grad()
def weight_log_ratio(weighting: Weighting, u: Tensor, delta: Tensor, batch: PairBatch) -> Tensor:
    """(N,) log g+ - log g-: g at (Delta, u) against g at (Delta, -u), with the responses swapped.

    Args:
        weighting: of a finished run.
        u: (N,) float64 implicit reward differences.
        delta: (N,) float64 implicit reward sums, which do not depend on the order.
        batch: the N pairs with their eta, for oracle weights.

    Returns:
        NaN where ``weighs`` is false.
    """
    if not weighs(weighting):
        return torch.full_like(u, torch.nan)

    def log_weights(u: Tensor, batch: PairBatch) -> Tensor:
        nothing = torch.zeros_like(u)
        policy = LogProbs((delta + u) / 2, (delta - u) / 2)
        weights = weighting.weights(Rewards(policy, LogProbs(nothing, nothing), beta=1.0), batch)
        # Of a weight near 0 the logarithm is known better from where it came.
        if weights.a is None or weights.b is None:
            return weights.g.log()
        floor = u.new_tensor(getattr(weighting, "floor", 0.0))
        return torch.logaddexp(floor.log(), (1 - floor).log() + F.logsigmoid(weights.a * u + weights.b))

    assert batch.eta is not None
    exchanged = replace(batch, eta=1 - batch.eta)
    return (log_weights(u, batch) - log_weights(-u, exchanged)).double()


def agreement(optimum: np.ndarray, log_ratio: np.ndarray) -> dict[str, float]:
    """Return the agreement of weights' log-ratios with the optimal ones, over N pairs in both orders.

    Returns:
        ``pearson`` and ``spearman`` correlation, and ``slope`` of the weights' log-ratio on the optimal one.
    """
    ranks, other_ranks = _signed_ranks(optimum), _signed_ranks(log_ratio)
    return {
        "pearson": _cosine(optimum, log_ratio),
        "spearman": _cosine(ranks, other_ranks),
        "slope": slope(optimum, log_ratio),
    }


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Slope of the regression of y on x over both orders, whose intercept is 0."""
    return float(x @ y / (x @ x))


def _cosine(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation over both orders, where both means are 0."""
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def _signed_ranks(values: np.ndarray) -> np.ndarray:
    """(N,) ranks among the values in both orders, less their mean."""
    return rankdata(np.concatenate([values, -values]))[: len(values)] - (len(values) + 0.5)


def reliability(u: np.ndarray, **targets: np.ndarray) -> pd.DataFrame:
    """Predicted and true probabilities by tenths of sigma(u), over N pairs in both orders.

    Args:
        u: (N,) implicit reward differences.
        targets: (N,) probabilities that the first response is better, or labels (1, 0), by their names.

    Returns:
        One row per tenth, fewer where values are equal: ``predicted``, the targets' means, ``share`` of the
        2N orders.
    """
    both = np.concatenate([u, -u])
    edges = np.unique(np.quantile(both, np.linspace(0, 1, BINS + 1)[1:-1]))
    bins = np.searchsorted(edges, both, side="right")
    columns = {"predicted": expit(both)}
    columns |= {name: np.concatenate([value, 1 - value]) for name, value in targets.items()}
    size = np.bincount(bins, minlength=len(edges) + 1)
    size = np.where(size, size, np.nan)
    means = {name: np.bincount(bins, value, len(edges) + 1) / size for name, value in columns.items()}
    return pd.DataFrame({**means, "share": size / len(both)}).dropna(ignore_index=True)


def calibration_error(u: np.ndarray, **targets: np.ndarray) -> dict[str, float]:
    """``ece_...`` for each target: its mean distance from sigma(u) over the tenths, by size; 0 is perfect."""
    table = reliability(u, **targets)
    distances = table[list(targets)].sub(table["predicted"], axis=0).abs().mul(table["share"], axis=0)
    return {f"ece_{name}": float(value) for name, value in distances.sum().items()}


def with_intervals(
    measure: Callable[..., dict[str, float]],
    prompts: np.ndarray,
    *columns: np.ndarray,
    resamples: int = RESAMPLES,
    seed: int = 42,
) -> dict[str, float]:
    """Return a measure with its 95% intervals, the percentiles of a bootstrap over prompts.

    Args:
        measure: numbers by name, from the columns.
        prompts: (N,) numbers of the pairs' prompts; a resample takes all pairs of a prompt or none.
        columns: (N,) arrays.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        For each of the measure's names its value, ``..._low`` and ``..._high``.
    """
    count = int(prompts.max()) + 1
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    rows = (np.repeat(np.arange(len(prompts)), draw[prompts]) for draw in draws)
    resampled = pd.DataFrame([measure(*(column[some] for column in columns)) for some in rows])
    found: dict[str, float] = {}
    for name, value in measure(*columns).items():
        low, high = np.quantile(resampled[name], [0.025, 0.975])
        found |= {name: value, f"{name}_low": float(low), f"{name}_high": float(high)}
    return found


def draw_ratios(pairs: Sequence[pd.DataFrame], table: pd.DataFrame) -> Figure:
    """Draw log g+/g- over Theorem 1's optimum, and below over u, beside the optimum for s = u.

    The lower panel is left out for weights that do not depend on u.

    Args:
        pairs: of each run, as ``judged_pairs`` makes them.
        table: one row per run: ``label``, and what ``agreement`` returns.
    """
    figure, axes = _panels(len(pairs), 2)
    side = max(frame[name].abs().quantile(0.99) for frame in pairs for name in ("optimum", "log_ratio"))
    for frame, (_, row), (upper, lower) in zip(pairs, table.iterrows(), axes, strict=True):
        for axis, name in ((upper, "optimum"), (lower, "u")):
            _quantiles_on(axis, frame[name].to_numpy(), frame["log_ratio"].to_numpy())
            axis.set(xlim=(-side, side), ylim=(-side, side))
        upper.plot([-side, side], [-side, side], label="Theorem 1 (below: for $s = u$)", **DASHED)
        upper.set_title(row["label"], fontsize=10)
        upper.set(xlabel="optimal $\\log\\, g^+/g^-$ (nats)")
        told = f"$r$ = {row['pearson']:.2f}\n$\\rho$ = {row['spearman']:.2f}\nslope {row['slope']:.2f}"
        upper.text(0.04, 0.96, told, transform=upper.transAxes, va="top", fontsize=8)
        if np.isnan(row["slope_at_u"]):
            lower.remove()
            continue
        u, optimum = (np.concatenate([v, -v]) for v in frame[["u", "optimum_at_u"]].to_numpy().T)
        order = np.argsort(u)
        lower.plot(u[order], optimum[order], **DASHED)
        lower.set_xlabel("$u$ (nats)")
    for line in axes[::COLUMNS]:
        for axis in line:
            axis.set_ylabel("run's $\\log\\, g^+/g^-$ (nats)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    return figure


def draw_reliability(tables: Sequence[pd.DataFrame], labels: Sequence[str], errors: pd.DataFrame) -> Figure:
    """Draw the true probability, and that of a noisy label, over sigma(u) by tenths.

    Args:
        tables: of each run, as ``reliability`` makes them of ``eta`` and ``noisy``.
        labels: of the runs.
        errors: one row per run: ``ece_eta`` and ``ece_noisy``.
    """
    figure, axes = _panels(len(tables), 1)
    for table, label, (_, row), (axis,) in zip(tables, labels, errors.iterrows(), axes, strict=True):
        axis.plot([0, 1], [0, 1], label="calibrated", **DASHED)
        for name, (heading, color, marker) in KINDS.items():
            style = {"marker": marker, "color": color, "mec": "white", "markersize": 5.5, "linewidth": 1.3}
            axis.plot(table["predicted"], table[name], label=heading, **style)
        axis.set(xlim=(0, 1), ylim=(0, 1), xticks=TICKS, yticks=TICKS)
        axis.set_xlabel("$\\sigma(u)$")
        axis.set_title(label, fontsize=10)
        told = f"ECE {row['ece_eta']:.3f} ($\\eta$)\nECE {row['ece_noisy']:.3f} (noisy)"
        axis.text(0.04, 0.96, told, transform=axis.transAxes, va="top", fontsize=8)
    for (axis,) in axes[::COLUMNS]:
        axis.set_ylabel("probability")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _quantiles_on(axis: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """Median and bands of y in bins of x, both in both orders."""
    x, y = np.concatenate([x, -x]), np.concatenate([y, -y])
    parts = np.array_split(np.argsort(x, kind="stable"), _MEDIANS)
    middle = [np.median(x[part]) for part in parts]
    outer, low, median, high, other = np.array([np.quantile(y[part], QUANTILES) for part in parts]).T
    axis.fill_between(middle, outer, other, color=BLUE, alpha=0.15, linewidth=0, label="90% of the pairs")
    axis.fill_between(middle, low, high, color=BLUE, alpha=0.3, linewidth=0, label="50%")
    axis.plot(middle, median, color=BLUE, linewidth=1.6, label="median")


def _panels(runs: int, rows: int) -> tuple[Figure, list[tuple[Axes, ...]]]:
    """A figure, and the axes of each run, one below the other."""
    columns, lines = min(COLUMNS, runs), -(-runs // COLUMNS)
    # A single run's legend still needs its width.
    figure = Figure(figsize=(max(0.6 + 2.4 * columns, 5), 0.4 + 2.6 * rows * lines), layout="constrained")
    grid = figure.subplots(rows * lines, columns, squeeze=False)
    for axis in grid.flat:
        axis.set_box_aspect(1)
        axis.grid(alpha=0.3)
    places = [divmod(place, columns) for place in range(columns * lines)]
    axes = [tuple(grid[rows * line + row][column] for row in range(rows)) for line, column in places]
    for axis in (axis for unused in axes[runs:] for axis in unused):
        axis.remove()
    return figure, axes[:runs]


main = command("theory", theory_check)

if __name__ == "__main__":
    main()
