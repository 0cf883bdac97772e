"""Command ``pacmr clean-meta``: judges correct a small sample of the training pairs."""

from typing import Any

from ..command_line.output import print_result
from ..datamodules.cleaned import exchanged, plain_row
from ..datamodules.columns import TIE
from ..datamodules.reading import response_text, values_of
from ..datamodules.sampling import stratified_sample
from ..datamodules.sources import Source
from ..errors import UserError
from ..evaluation import judging, reward_model  # noqa: F401 - for its judge's short name
from ..evaluation.answer_store import AnswerStore
from ..evaluation.conversation import TEMPLATE_COLUMNS
from ..evaluation.judging import Comparison, PairJudge, Preference
from ..evaluation.response_files import answers_path, output_path
from ..files import write_json_lines

_ON_LABEL: dict[Preference, str] = {"first": "right", "second": "wrong", "none": "none"}
_MORE = ("augmented_prompt", "annotator", *TEMPLATE_COLUMNS)


def clean_meta(
    source: Source, output: str, judges: list[PairJudge] | None = None, n: int = 256, seed: int = 42
) -> None:
    """Writes a sample of the training pairs with labels corrected by judges.

    The sample is stratified by category. A label is swapped if all judges, each in both orders, prefer the
    rejected response.

    The file is for ``--data.clean_meta Files --data.clean_meta.train FILE``. Rows keep their ids, so these
    pairs are excluded from training. OUTPUT.answers.sqlite keeps the judges' answers, from which the same
    command resumes. ``corrected`` marks swapped labels, ``verdicts`` has the verdict of each
    judge on the original label.

    Args:
        source: source of the training pairs.
        output: file to write, ending in ``.jsonl``.
        judges: judge models, such as EndpointJudge; Qu et al. use three different ones.
        n: pairs in the sample (Qu et al.: 256 for TL;DR, 512 for Anthropic HH).
        seed: seed of the sample.
    """
    path = output_path(output)
    source.refuse_own("output", path)
    if not judges:
        raise UserError(
            "judges is missing; give one or more, such as --judges+=EndpointJudge, or GoldJudge for the "
            "synthetic benchmark."
        )
    judging.check_distinct(judges)
    pairs, given, usable = _sample(source, n, seed)
    with AnswerStore(answers_path(path)) as answers:
        verdicts = [judge.compare(pairs, answers) for judge in judges]
    for judge, of in zip(judges, verdicts, strict=True):
        judging.check_any_verdict(judge, of)
        for line in judging.without_verdict(of):
            print(f"{judge.name}: {line}")
    wrong = [all(v.preferred == "second" for v in of_pair) for of_pair in zip(*verdicts, strict=True)]
    rows = []
    for i, (row, corrected) in enumerate(zip(given, wrong, strict=True)):
        told = [
            {"judge": judge.name, "verdict": _ON_LABEL[of[i].preferred], "orders": of[i].told(_ON_LABEL)}
            for judge, of in zip(judges, verdicts, strict=True)
        ]
        row = exchanged(row) if corrected else row
        rows.append({**row, "corrected": corrected, "verdicts": told})
    write_json_lines(path, rows)
    unseen = {name for row in given for name in TEMPLATE_COLUMNS if name in row}
    if unseen:
        print(f"Not shown to the judges: the columns {' and '.join(sorted(unseen))}.")
    print_result(
        f"{path}: {len(rows)} of {usable} usable pairs of {source.name}, {sum(wrong)} labels corrected."
    )


def _sample(source: Source, n: int, seed: int) -> tuple[list[Comparison], list[dict[str, Any]], int]:
    """Return n pairs with the chosen response first, their rows, and the number of usable pairs."""
    columns = ("reason", "label", "id", "prompt", "chosen", "rejected", "chat", *_MORE, "category")
    usable = []
    for reason, label, *values in values_of(source.load("train"), *columns):
        given = dict(zip(columns[2:], values, strict=True))
        if reason is not None or label == TIE:
            continue
        first, second = (response_text(given[side], given["chat"]) for side in ("chosen", "rejected"))
        stripped = [text.strip() for text in (given["prompt"], first, second)]
        if all(stripped) and stripped[1] != stripped[2]:
            row = plain_row(given) | {"category": given["category"]}
            usable.append((Comparison(row["prompt"], first, second), row))
    # Label noise uses the hash of id and seed alone; the sample must be independent of it.
    names = [f"clean {row['id']}" for _, row in usable]
    taken = stratified_sample(names, [row["category"] for _, row in usable], n, seed)
    return [usable[i][0] for i in taken], [usable[i][1] for i in taken], len(usable)
