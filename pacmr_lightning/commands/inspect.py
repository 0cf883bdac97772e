"""Looks at preference data: what is kept, lengths, repeats, contradictions, rows as the model sees them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..command_line.parser import run_tool
from ..datamodules.inspection.advice import advice
from ..datamodules.inspection.report import PARTS, PERCENTILES, Report, SplitReport, inspect_pairs
from ..datamodules.inspection.token_rows import LEGEND, show_rows
from ..datamodules.pairs import Pairs
from ..datamodules.sources import Source
from ..datamodules.tokenization import NO_SECOND_VIEW, REASONS
from ..datamodules.tokenizer import load_tokenizer
from ..errors import UserError
from ..files import replacing

_CATEGORIES = 10
"""Categories that are printed; the file has all of them."""


def inspect(source: Source, tokenizer: str, max_length: int = 768, output: str | None = None) -> None:
    """Shows what a training run would make of a dataset, and what is odd about the data.

    Args:
        source: where the pairs come from.
        tokenizer: a model's folder or Hub id.
        max_length: tokens of a prompt with its longer response; a run drops longer pairs.
        output: also write all numbers to this file, as JSON.

    Raises:
        UserError: an option is wrong, the data cannot be read, none of a split's pairs can be used, or the
            file cannot be written.
    """
    if max_length < 2:
        raise UserError(f"max_length is {max_length}, but it must be at least 2.")
    if output is not None and Path(output).is_dir():
        raise UserError(
            f"output is {output!r}, which is a folder; name a file, such as {output}/inspect.json."
        )
    loaded = load_tokenizer(tokenizer)
    report, kept = inspect_pairs(source, loaded, max_length)
    # Of a generated world the prompts are few and known; that both splits have them is no mistake.
    sentences = advice(report, max_length, overlap=source.gold_reward is None)
    console = Console(highlight=False, markup=False)
    console.print(f"{source.name}, tokenizer {tokenizer}, max_length {max_length}", style="bold")
    for numbers_table in tables(report):
        console.print(numbers_table)
    rows, table = kept["train"]
    console.print("Three training pairs as the model sees them", style="bold")
    console.print(LEGEND, style="italic")
    for part in show_rows(Pairs(rows, loaded.pad_token_id), loaded, table["tokens"].tolist()):
        console.print(part)
    console.print()
    for sentence in sentences:
        console.print(f"! {sentence}", style="yellow")
    if output is not None:
        numbers = {"source": source.name, "tokenizer": str(tokenizer), "max_length": max_length}
        try:
            with replacing(output) as temporary:
                text = json.dumps(
                    numbers | asdict(report) | {"advice": sentences}, indent=2, ensure_ascii=False
                )
                temporary.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{output} cannot be written ({error.strerror}); name another file.") from None
        console.print(f"Numbers: {output}")


def tables(report: Report) -> Iterator[Table]:
    """Everything but the rows, to print."""
    yield _pairs_table(report)
    yield _lengths_table(report)
    yield _limits_table(report)
    if any(split.categories for split in report.splits.values()):
        yield _categories_table(report)


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _of(count: float, whole: float) -> str:
    return f"{count:,} ({count / whole:.1%})" if whole else f"{count:,}"


def _pairs_table(report: Report) -> Table:
    table = _table("", *report.splits)

    def add(label: str, cell: Callable[[SplitReport], str]) -> None:
        table.add_row(label, *(cell(split) for split in report.splits.values()))

    def dropped(reason: str) -> Callable[[SplitReport], str]:
        return lambda s: _of(s.counts.get(reason, 0), s.counts["rows"])

    def with_value(name: str) -> Callable[[SplitReport], str]:
        wrong = f"wrong by {name}"
        return lambda s: (
            f"{s.known[name]:.1%}" + (f", {s.known[wrong]:.1%} wrong" if wrong in s.known else "")
        )

    add("rows", lambda s: f"{s.counts['rows']:,}")
    add("kept pairs", lambda s: _of(s.counts["kept"], s.counts["rows"]))
    for reason in REASONS:
        if any(reason in split.counts for split in report.splits.values()):
            add(f"  dropped, {reason}", dropped(reason))
    for name in ("flipped", "eta", "augmented_prompt", "category", "non-ASCII"):
        label = f"rows with {name}" if name != "non-ASCII" else "rows with text that is not ASCII"
        add(label, with_value(name))
    table.add_section()
    add("Of the kept pairs:", lambda s: "")
    add("no second view", lambda s: _of(s.counts[NO_SECOND_VIEW], s.counts["kept"]))
    add("distinct prompts", lambda s: f"{s.prompts:,}")
    add("pairs a prompt, median and most", lambda s: "{median:g}, {max:,}".format(**s.pairs_a_prompt))
    for name, label in (
        ("overlap", "prompt also in the other split"),
        ("overlap_normalised", "  or but for case and blanks"),
    ):
        found = getattr(report, name)
        pairs = {"train": found.train_pairs, "validation": found.validation_pairs}
        table.add_row(label, *(_of(pairs[split], s.counts["kept"]) for split, s in report.splits.items()))
    add("chosen response is longer", lambda s: f"{s.bias.chosen_longer:.1%}")
    add("rejected response is longer", lambda s: f"{s.bias.rejected_longer:.1%}")
    add("chosen minus rejected, median tokens", lambda s: f"{s.bias.median_difference:+g}")
    add("copies of an earlier pair", lambda s: _of(s.repeats.copies, s.counts["kept"]))
    add("share a response with another comparison", lambda s: _of(s.repeats.sharing, s.counts["kept"]))
    table.add_section()
    add(
        "comparisons with several labels",
        lambda s: f"{s.repeats.comparisons:,} ({s.repeats.labels:,} labels)",
    )
    add(
        "  whose labels contradict each other",
        lambda s: _of(s.repeats.contradicting_comparisons, s.repeats.comparisons),
    )
    add("  labels that must be wrong", lambda s: _of(s.repeats.least_wrong, s.repeats.labels))
    add(
        "  label noise, if labels are independent",
        lambda s: "-" if s.repeats.noise is None else f"about {s.repeats.noise:.1%}",
    )
    return table


def _lengths_table(report: Report) -> Table:
    headings = [*(f"{p}%" for p in PERCENTILES), "max"]
    table = _table("percentiles of tokens, too long pairs included", *headings)
    for name, split in report.splits.items():
        table.add_section()
        for part in PARTS:
            table.add_row(f"{name}: {part}", *(f"{n:,}" for n in split.lengths.percentiles[part].values()))
    return table


def _limits_table(report: Report) -> Table:
    limits = next(iter(report.splits.values())).lengths.kept_at
    table = _table("rows kept at max_length", *(f"{limit:,}" for limit in limits))
    for name, split in report.splits.items():
        table.add_row(name, *(f"{share:.1%}" for share in split.lengths.kept_at.values()))
    return table


def _categories_table(report: Report) -> Table:
    total: Counter[str] = Counter()
    for split in report.splits.values():
        total.update(split.categories)
    table = _table(f"categories, kept pairs ({len(total):,} in all)", *report.splits)
    for category, _ in total.most_common(_CATEGORIES):
        shown = (_of(s.categories.get(category, 0), s.counts["kept"]) for s in report.splits.values())
        table.add_row(category, *shown)
    return table


def main(arguments: list[str]) -> None:
    """``pacmr inspect --source CLASS --tokenizer MODEL [options]``."""
    run_tool("inspect", inspect, arguments)
