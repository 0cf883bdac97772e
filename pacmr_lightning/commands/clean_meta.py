"""Makes a small set of pairs with clean labels: judges correct a sample of the training pairs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..command_line.parser import run_tool
from ..datamodules.chat import decode_messages
from ..datamodules.cleaned import plain_row, write_table
from ..datamodules.prompts import Split, split_row
from ..datamodules.rows import values_of
from ..datamodules.sampling import stratified_sample
from ..datamodules.sources import Source
from ..errors import UserError
from ..evaluation.answer_store import AnswerStore
from ..evaluation.conversation import TEMPLATE_COLUMNS
from ..evaluation.judging import Comparison, EndpointJudge, PairJudge, Preference, Verdict
from ..evaluation.reward_model import RewardModelJudge
from ..files import replacing

# The judges are imported for their short names on the command line.
__all__ = ["EndpointJudge", "RewardModelJudge", "clean_meta", "main"]

_ON_LABEL: dict[Preference, str] = {"first": "right", "second": "wrong", "none": "none"}
"""What a preference says of a pair's label, with the chosen response first."""
_MORE = ("augmented_prompt", "annotator", *TEMPLATE_COLUMNS)
_ORDER = pa.struct({"verdict": pa.string(), "answer": pa.string(), "problem": pa.string()})
_VERDICT = pa.struct({"judge": pa.string(), "verdict": pa.string(), "orders": pa.list_(_ORDER)})


@dataclass(frozen=True)
class _Pair:
    id: str
    category: str | None
    chat: bool
    split: Split
    more: dict[str, Any]
    """Further columns of the row that training reads, whichever response is the better one."""

    @property
    def comparison(self) -> Comparison:
        prompt = decode_messages(self.split.prompt) if self.chat else self.split.prompt
        return Comparison(prompt, self.split.chosen, self.split.rejected)


