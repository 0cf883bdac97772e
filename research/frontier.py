"""Reward and accuracy of methods against KL, from a sweep over an option such as beta.

    python -m research.frontier research/sweeps/frontier.yaml

A smaller beta buys reward with KL, so rewards at one beta do not compare methods; rewards at one KL do. The
file is one of ``pacmr sweep`` with a section ``frontier``; ``given`` is the knowledge about the labels that a
method gets. Its tuning seeds run first; of the other seeds only the best options on these run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from scipy.stats import t, ttest_rel

from pacmr_lightning.commands.sweep import finish, run_cells, show
from pacmr_lightning.errors import UserError
from pacmr_lightning.files import save_figure
from pacmr_lightning.sweep.cells import Cell, cells
from pacmr_lightning.sweep.figures import COLORS, MARKERS
from pacmr_lightning.sweep.results import MEASURES, NUMBERS, results, row_label, varied_columns
from pacmr_lightning.sweep.spec import Sweep, parsed, read_yaml, sweep_of
from pacmr_lightning.sweep.state import state_of
from pacmr_lightning.sweep.tables import Entry, Table, Value, write

from . import command, write_png
from .ceiling import reward_ceiling

MATCHED = ("gold_reward", "gold_accuracy")
"""Measures that are compared, where gold rewards or probabilities are known."""
CHOSEN_BY = {"gold_reward": "gold reward", "val_accuracy": "validation accuracy"}
"""Measures that choose a method's option: gold reward, as a bound, and the one that a user has."""
OPTION = ["method", "noise", "row"]
"""Columns that identify a method's option at a noise rate."""
SURE = 0.05
"""Differences whose p after Holm's correction is under this are bold."""
HIGHEST = 5.0
"""Highest KL in a figure, in nats, unless methods are compared at a higher one."""


@dataclass
class Frontier:
    """The section ``frontier`` of a sweep file, over the option that every method varies."""

    subject: str
    """The method that all others are compared with."""
    kls: list[float]
    """KLs at which methods are compared, in nats per response."""
    tuning_seeds: list[int] = field(default_factory=list)
    """Seeds of the sweep that run all options. They give the curves, and choose each method's option
    for the others, which are reported; without any, all seeds do both."""
    ceiling: str | None = None
    """Folder of the reference in the synthetic benchmark, with ``{seed}`` for one per seed. Its exact ceiling
    is drawn beside the methods, and kept beside the folder as ceiling.csv."""
    given: dict[str, str] = field(default_factory=dict)
    """Knowledge about the labels that each method is given, by name; by default nothing."""
    coloured: list[str] = field(default_factory=list)
    """Methods with a colour and a label in the figure; the others are grey. By default the first six."""

    def block_of(self, method: str) -> str:
        """Return the block of a method in tables: the knowledge that it is given."""
        return self.given.get(method, "nothing")


def read_frontier(path: str, jobs: int | None = None) -> tuple[Sweep, Frontier]:
    """Return the sweep of a file, and its section ``frontier``.

    Raises:
        UserError: the file cannot be read, or a key or a value in it is wrong.
    """
    found = read_yaml(path)
    section = found.pop("frontier", None)
    if not isinstance(section, dict):
        raise UserError(f"{path} has no section frontier; run it with pacmr sweep.")
    methods = found["methods"] if isinstance(found.get("methods"), dict) else {}
    given = {name: method.pop("given") for name, method in methods.items() if "given" in method}
    frontier = parsed(Frontier, section | {"given": given}, f"{path}, frontier")
    sweep = sweep_of(found, path, jobs)
    if frontier.subject not in sweep.methods:
        raise UserError(
            f"{path}: frontier.subject names {frontier.subject}, which is none of the methods "
            f"({', '.join(sweep.methods)}); correct it."
        )
    if not frontier.kls or min(frontier.kls) <= 0:
        raise UserError(f"{path}: frontier.kls is {frontier.kls}, but it needs KLs above 0.")
    for seed in frontier.tuning_seeds:
        if seed not in sweep.seeds:
            raise UserError(
                f"{path}: frontier.tuning_seeds names {seed}, which is none of the seeds "
                f"({', '.join(map(str, sweep.seeds))}); add it to them, or take it out."
            )
    return sweep, frontier


