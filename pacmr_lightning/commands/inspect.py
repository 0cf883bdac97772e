"""Command ``pacmr inspect``: statistics of preference data, and rows as the model sees them."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ..command_line.output import plain_table, print_result
from ..datamodules.inspection import LEGEND, inspect_pairs, show_rows
from ..datamodules.sources import Source, Split
from ..datamodules.token_report import NO_AUGMENTED_PROMPT, REASONS
from ..datamodules.tokenization import Tokenization
from ..datamodules.tokenizer import load_tokenizer
from ..errors import UserError, check_at_least
from ..files import local_path, write_json
from ..waiting import waiting


def inspect(
    source: Source,
    tokenizer: str,
    max_length: int = 1024,
    tokenization: Tokenization = "default",
    output: str | None = None,
) -> None:
    """Shows which rows of preference data are kept, lengths, contradicting labels, and rows as tokens.

    Args:
        source: source of the pairs.
        tokenizer: folder or Hub id of a model.
        max_length: tokens of a prompt with its longer response; a run drops longer pairs.
        tokenization: as in training.
        output: JSON file for all numbers.
    """
    check_at_least(2, max_length=max_length)
    if output is not None and local_path(output).is_dir():
        raise UserError(
            f"output is {output!r}, which is a folder; name a file, such as {output}/inspect.json."
        )
    if output is not None:
        source.refuse_own("output", output)
    loaded = load_tokenizer(tokenizer)
    with waiting("Reading and tokenizing the pairs"):
        splits, pairs = inspect_pairs(source, loaded, max_length, tokenization)
    print_result(f"{source.name}, tokenizer {tokenizer}, max_length {max_length}", style="bold")
    print_result(statistics_table(splits))
    print_result("Three training pairs as the model sees them", style="bold")
    print_result(LEGEND, style="italic")
    for part in show_rows(pairs, loaded):
        print_result(part)
    print_result()
    # Both splits have the same sentences on the template.
    for sentence in dict.fromkeys(said for numbers in splits.values() for said in numbers["warnings"]):
        print_result(f"! {sentence}", style="yellow")
    if output is not None:
        numbers = {"source": source.name, "tokenizer": tokenizer, "max_length": max_length, "splits": splits}
        try:
            write_json(output, numbers, ensure_ascii=False)
        except OSError as error:
            raise UserError(f"{output} cannot be written ({error.strerror}); name another file.") from None
        print(f"Numbers: {output}")


def statistics_table(found: Mapping[Split, dict[str, Any]]) -> Table:
    """Return the statistics of both splits as one table."""
    table = plain_table("", *found)
    reasons = [reason for reason in REASONS if any(reason in one["counts"] for one in found.values())]
    for sections in zip(*(_numbers(one, reasons) for one in found.values()), strict=True):
        table.add_section()
        for label in sections[0]:
            table.add_row(label, *(section[label] for section in sections))
    return table


def _numbers(statistics: dict[str, Any], reasons: list[str]) -> list[dict[str, str]]:
    counts, repeats, lengths = statistics["counts"], statistics["repeats"], statistics["lengths"]
    rows, kept, comparisons = counts["rows"], counts["kept"], repeats["comparisons"]
    of_rows = {"rows": f"{rows:,}", "kept pairs": _of(kept, rows)}
    of_rows |= {f"  dropped, {reason}": _of(counts.get(reason, 0), rows) for reason in reasons}
    of_lengths = {
        "tokens of a prompt, mean": f"{lengths['prompt']:.1f}",
        "tokens of chosen, rejected, mean": f"{lengths['chosen']:.1f}, {lengths['rejected']:.1f}",
        "tokens of the longest pair": f"{lengths['longest']:,}",
        "chosen response is longer": f"{lengths['chosen_longer']:.1%}",
        "rejected response is longer": f"{lengths['rejected_longer']:.1%}",
    }
    of_pairs = {
        "no augmented prompt": _of(counts[NO_AUGMENTED_PROMPT], kept),
        "distinct prompts": f"{statistics['prompts']:,}",
        "prompt also in the other split": _of(statistics["in_other_split"], kept),
        "copies of an earlier pair": _of(repeats["copies"], kept),
        "comparisons with several labels": f"{comparisons:,} ({repeats['labels']:,} labels)",
        "  whose labels contradict each other": _of(repeats["contradicting_comparisons"], comparisons),
        "  labels that must be wrong": _of(repeats["least_wrong"], repeats["labels"]),
    }
    return [of_rows, of_lengths, of_pairs]


def _of(count: float, whole: float) -> str:
    return f"{count:,} ({count / whole:.1%})" if whole else f"{count:,}"