def clean_meta(
    source: Source,
    output: str,
    judges: list[PairJudge] | None = None,
    n: int = 256,
    seed: int = 42,
    store: str | None = None,
) -> None:
    """Writes a sample of the training pairs in which wrong labels are corrected.

    The sample has the categories in the proportions of the training pairs. A pair's responses are exchanged
    where all judges find the label wrong, each of them in both orders of the responses. In the embedded world
    the gold reward decides, without judges.

    The file is for ``--data.clean_meta Files --data.clean_meta.train FILE``: rows keep the ids of the
    training pairs, so that these are left out of training. ``corrected`` says where the responses were
    exchanged, ``verdicts`` what each judge said of the label as it was found.

    Args:
        source: where the training pairs come from.
        output: file to write, ``.jsonl`` or ``.parquet``.
        judges: who looks at the pairs; the paper asks three different models.
        n: pairs in the sample (paper: 256 for TL;DR, 512 for Anthropic HH).
        seed: which pairs are taken.
        store: file of the judges' answers, with which a run that was ended goes on; default: beside the
            output.

    Raises:
        UserError: there is no judge, one of them comes twice, or there is one in the embedded world; there
            are fewer than n usable pairs; the output has another ending; or a judge cannot work.
    """
    path = Path(output).expanduser()
    if path.suffix not in (".jsonl", ".parquet") or path.is_dir():
        raise UserError(f"output is {output}, but it must be a file ending in .jsonl or .parquet.")
    judges = judges or []
    if source.gold_reward is None and not judges:
        raise UserError(
            f"judges is missing, and nobody else knows which labels of {source.name} are wrong; give one or "
            "more, such as --judges+=EndpointJudge."
        )
    if source.gold_reward is not None and (judges or store):
        raise UserError(
            f"judges and store have no effect where the source is {source.name}, whose gold reward is known; "
            "leave them out."
        )
    for i, judge in enumerate(judges):
        if judge.settings in [other.settings for other in judges[:i]]:
            raise UserError(
                f"judges holds {judge.name} twice, which would say the same twice; name another model."
            )
    pairs, usable = _sample(source, n, seed)
    chat = {pair.chat for pair in pairs}
    if path.suffix == ".parquet" and len(chat) > 1:
        raise UserError(
            f"output is {output}, but Parquet cannot hold texts and chat messages in one column; give a file "
            "ending in .jsonl."
        )
    if source.gold_reward is not None:
        verdicts: list[list[Verdict]] = []
        wrong = [_prefers_rejected(source.gold_reward, pair.split) for pair in pairs]
    else:
        with AnswerStore(store or f"{path}.answers.sqlite") as answers:
            verdicts = [judge.compare([pair.comparison for pair in pairs], answers) for judge in judges]
        wrong = [all(v.preferred == "second" for v in of_pair) for of_pair in zip(*verdicts, strict=True)]
    names = [judge.name for judge in judges]
    rows = [
        _row(pair, corrected, [_told(name, of[i]) for name, of in zip(names, verdicts, strict=True)])
        for i, (pair, corrected) in enumerate(zip(pairs, wrong, strict=True))
    ]
    _write(rows, path)
    console = Console()
    if names:
        console.print(_table(names, verdicts))
    opinions = (opinion for of in verdicts for verdict in of for opinion in verdict.orders)
    unseen = {name for pair in pairs for name in TEMPLATE_COLUMNS if name in pair.more}
    if names and unseen:
        console.print(f"The judges were not shown the columns {' and '.join(sorted(unseen))}.")
    if missing := Counter(opinion.problem for opinion in opinions if opinion.answer is None):
        console.print(
            f"No answer to {missing.total()} questions (mostly: {missing.most_common(1)[0][0]}); a new run "
            "asks endpoints for them again.",
            highlight=False,
            markup=False,
        )
    console.print(
        f"{path}: {len(rows)} of {usable} usable pairs of {source.name}, {sum(wrong)} labels corrected.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _sample(source: Source, n: int, seed: int) -> tuple[list[_Pair], int]:
    """The sample, and how many pairs could have been in it."""
    rows = source.load("train")
    columns = ("id", "category", "chat", "prompt", "chosen", "rejected", *_MORE)
    pairs = []
    for name, category, chat, prompt, chosen, rejected, *more in values_of(rows, *columns):
        others = plain_row({"chat": chat, **dict(zip(_MORE, more, strict=True))})
        pairs.append(_Pair(name, category, chat, split_row(prompt, chosen, rejected, chat), others))
    usable = [pair for pair in pairs if _is_usable(pair.split)]
    # Labels are flipped by the hash of id and seed alone, and a sample must not be what the noise takes.
    names = [f"clean {pair.id}" for pair in usable]
    taken = stratified_sample(names, [pair.category for pair in usable], n, seed)
    return [usable[i] for i in taken], len(usable)


def _is_usable(split: Split) -> bool:
    prompt, chosen, rejected = (text.strip() for text in (split.prompt, split.chosen, split.rejected))
    return split.reason is None and bool(prompt and chosen and rejected) and chosen != rejected


def _prefers_rejected(gold_reward: Callable[[str, str], float], split: Split) -> bool:
    # Not the row's eta: that is the same where there is one, but this is what it is made of.
    return gold_reward(split.prompt, split.chosen) < gold_reward(split.prompt, split.rejected)


def _told(judge: str, verdict: Verdict) -> dict[str, Any]:
    orders = [
        {"verdict": _ON_LABEL[opinion.preferred], "answer": opinion.answer, "problem": opinion.problem}
        for opinion in verdict.orders
    ]
    return {"judge": judge, "verdict": _ON_LABEL[verdict.preferred], "orders": orders}


def _row(pair: _Pair, corrected: bool, verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    responses: list[Any] = [pair.split.chosen, pair.split.rejected]
    if pair.chat:
        responses = [[message] for message in pair.split.messages]
    if corrected:
        responses.reverse()
    return {
        "id": pair.id,
        "prompt": decode_messages(pair.split.prompt) if pair.chat else pair.split.prompt,
        "chosen": responses[0],
        "rejected": responses[1],
        "category": pair.category,
        **pair.more,
        "corrected": corrected,
        "verdicts": verdicts,
    }


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    if path.suffix == ".parquet":
        texts = ("id", "prompt", "chosen", "rejected", "category", *_MORE)
        types = {name: pa.string() for name in texts}
        write_table(rows, path, pa.schema(types | {"corrected": pa.bool_(), "verdicts": pa.list_(_VERDICT)}))
        return
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _table(names: list[str], verdicts: list[list[Verdict]]) -> Table:
    """What each judge found, and what it cost."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("judge", overflow="fold")
    for heading in ("right", "wrong", "none", "inconsistent", "tokens in", "tokens out", "from store"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, of in zip(names, verdicts, strict=True):
        opinions = [opinion for verdict in of for opinion in verdict.orders]
        found = [verdict.preferred for verdict in of]
        table.add_row(
            name,
            *(str(found.count(preference)) for preference in _ON_LABEL),
            f"{sum(verdict.inconsistent for verdict in of) / len(of):.1%}",
            str(sum(opinion.prompt_tokens for opinion in opinions)),
            str(sum(opinion.completion_tokens for opinion in opinions)),
            f"{sum(opinion.cached for opinion in opinions)} of {len(opinions)}",
        )
    return table


def main(arguments: list[str]) -> None:
    """``pacmr clean-meta --source CLASS --output FILE [--judges+=CLASS ...]``."""
    run_tool("clean-meta", clean_meta, arguments)