def run_frontier(
    file: str,
    jobs: int | None = None,
    dry_run: bool = False,
    tables_only: bool = False,
    retry_failed: bool = False,
    numbers: str | None = None,
    figure: str | None = None,
) -> None:
    """Run a sweep over an option that buys KL; compare its methods at one KL, and each at its best.

    Finished cells are skipped, and interrupted ones continue from their last checkpoint, as in pacmr sweep.

    Args:
        file: sweep file with a section ``frontier``, such as research/sweeps/frontier.yaml.
        jobs: cells at once, instead of the file's.
        dry_run: check the file, and print the cells' commands.
        tables_only: make tables and figures of the finished cells.
        retry_failed: also run the cells that have failed.
        numbers: CSV of kept runs, such as research/numbers/frontier-tuning.csv, drawn in place of running.
        figure: PNG to draw them to.
    """
    sweep, frontier = read_frontier(file, jobs)
    if numbers or figure:
        draw_kept(sweep, frontier, numbers, figure)
        return
    found = cells(sweep)
    tuning = frontier.tuning_seeds
    if dry_run:
        some = f" at most: of seeds other than {', '.join(map(str, tuning))} only what was best on these"
        show(sweep, found, some if tuning else "")
        return
    if not tables_only:
        for cell in found:
            state_of(cell)  # what is wrong with one shows before anything runs
        decide = [cell for cell in found if not tuning or cell.seed in tuning]
        others = [cell for cell in found if tuning and cell.seed not in tuning]
        run_cells(sweep, decide, retry_failed)
        if others and (decided := [cell for cell in decide if state_of(cell) == "done"]):
            frame = results(sweep, decided)
            if note := left_out(frame, choosers(frame)):
                print(note)
            run_cells(sweep, chosen_cells(sweep, frame, others), retry_failed)
    folder = Path(sweep.report or sweep.output)
    if finish(found, lambda done: frontier_report(sweep, frontier, results(sweep, done), folder)):
        raise SystemExit(1)


def draw_kept(sweep: Sweep, frontier: Frontier, numbers: str | None, figure: str | None) -> None:
    """Draw the sweep's kept runs, without the ceiling, whose reference models they lack.

    Raises:
        UserError: one of ``numbers`` and ``figure`` is missing, or the file is no table of the sweep's runs.
    """
    if not numbers or not figure:
        raise UserError("--numbers and --figure go together; give both.")
    try:
        frame = pd.read_csv(numbers)
    except (OSError, ValueError) as error:
        raise UserError(f"--numbers {numbers} cannot be read: {error}") from error
    known = {*frame.get("method", ())} & {name for name, method in sweep.methods.items() if method.vary}
    options = {column for name in known for column in varied_columns(sweep, name).values()}
    keys, measured = [*sorted(options), "method", "noise", "seed"], ["gold_reward", "sequence_kl"]
    if lacking := [name for name in keys + measured if name not in frame]:
        raise UserError(f"--numbers {numbers} lacks the columns {', '.join(lacking)}; name another file.")
    wanted = {"method": known, "noise": sweep.noise_rates, "seed": sweep.seeds}
    frame = frame[frame[[*wanted]].isin(wanted).all(axis=1)].dropna(subset=measured)
    if frame.empty or frame.duplicated(keys).any():
        why = "no run of this sweep" if frame.empty else "several rows of one run"
        raise UserError(f"--numbers {numbers} has {why}; name another file.")
    frame = frame.assign(row=frame[keys[:-2]].astype(str).agg(" ".join, axis=1))
    drawn = draw_frontier(sweep, replace(frontier, ceiling=None), frame, "gold_reward")
    write_png(drawn, figure, 200)


