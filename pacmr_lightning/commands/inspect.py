"""Command ``pacmr inspect``: statistics of preference data, and rows as the model sees them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from rich.table import Table

from ..command_line.output import print_result
from ..command_line.plain_table import plain_table
from ..datamodules.inspection.pair_statistics import PARTS, PERCENTILES, DataStatistics, advice, inspect_pairs
from ..datamodules.inspection.token_rows import LEGEND, show_rows
from ..datamodules.sources import Source
from ..datamodules.splits import Split
from ..datamodules.tokenization import NO_AUGMENTED_PROMPT, REASONS
from ..datamodules.tokenized_pairs import TokenizedPairs
from ..datamodules.tokenizer import load_tokenizer
from ..errors import UserError, check_at_least
from ..files import local_path, write_json
from ..waiting import waiting

_CATEGORIES = 10


def inspect(source: Source, tokenizer: str, max_length: int = 768, output: str | None = None) -> None:
    """Shows statistics of preference data, its problems, and rows as a training run tokenizes them.

    Args:
        source: source of the pairs.
        tokenizer: folder or Hub id of a model.
        max_length: tokens of a prompt with its longer response; a run drops longer pairs.
        output: JSON file for all numbers.
    """
    check_at_least(2, max_length=max_length)
    if output is not None and local_path(output).is_dir():
        raise UserError(
            f"output is {output!r}, which is a folder; name a file, such as {output}/inspect.json."
        )
    loaded = load_tokenizer(tokenizer)
    with waiting("Reading and tokenizing the pairs"):
        report, kept = inspect_pairs(source, loaded, max_length)
    # The synthetic benchmark has few prompts, so shared ones are expected.
    sentences = advice(report, max_length, overlap=source.gold_reward is None)
    print_result(f"{source.name}, tokenizer {tokenizer}, max_length {max_length}", style="bold")
    for numbers_table in statistics_tables(report):
        print_result(numbers_table)
    rows, table = kept["train"]
    print_result("Three training pairs as the model sees them", style="bold")
    print_result(LEGEND, style="italic")
    for part in show_rows(TokenizedPairs(rows, loaded.pad_token_id), loaded, table["tokens"].tolist()):
        print_result(part)
    print_result()
    for sentence in sentences:
        print_result(f"! {sentence}", style="yellow")
    if output is not None:
        numbers = {"source": source.name, "tokenizer": str(tokenizer), "max_length": max_length}
        numbers |= asdict(report) | {"advice": sentences}
        try:
            write_json(output, numbers, ensure_ascii=False)
        except OSError as error:
            raise UserError(f"{output} cannot be written ({error.strerror}); name another file.") from None
        print(f"Numbers: {output}")


def statistics_tables(report: DataStatistics) -> Iterator[Table]:
    """Yield the statistics as tables."""
    splits = report.splits
    table = plain_table("", *splits)
    for sections in zip(*(_pair_numbers(split, report) for split in splits), strict=True):
        table.add_section()
        for label in sections[0]:
            table.add_row(label, *(section[label] for section in sections))
    yield table

    headings = [*(f"{p}%" for p in PERCENTILES), "max"]
    table = plain_table("percentiles of tokens, too long pairs included", *headings)
    for name, split in splits.items():
        table.add_section()
        for part in PARTS:
            table.add_row(f"{name}: {part}", *(f"{n:,}" for n in split.lengths.percentiles[part].values()))
    yield table

    limits = splits["train"].lengths.kept_at
    table = plain_table("rows kept at max_length", *(f"{limit:,}" for limit in limits))
    for name, split in splits.items():
        table.add_row(name, *(f"{share:.1%}" for share in split.lengths.kept_at.values()))
    yield table

    total: Counter[str] = Counter()
    for split in splits.values():
        total.update(split.categories)
    if total:
        table = plain_table(f"categories, kept pairs ({len(total):,} in all)", *splits)
        for category, _ in total.most_common(_CATEGORIES):
            shown = (_of(s.categories.get(category, 0), s.counts["kept"]) for s in splits.values())
            table.add_row(category, *shown)
        yield table


def _pair_numbers(split: Split, report: DataStatistics) -> list[dict[str, str]]:
    numbers = report.splits[split]
    counts, repeats, bias = numbers.counts, numbers.repeats, numbers.bias
    rows, kept = counts["rows"], counts["kept"]
    of_rows = {"rows": f"{rows:,}", "kept pairs": _of(kept, rows)}
    for reason in REASONS:
        if any(reason in other.counts for other in report.splits.values()):
            of_rows[f"  dropped, {reason}"] = _of(counts.get(reason, 0), rows)
    for name in ("flipped", "eta", "augmented_prompt", "category", "non-ASCII"):
        label = f"rows with {name}" if name != "non-ASCII" else "rows with text that is not ASCII"
        wrong = numbers.known.get(f"wrong by {name}")
        of_rows[label] = f"{numbers.known[name]:.1%}" + ("" if wrong is None else f", {wrong:.1%} wrong")
    same, alike = (
        shared.train_pairs if split == "train" else shared.validation_pairs
        for shared in (report.overlap, report.overlap_normalised)
    )
    of_kept = {
        "Of the kept pairs:": "",
        "no augmented prompt": _of(counts[NO_AUGMENTED_PROMPT], kept),
        "distinct prompts": f"{numbers.prompts:,}",
        "pairs per prompt, median and maximum": "{median:g}, {max:,}".format(**numbers.pairs_a_prompt),
        "prompt also in the other split": _of(same, kept),
        "  ignoring case and blanks": _of(alike, kept),
        "chosen response is longer": f"{bias.chosen_longer:.1%}",
        "rejected response is longer": f"{bias.rejected_longer:.1%}",
        "chosen minus rejected, median tokens": f"{bias.median_difference:+g}",
        "copies of an earlier pair": _of(repeats.copies, kept),
        "share a response with another comparison": _of(repeats.sharing, kept),
    }
    contradicting, noise = repeats.contradicting_comparisons, repeats.noise
    of_comparisons = {
        "comparisons with several labels": f"{repeats.comparisons:,} ({repeats.labels:,} labels)",
        "  whose labels contradict each other": _of(contradicting, repeats.comparisons),
        "  labels that must be wrong": _of(repeats.least_wrong, repeats.labels),
        "  label noise, if labels are independent": "-" if noise is None else f"about {noise:.1%}",
    }
    return [of_rows, of_kept, of_comparisons]


def _of(count: float, whole: float) -> str:
    return f"{count:,} ({count / whole:.1%})" if whole else f"{count:,}"
