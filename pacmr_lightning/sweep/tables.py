"""A table of means with their standard errors as Markdown, LaTeX and CSV.

pandas' ``to_latex`` draws no rules under groups of columns, as the paper's tables have them, and its
``to_markdown`` asks for a further package to save the four lines here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import pandas as pd


@dataclass(frozen=True)
class Value:
    """A mean and its standard error, NaN for one seed."""

    mean: float
    stderr: float
    digits: int
    best: bool = False
    signed: bool = False


Entry = Value | str
"""What stands in a table; an empty string where nothing is known."""


@dataclass
class Table:
    """Rows under headings in two lines: a group, empty for none, and the column's own."""

    name: str
    caption: str
    headings: list[tuple[str, str]]
    rows: list[list[Entry]]
    rules: tuple[int, ...] = ()
    """Rows before which LaTeX draws a line."""

    def _flat_headings(self) -> list[str]:
        return [f"{group}, {own}" if group else own for group, own in self.headings]

    def _is_number(self, column: int) -> bool:
        return any(isinstance(row[column], Value) for row in self.rows)

    def markdown(self) -> str:
        """A heading with the caption, and the table."""
        numbers = [self._is_number(i) for i in range(len(self.headings))]
        lines = [self._flat_headings(), ["---:" if number else "---" for number in numbers]]
        lines += [[_markdown(entry) for entry in row] for row in self.rows]
        return f"### {self.caption}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def latex(self) -> str:
        """A table for the package booktabs, laid out as the paper's."""
        columns = "".join("c" if self._is_number(i) else "l" for i in range(len(self.headings)))
        lines = [r"\begin{table*}[!t]", r"\centering", rf"\caption{{{_escape(self.caption)}.}}"]
        lines += [rf"\label{{tab:{self.name}}}", r"\small", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        lines += self._groups()
        lines += [" & ".join(_escape(own) for _, own in self.headings) + r" \\", r"\midrule"]
        for i, row in enumerate(self.rows):
            lines += [r"\midrule"] * (i in self.rules)
            lines.append(" & ".join(_latex(entry) for entry in row) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table*}", ""])

    def _groups(self) -> list[str]:
        """The line of the groups' headings and the rules under them; nothing where there is no group."""
        cells, rules, column = [], [], 1
        for group, members in groupby(group for group, _ in self.headings):
            size = len(list(members))
            if group:
                cells.append(rf"\multicolumn{{{size}}}{{c}}{{{_escape(group)}}}")
                rules.append(rf"\cmidrule(lr){{{column}-{column + size - 1}}}")
            else:
                cells += [""] * size
            column += size
        return [" & ".join(cells) + r" \\", "".join(rules)] if rules else []

    def csv(self) -> str:
        """Numbers in full, each column of them followed by one of standard errors."""
        columns: dict[str, list[float | None] | list[Entry]] = {}
        for i, heading in enumerate(self._flat_headings()):
            entries = [row[i] for row in self.rows]
            if self._is_number(i):
                columns[heading] = [e.mean if isinstance(e, Value) else None for e in entries]
                columns[f"{heading}, standard error"] = [
                    e.stderr if isinstance(e, Value) else None for e in entries
                ]
            else:
                columns[heading] = entries
        return pd.DataFrame(columns).to_csv(index=False)


def _markdown(entry: Entry) -> str:
    if isinstance(entry, str):
        return entry or "-"
    mean, stderr = _numbers(entry)
    return (f"**{mean}**" if entry.best else mean) + (f" ± {stderr}" if stderr else "")


def _latex(entry: Entry) -> str:
    if isinstance(entry, str):
        return _escape(entry) or "--"
    mean, stderr = _numbers(entry)
    bold = rf"\mathbf{{{mean}}}" if entry.best else mean
    return f"${bold}$" if not stderr else rf"${bold} \pm {stderr}$"


def _numbers(value: Value) -> tuple[str, str]:
    """Mean and standard error as text; the latter empty for one seed."""
    sign = "+" if value.signed else ""
    stderr = "" if math.isnan(value.stderr) else f"{value.stderr:.{value.digits}f}"
    return f"{value.mean:{sign}.{value.digits}f}", stderr


def _escape(text: str) -> str:
    return text.translate(_ESCAPED)


_ESCAPED = str.maketrans(
    {letter: f"\\{letter}" for letter in "%_&#${}"}
    | {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
    | {"±": r"$\pm$", "β": r"$\beta$", "ε": r"$\epsilon$", "σ": r"$\sigma$", "τ": r"$\tau$"}
)