def measures(frame: pd.DataFrame) -> list[str]:
    """The measures that can be compared: those of ``MATCHED`` with numbers, else validation accuracy."""
    return [name for name in MATCHED if frame[name].notna().any()] or ["val_accuracy"]


def choosers(frame: pd.DataFrame) -> list[str]:
    """The measures of ``CHOSEN_BY`` that have numbers.

    Raises:
        UserError: there is none, or no run has a KL.
    """
    if frame["sequence_kl"].isna().all():
        raise UserError(
            "A frontier compares methods at one KL, but no finished run has val/sequence_kl; add the "
            "callback GoldReward or SequenceKL to trainer.callbacks."
        )
    if found := [name for name in CHOSEN_BY if frame[name].notna().any()]:
        return found
    raise UserError(
        "A frontier compares gold rewards or validation accuracies, but no finished run has either; let runs "
        "validate (trainer.limit_val_batches above 0), or add the callback GoldReward to trainer.callbacks."
    )


def chosen_cells(sweep: Sweep, frame: pd.DataFrame, others: Sequence[Cell]) -> list[Cell]:
    """Return the reported seeds' cells with the options that were best on the tuning seeds.

    Those that were best by the first measure of ``CHOSEN_BY`` come first.

    Args:
        sweep: of the cells.
        frame: rows of ``results.results`` of the tuning seeds.
        others: cells of the reported seeds.

    Raises:
        UserError: no run has a measure to choose by, or a KL.
    """
    best = pd.concat([_best(frame, measure) for measure in choosers(frame)]).drop_duplicates()
    places = {row: place for place, row in enumerate(best.itertuples(index=False, name=None))}
    rows = {cell.name: (cell.method, cell.noise, row_label(sweep, cell)) for cell in others}
    chosen = [cell for cell in others if rows[cell.name] in places]
    return sorted(chosen, key=lambda cell: places[rows[cell.name]])


def of_tuning_seeds(frame: pd.DataFrame, tuning: Sequence[int]) -> pd.DataFrame:
    """The rows of the seeds that have runs at all options; all rows where there are no such seeds."""
    return frame[frame["seed"].isin(tuning)] if tuning else frame


def at_kls(frame: pd.DataFrame, kls: Sequence[float], names: Sequence[str] = MATCHED) -> pd.DataFrame:
    """Measures at given KLs, seed by seed.

    Between two runs of one method, noise rate and seed they are interpolated linearly in log KL; never beyond
    the runs.

    Args:
        frame: rows of ``results.results``.
        kls: in nats per response.
        names: the measures.

    Returns:
        ``method, noise, seed, kl`` and the measures; rows that no two runs enclose are missing.
    """
    rows = []
    wanted = np.log(kls)
    known = frame.dropna(subset=["sequence_kl", *names])
    for (method, noise, seed), part in known.groupby(["method", "noise", "seed"], sort=False):
        part = part.sort_values("sequence_kl")
        x = np.log(part["sequence_kl"].clip(lower=1e-12))
        inside = (wanted >= x.iloc[0]) & (wanted <= x.iloc[-1])
        for kl, place in zip(np.asarray(kls)[inside], wanted[inside], strict=True):
            values = {name: np.interp(place, x, part[name]) for name in names}
            rows.append({"method": method, "noise": noise, "seed": seed, "kl": kl, **values})
    return pd.DataFrame(rows, columns=["method", "noise", "seed", "kl", *names])


def at_best(frame: pd.DataFrame, tuning: Sequence[int], by: str) -> pd.DataFrame:
    """Each method's runs with the option that was best on the tuning seeds, at each noise rate.

    Args:
        frame: rows of ``results.results``.
        tuning: seeds that decide, and that are not reported; where none is left to report, all are.
        by: the measure that decides by its mean over these seeds.
    """
    reported = frame[~frame["seed"].isin(tuning)]
    reported = frame if reported.empty else reported
    return reported.merge(_best(of_tuning_seeds(frame, tuning), by), on=["method", "noise", "row"])


