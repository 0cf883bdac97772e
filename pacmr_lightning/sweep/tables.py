"""Tables of a sweep in the layouts of Qu et al., as Markdown, LaTeX and CSV."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import pandas as pd

from ..files import save_figure, write_text
from . import results
from .cells import Cell
from .spec import Sweep

WIN = ("win_rate", "win_score")
HEADLINE = ("gold_reward", "win_rate", "win_score", "val_accuracy", "weight_gap")
"""Measures of the tables with noise rates in rows."""
_SHOWN = results.NUMBERS | results.JUDGED
_LATEX = r"\mathbf{{{}}}", r" \pm "
_ESCAPED = str.maketrans(
    {letter: f"\\{letter}" for letter in "%_&#${}"}
    | {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
    | {"±": r"$\pm$", "β": r"$\beta$", "ε": r"$\epsilon$", "σ": r"$\sigma$", "τ": r"$\tau$"}
)


@dataclass(frozen=True)
class Value:
    """A mean and its standard error, NaN for one seed."""

    mean: float
    stderr: float
    digits: int
    best: bool = False
    interval: tuple[float, float] | None = None
    """95% interval over prompts."""

    def text(self, bold: str, plus_minus: str) -> str:
        """Format both, with the mean in ``bold`` if it is the best."""
        mean = f"{self.mean:.{self.digits}f}"
        mean = bold.format(mean) if self.best else mean
        mean = mean if math.isnan(self.stderr) else f"{mean}{plus_minus}{self.stderr:.{self.digits}f}"
        if self.interval is None:
            return mean
        low, high = (f"{bound:.{self.digits}f}" for bound in self.interval)
        return f"{mean} [{low}, {high}]"


Entry = Value | str
Line = tuple[list[str], list[tuple[str, str, float]]]
"""Labels, and row, measure and noise rate of each number."""


@dataclass
class Table:
    """A table with two heading lines: group (maybe empty) and column."""

    name: str
    caption: str
    headings: list[tuple[str, str]]
    rows: list[list[Entry]]

    def __post_init__(self) -> None:
        self._flat = [f"{group}, {own}" if group else own for group, own in self.headings]
        self._numbers = [
            any(isinstance(row[i], Value) for row in self.rows) for i in range(len(self.headings))
        ]

    def markdown(self) -> str:
        """Return the caption and the table."""
        lines = [self._flat, ["---:" if number else "---" for number in self._numbers]]
        lines += [
            [e.text("**{}**", " ± ") if isinstance(e, Value) else e or "-" for e in row] for row in self.rows
        ]
        return f"### {self.caption}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def latex(self) -> str:
        """Return a booktabs table in the layout of Qu et al."""
        headings = [tuple(part.translate(_ESCAPED) for part in heading) for heading in self.headings]
        grouped = any(group for group, _ in headings)
        columns = pd.MultiIndex.from_tuples(headings) if grouped else [own for _, own in headings]
        rows = [
            [e.translate(_ESCAPED) or "--" if isinstance(e, str) else f"${e.text(*_LATEX)}$" for e in row]
            for row in self.rows
        ]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.style.hide(axis="index").to_latex(
            environment="table*",
            position="!t",
            position_float="centering",
            caption=f"{self.caption.translate(_ESCAPED)}.",
            label=f"tab:{self.name}",
            column_format="".join("c" if number else "l" for number in self._numbers),
            multicol_align="c",
            hrules=True,
        )

    def csv(self) -> str:
        """Return unrounded numbers, each followed by its standard error, and its interval if known."""
        lines = []
        for row in self.rows:
            line: dict[str, float | str] = {}
            for heading, entry in zip(self._flat, row, strict=True):
                if isinstance(entry, str):
                    line[heading] = entry
                    continue
                line |= {heading: entry.mean, f"{heading}, standard error": entry.stderr}
                if entry.interval is not None:
                    line |= dict(zip((f"{heading}, low", f"{heading}, high"), entry.interval, strict=True))
            lines.append(line)
        return pd.DataFrame(lines).to_csv(index=False)


def write(folder: Path, found: Sequence[Table], texts: Mapping[str, str], note: str = "") -> Path:
    """Write tables (``tables.md``, ``tables/*.csv`` and .tex) and other texts; return the former's path."""
    files = {"tables.md": note + "\n".join(table.markdown() for table in found), **texts}
    for table in found:
        files |= {f"tables/{table.name}.csv": table.csv(), f"tables/{table.name}.tex": table.latex()}
    for name, text in files.items():
        write_text(folder / name, text)
    return folder / "tables.md"


def report(sweep: Sweep, done: Sequence[Cell]) -> Path:
    """Write the tables and figures of finished cells to ``report``; return the path of ``tables.md``."""
    from .figures import draw_noise, draw_vnets

    folder = Path(sweep.report or sweep.output)
    frame = results.results(sweep, done)
    texts = {
        "cells.csv": frame.to_csv(index=False),
        "differences.csv": results.differences(frame).to_csv(index=False),
    }
    judged = None
    if sweep.evaluate is not None:
        judged = results.pooled(sweep, done, {cell.name: results.row_label(sweep, cell) for cell in done})
        texts["win-rates.csv"] = judged.to_csv(index=False)
    names = [f"{row['row']} at {100 * row['noise']:g}%, seed {row['seed']}" for _, row in frame.iterrows()]
    note = ""
    for rows, words in (
        (frame["vnet_updates"].eq(0), "VNet made no update, so all weights are those of the start, in"),
        (frame["restored_step"].notna(), "KLGuard ended the run and went back to an earlier policy in"),
    ):
        if rows.any():
            note += f"{words}: {'; '.join(compress(names, rows))}.\n\n"
    page = write(folder, tables(sweep, frame, judged), texts, note)
    if (figure := draw_noise(frame)) is not None:
        save_figure(figure, folder / "figures/noise-rates")
    draw_vnets(done, folder / "figures")
    return page


def tables(sweep: Sweep, frame: pd.DataFrame, judged: pd.DataFrame | None = None) -> list[Table]:
    """Return all tables with numbers; ``frame`` is from ``results.results``, ``judged`` from ``pooled``."""
    numbers = results.seed_means(frame)
    by = "the gold reward"
    if sweep.evaluate is not None and judged is not None and len(judged):
        by = f"{sweep.evaluate.judge.name} in both orders"
        bounds = judged[["row", "noise", "measure", "low", "high"]]
        numbers = numbers.merge(bounds, "left", ["row", "noise", "measure"])
    low, high = numbers["seeds"].min(), numbers["seeds"].max()
    seeds = str(high) if low == high else f"{low} to {high}"  # cells may be missing
    over = f"mean ± standard error over {seeds} seeds" if high > 1 else "one seed"
    anchor = sweep.methods[sweep.anchor].label or sweep.anchor if sweep.anchor else ""
    known = [name for name in results.MEASURES if name in set(numbers["measure"])]
    built = []
    if set(WIN) <= set(known):
        caption = f"Pairwise evaluation against {anchor} by {by}; {over}"
        built.append(_by_method("main", caption, frame, numbers, WIN))
    if judged is not None and len(judged):
        caption = f"Win rates against {anchor} by {by}; 95% intervals over prompts"
        pooled_numbers = judged.rename(columns={"value": "mean"}).assign(stderr=math.nan)
        compared = frame[frame["row"].isin(judged["row"])]
        built.append(_by_noise("judged", caption, compared, pooled_numbers, ["row"], [*results.JUDGED]))
    for name in known:
        if name not in WIN:
            caption = f"{results.MEASURES[name].heading}; {over}"
            built.append(_by_method(name, caption, frame, numbers, [name]))
    for name, methods in sweep.comparisons.items():
        if len(part := frame[frame["method"].isin(methods)]):
            caption = f"{' and '.join(part['row'].unique())}; {over}"
            built.append(_by_noise(name, caption, part, numbers, ["row"]))
    for name, method in sweep.methods.items():
        options, part = [*results.varied_columns(sweep, name).values()], frame[frame["method"].eq(name)]
        if options and len(part):
            symbols = " and ".join(results.GREEK.get(option, option) for option in options)
            caption = f"{method.label or name} over {symbols}; {over}"
            built.append(_by_noise("-".join([name, *options]), caption, part, numbers, options))
    weighted = frame[frame[["flip_auroc", "vnet_updates"]].notna().any(axis=1)]
    if len(weighted):
        caption = f"Mean weights of unflipped and flipped training pairs, and VNet's updates; {over}"
        measures = [*results.WEIGHTS, "weight_gap", *results.VNET]
        built.append(_by_noise("learned-weights", caption, weighted, numbers, ["row"], measures))
    probed = frame[frame["probe_gap"].notna()]
    if len(probed):
        caption = f"Mean weights of the same training pairs in all runs, by the final weight function; {over}"
        built.append(_by_noise("final-weights", caption, probed, numbers, ["row"], [*results.PROBE]))
    return built


def _by_method(
    name: str, caption: str, frame: pd.DataFrame, numbers: pd.DataFrame, measures: Sequence[str]
) -> Table:
    """Methods in rows, bounds last; noise rates in columns, per measure."""
    columns = [(measure, rate) for measure in measures for rate in sorted(frame["noise"].unique())]
    headings = [("", "Method")]
    for measure, rate in columns:
        group = results.MEASURES[measure].heading if len(measures) > 1 else ""
        headings.append((group, f"{100 * rate:g}% flipped"))
    known = numbers[numbers["measure"].isin(measures)]["row"]
    rows = frame[frame["row"].isin(known)].drop_duplicates("row").sort_values("bound", kind="stable")["row"]
    lines = [([row], [(row, *column) for column in columns]) for row in rows]
    return Table(name, caption, headings, _entries(lines, frame, numbers))


def _by_noise(
    name: str,
    caption: str,
    part: pd.DataFrame,
    numbers: pd.DataFrame,
    keys: Sequence[str],
    measures: Sequence[str] = HEADLINE,
) -> Table:
    """Noise rates in rows, each with the frame's rows, named by ``keys``."""
    known = set(numbers[numbers["row"].isin(part["row"])]["measure"])
    measures = [measure for measure in measures if measure in known]
    symbols = ("Method" if key == "row" else results.GREEK.get(key, key) for key in keys)
    named = ["Task", "Noise rate", *symbols]
    headings = [("", heading) for heading in [*named, *(_SHOWN[measure].heading for measure in measures)]]
    lines = []
    for _, row in part.drop_duplicates(["row", "noise"]).sort_values("noise", kind="stable").iterrows():
        labels = [str(row["task"]), f"{100 * row['noise']:g}%", *(str(row[key]) for key in keys)]
        lines.append((labels, [(row["row"], measure, row["noise"]) for measure in measures]))
    return Table(name, caption, headings, _entries(lines, part, numbers))


def _entries(lines: Sequence[Line], frame: pd.DataFrame, numbers: pd.DataFrame) -> list[list[Entry]]:
    """Return filled lines; the largest means at the displayed precision are marked, unless all are equal."""
    numbers = numbers.dropna(subset="mean")
    measured = {(one["row"], one["measure"], one["noise"]): one for _, one in numbers.iterrows()}
    fair = set(frame[~frame["bound"]]["row"])
    shown: defaultdict[tuple[str, float], dict[str, float]] = defaultdict(dict)
    for (row, measure, rate), one in measured.items():
        if row in fair and measure in results.MEASURES:
            shown[measure, rate][row] = round(one["mean"], results.MEASURES[measure].digits)

    def entry(row: str, measure: str, rate: float) -> Entry:
        if (row, measure, rate) not in measured:
            return ""
        one, means = measured[row, measure, rate], shown[measure, rate]
        best = len(set(means.values())) > 1 and means.get(row) == max(means.values())
        # Between seeds where there are several, else between prompts.
        known = math.isnan(one["stderr"]) and not math.isnan(one.get("low", math.nan))
        interval = (one["low"], one["high"]) if known else None
        return Value(one["mean"], one["stderr"], _SHOWN[measure].digits, best, interval)

    return [[*labels, *(entry(*key) for key in keys)] for labels, keys in lines]