def _best(frame: pd.DataFrame, by: str) -> pd.DataFrame:
    """``OPTION`` of the rows with the highest mean over seeds, all of the same seeds."""
    whole = frame[~_lacks_a_seed(frame, by)]
    scores = whole.groupby(OPTION, sort=False)[by].mean().dropna().reset_index()
    places = scores.groupby(["method", "noise"], sort=False)[by].idxmax()
    return scores.loc[places, OPTION]


def _lacks_a_seed(frame: pd.DataFrame, by: str) -> pd.Series:
    """Return true for rows whose option lacks a seed that another option of the method has.

    Seeds differ by more than options do, so the mean over other seeds would choose by the seeds.
    """
    seeds = frame["seed"].where(frame[by].notna())
    own, every = (
        seeds.groupby([frame[key] for key in keys]).transform("nunique") for keys in (OPTION, OPTION[:2])
    )
    return own < every


def left_out(frame: pd.DataFrame, by: Sequence[str]) -> str:
    """A sentence on the options that cannot be chosen, since runs of theirs have failed; empty without any.

    Args:
        frame: rows of ``results.results`` of the seeds that decide.
        by: the measures that decide.
    """
    rows = pd.concat([frame[_lacks_a_seed(frame, measure)] for measure in by]).drop_duplicates(OPTION)
    names = [f"{row.row} ({row.noise:.0%} flipped)" for row in rows.itertuples()]
    return f"Not chosen from, as they lack results of some seeds: {'; '.join(names)}." if names else ""


def compared(
    found: pd.DataFrame, subject: str, keys: Sequence[str], names: Sequence[str] = MATCHED
) -> pd.DataFrame:
    """The subject minus each other method, seed by seed, with intervals and Holm's correction.

    Args:
        found: rows with ``method``, ``noise``, ``seed``, ``keys`` and the measures.
        subject: a method.
        keys: columns that are held fixed beside noise and seed, such as the KL.
        names: the measures.

    Returns:
        ``measure, noise, *keys, method, mean, low, high, p, p_holm, seeds``: the mean difference with its 95%
        interval (Student's t), the paired test's p, and that p after Holm's correction over the whole table.
        Differences with fewer than two seeds are left out.
    """
    rows = []
    for measure in names:
        table = found.pivot_table(measure, ["noise", *keys, "seed"], "method")
        if subject not in table:
            continue
        for other in table.columns.drop(subject):
            both = table[[subject, other]].dropna()
            for group, part in both.groupby(["noise", *keys]):
                gaps = part[subject] - part[other]
                if len(gaps) < 2:
                    continue
                half = t.ppf(0.975, len(gaps) - 1) * gaps.sem()
                rows.append(
                    {"measure": measure, **dict(zip(["noise", *keys], group, strict=True)), "method": other}
                    | {"mean": gaps.mean(), "low": gaps.mean() - half, "high": gaps.mean() + half}
                    | {"p": ttest_rel(part[subject], part[other]).pvalue, "seeds": len(gaps)}
                )
    columns = ["measure", "noise", *keys, "method", "mean", "low", "high", "p", "p_holm", "seeds"]
    return pd.DataFrame(rows).assign(p_holm=holm([row["p"] for row in rows])).reindex(columns=columns)


def holm(p: Sequence[float]) -> np.ndarray:
    """Holm's adjusted p-values: the share of families of tests in which one would be refused by chance."""
    values = np.asarray(p, dtype=float)
    order = np.argsort(values)
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)).clip(max=1)
    return adjusted


def summary(
    found: pd.DataFrame, sweep: Sweep, frontier: Frontier, keys: Sequence[str], names: Sequence[str]
) -> pd.DataFrame:
    """Mean and standard error of the measures over seeds, in blocks of the knowledge that methods are given.

    Returns:
        ``given, method, noise, *keys``, and for each measure of ``names`` (and ``sequence_kl`` where it is
        no key) its mean and ``..._stderr``; ``seeds``.
    """
    numbers = [*names, *(["sequence_kl"] if "sequence_kl" in found else [])]
    groups = found.groupby(["method", "noise", *keys], sort=False)[numbers]
    table = groups.mean().join(groups.sem().add_suffix("_stderr")).join(groups.size().rename("seeds"))
    table = table.reset_index()
    table.insert(0, "given", table["method"].map(frontier.block_of))
    order = list(dict.fromkeys(map(frontier.block_of, sweep.methods)))
    places = {name: i for i, name in enumerate(sweep.methods)}
    keyed = table.assign(block=table["given"].map(order.index), place=table["method"].map(places))
    keyed = keyed.sort_values(["noise", *keys, "block", "place"], kind="stable")
    return keyed.drop(columns=["block", "place"]).reset_index(drop=True)


def frontier_report(sweep: Sweep, frontier: Frontier, frame: pd.DataFrame, folder: Path) -> Path:
    """Write tables and figure of methods at one KL, and of each at its best.

    ``tables.md`` has all tables, ``tables/`` each of them as .csv and .tex, ``cells.csv`` every cell's
    numbers, ``frontier.csv`` means over seeds of every cell's, ``matched.csv`` and ``best-*.csv`` what tables
    are made of with ``*-differences.csv``, and ``figures/frontier`` the figure as .png and .pdf.

    Args:
        sweep: of the cells.
        frontier: what to compare.
        frame: rows of ``results.results``.
        folder: where to write.

    Returns:
        The path of ``tables.md``.

    Raises:
        UserError: no run of the tuning seeds is there, no run has a measure to choose by or a KL, or
            the ceiling cannot be drawn.
    """
    # A curve is made of runs at all options; at one KL no option is chosen by them.
    curves = of_tuning_seeds(frame, frontier.tuning_seeds)
    if curves.empty:
        seeds = ", ".join(map(str, frontier.tuning_seeds))
        raise UserError(f"No run of the tuning seeds {seeds} has finished; run them first.")
    names = measures(frame)
    matched = at_kls(curves, frontier.kls, names)
    texts = {
        "cells.csv": frame.to_csv(index=False),
        "frontier.csv": summary(curves, sweep, frontier, ["row"], names).to_csv(index=False),
    }
    found = []
    parts = [("matched", "at one KL", matched, ["kl"])]
    deciding = choosers(frame)
    for measure in deciding:
        best = at_best(frame, frontier.tuning_seeds, measure)
        parts.append((f"best-{measure}", f"at its best by {CHOSEN_BY[measure]}", best, []))
    for name, words, rows, keys in parts:
        numbers = summary(rows, sweep, frontier, keys, names)
        gaps = compared(rows, frontier.subject, keys, names)
        texts[f"{name}.csv"] = numbers.to_csv(index=False)
        texts[f"{name}-differences.csv"] = gaps.to_csv(index=False)
        found += [_values(sweep, frontier, name, words, numbers, keys, measure) for measure in names]
        found += [_gaps(sweep, frontier, name, words, gaps, keys, names, measure) for measure in names]
    note = left_out(curves, deciding)
    page = write(folder, found, texts, f"{note}\n\n" * bool(note))
    figure = draw_frontier(sweep, frontier, curves, names[0])
    save_figure(figure, folder / "figures" / "frontier")
    return page


def _cells(
    sweep: Sweep,
    frontier: Frontier,
    table: pd.DataFrame,
    keys: Sequence[str],
    entry: Callable[[pd.Series], Entry],
) -> tuple[list[tuple[str, str]], list[list[Entry]]]:
    """Return headings by noise rate and KL, and of each method its block, label and entries."""
    by = ["noise", *keys]
    columns = sorted(table[by].drop_duplicates().itertuples(index=False, name=None))
    headings = [
        (f"{noise:.0%} flipped" if key else "", f"{key[0]:g} nats" if key else f"{noise:.0%} flipped")
        for noise, *key in columns
    ]
    found = {(row["method"], *row[by]): entry(row) for _, row in table.iterrows()}
    known = [name for name in sweep.methods if name in set(table["method"])]
    rows = [
        [frontier.block_of(name), sweep.methods[name].label or name]
        + [found.get((name, *column), "") for column in columns]
        for name in known
    ]
    return headings, rows


def _values(
    sweep: Sweep,
    frontier: Frontier,
    name: str,
    words: str,
    numbers: pd.DataFrame,
    keys: Sequence[str],
    measure: str,
) -> Table:
    """Return methods in blocks of the knowledge that they are given; the best of each block is bold."""
    digits, seeds = NUMBERS[measure].digits, numbers["seeds"]
    # Seeds differ by more than methods do, so the best is one of those with all seeds.
    whole = seeds.eq(seeds.groupby(numbers["noise"]).transform("max"))
    by = [numbers[key] for key in ("given", "noise", *keys)]
    best = numbers[measure].where(whole).groupby(by).transform("max")

    def entry(row: pd.Series) -> Entry:
        value = Value(row[measure], row[f"{measure}_stderr"], digits, bool(row[measure] == best[row.name]))
        return value if whole[row.name] else f"{value.text('{}', ' ± ')} (seeds: {row['seeds']})"

    columns, rows = _cells(sweep, frontier, numbers, keys, entry)
    caption = f"{NUMBERS[measure].heading} of each method {words}; mean ± standard error over seeds"
    return Table(f"{name}-{measure}", caption, [("", "Given"), ("", "Method"), *columns], rows)


def _gaps(
    sweep: Sweep,
    frontier: Frontier,
    name: str,
    words: str,
    gaps: pd.DataFrame,
    keys: Sequence[str],
    names: Sequence[str],
    measure: str,
) -> Table:
    """The subject minus each other method, with 95% intervals."""
    part = gaps[gaps["measure"].eq(measure)]
    digits = NUMBERS[measure].digits
    columns, rows = _cells(sweep, frontier, part, keys, lambda row: _interval(row, digits))
    subject = sweep.methods[frontier.subject].label or frontier.subject
    caption = (
        f"{NUMBERS[measure].heading}: {subject} minus each method {words}, paired over seeds, with 95% "
        f"intervals; bold: p < {SURE} after Holm's correction over this table"
        f"{' and its twin' if len(names) > 1 else ''}"
    )
    headings = [("", "Given"), ("", f"{subject} minus"), *columns]
    return Table(f"{name}-{measure}-differences", caption, headings, rows)


def _interval(row: pd.Series, digits: int) -> str:
    text = f"{row['mean']:+.{digits}f} [{row['low']:+.{digits}f}, {row['high']:+.{digits}f}]"
    return f"**{text}**" if row["p_holm"] < SURE else text


def draw_frontier(sweep: Sweep, frontier: Frontier, frame: pd.DataFrame, measure: str) -> Figure:
    """Return a figure with a panel per noise rate: means over seeds with their standard errors.

    Args:
        sweep: gives labels.
        frontier: gives the coloured methods, and the reference of the ceiling.
        frame: rows of ``results.results``.
        measure: the gold reward, or an accuracy where no run has one.

    Raises:
        UserError: there is no such reference, or runs have no gold rewards to draw beside its ceiling.
    """
    if frontier.ceiling and measure != "gold_reward":
        raise UserError(
            f"The ceiling of {frontier.ceiling} has gold rewards, but no finished run has; take ceiling out "
            "of frontier, or add the callback GoldReward to trainer.callbacks."
        )
    rates = sorted(frame["noise"].unique())
    highest = max(HIGHEST, *frontier.kls)
    size = (max(5.0, 2.5 * len(rates)) + 2.6, 3.6)
    figure, axes = plt.subplots(1, len(rates), figsize=size, sharey=True, squeeze=False, layout="constrained")
    known = [name for name in sweep.methods if frame["method"].eq(name).any() and sweep.methods[name].vary]
    coloured = [name for name in frontier.coloured or known if name in known][: len(COLORS) - 1]
    pairs = zip(coloured, COLORS, strict=False)
    colors = {name: "black" if sweep.methods[name].bound else color for name, color in pairs}
    ceilings = _ceilings(frontier.ceiling, frame["seed"].unique().tolist()) if frontier.ceiling else []
    lines = []
    for axis, rate in zip(axes[0], rates, strict=True):
        if ceilings:
            _draw_ceiling(axis, ceilings, highest)
        for name in known:
            part = frame[frame["method"].eq(name) & frame["noise"].eq(rate)]
            groups = part.groupby("row")[["sequence_kl", measure]]
            line = groups.mean().join(groups.sem().add_suffix("_stderr")).sort_values("sequence_kl")
            line = line[line["sequence_kl"] <= highest]
            lines.append(line)
            if name not in colors:
                axis.plot(line["sequence_kl"], line[measure], color="0.8", lw=0.8, zorder=1)
                continue
            style = {"marker": MARKERS[coloured.index(name) % len(MARKERS)], "ms": 4, "color": colors[name]}
            style |= {"lw": 2 if name == frontier.subject else 1.3, "elinewidth": 0.8, "zorder": 3}
            style |= {"ls": "--" if sweep.methods[name].bound else "-", "yerr": line[f"{measure}_stderr"]}
            axis.errorbar(
                line["sequence_kl"], line[measure], label=sweep.methods[name].label or name, **style
            )
        axis.set(title=f"{rate:.0%} label noise", xscale="log", xlabel="KL to the reference (nats)")
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    drawn = pd.concat(lines) if lines else frame[:0]
    if len(drawn):
        low, high = drawn[measure].min(), drawn[measure].max()
        margin = 0.1 if measure == "gold_reward" else 0.01
        above = 0.35 * (high - low) if ceilings else 0
        for axis in axes[0]:
            axis.set_ylim(low - margin, high + above + margin)
            axis.set_xlim(max(0.02, 0.8 * drawn["sequence_kl"].min()), 1.2 * highest)
    axes[0, 0].set_ylabel(MEASURES[measure].heading.lower())
    figure.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside right center", frameon=False)
    seeds = frame["seed"].nunique()
    note = f"Mean ± standard error, {seeds} seeds." if seeds > 1 else "One seed."
    if others := len(known) - len(colors):
        note += f" Grey: {others} other settings."
    if ceilings:
        note += " Black: any policy, and best of 2, 4, 8, ... (exact)."
    figure.supxlabel(note, fontsize=9, color="0.3")
    return figure


def _ceilings(reference: str, seeds: Sequence[int]) -> list[pd.DataFrame]:
    """The ceiling of each seed's reference, computed where its file is missing."""
    found = []
    for seed in seeds:
        model = Path(reference.replace("{seed}", str(seed)))
        file = model.parent / "ceiling.csv"
        if not file.exists():
            reward_ceiling(str(model), output=str(file), world_seed=seed if "{seed}" in reference else 0)
        found.append(pd.read_csv(file))
    return found


def _draw_ceiling(axis: Axes, tables: list[pd.DataFrame], highest: float) -> None:
    """Draw means over seeds: at the same KLs of the best policies, and at the same n of the best of n."""
    kls = np.geomspace(0.02, highest, 200)
    lines = []
    for table in tables:
        part = table[table["curve"].eq("optimal")].sort_values("kl")
        lines.append(np.interp(kls, part["kl"], part["reward"], right=np.nan))
    axis.plot(kls, np.mean(lines, axis=0), color="black", lw=1.5, zorder=2)
    best = pd.concat(tables).query("curve == 'best of n' and parameter > 1")
    best = best.groupby("parameter")[["kl", "reward"]].mean()
    axis.plot(best["kl"], best["reward"], "k.:", lw=1)


main = command("frontier", run_frontier)

if __name__ == "__main__":
    main()
