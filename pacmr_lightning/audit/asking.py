"""Votes of judges on some training pairs, which a score chooses."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..datamodules.chat import decode_messages
from ..datamodules.reading import response_text, values_of
from ..evaluation import judging
from ..evaluation.answer_store import AnswerStore
from ..evaluation.chat_completion import NO_TOKENS
from .agreement import Agreement
from .options import AuditOptions
from .scorers import VOTE

ANSWERS = "judge-answers.sqlite"
"""Answers of all judges, in the folder of a run's or a model's audit."""
RANDOM = 4
"""One pair in so many is drawn at random: where p is one half, verdicts say little about a judge."""
_SEED = 0
_VOTES: dict[judging.Preference, int] = {"first": 1, "second": -1, "none": 0}


def pairs_to_judge(p: np.ndarray, number: int) -> np.ndarray:
    """Return the places of at most ``number`` pairs of (N,) p: nearest to one half, and a quarter at random.

    A larger number includes the pairs of a smaller one.
    """
    uncertain = np.argsort(np.abs(p - 0.5), kind="stable")[: number - number // RANDOM]
    random = np.random.default_rng(_SEED).permutation(len(p))
    return pd.unique(np.concatenate([uncertain, random]))[:number]


def ask_judges(
    pairs: pd.DataFrame, places: np.ndarray, rows: Any, options: AuditOptions, answers: Path
) -> tuple[np.ndarray, list[str]]:
    """Return (N, J) votes of ``options.judges`` on pairs at ``places``, and notes; print the cost first.

    Each pair is judged in both orders, by its texts alone. 1 is a vote for the label, -1 against it, 0 none.

    Raises:
        UserError: a judge fails; its answers are kept in the file ``answers``, and asked for only once.
    """
    asked = pairs.iloc[places]
    items, notes = _comparisons(asked, rows), []
    votes = np.zeros((len(pairs), len(options.judges or ())), dtype=int)
    prices = options.prompt_price, options.completion_price
    with AnswerStore(answers) as store:
        for judge in options.judges or ():
            which = f"{len(items):,} of {pairs['pair'].nunique():,} pairs"
            line = f"Judging {which} in both orders with {judge.name}"
            if questions := judge.questions(items, store):
                line += f": {judging.cost_before(judge, questions, prices)}"
            print(f"{line}.", file=sys.stderr)
        for j, judge in enumerate(options.judges or ()):
            verdicts = judge.compare(items, store)
            judging.check_any_verdict(judge, verdicts)
            votes[places, j] = [_VOTES[verdict.preferred] for verdict in verdicts]
            billed, _ = judging.tokens_of(verdicts)
            if billed != NO_TOKENS:
                cost = judging.price(billed.prompt, billed.completion, prices)
                notes.append(f"{judge.name}: tokens {billed}" + (f"; cost {cost:,.2f}." if cost else "."))
            notes += [f"{judge.name}: {line}" for line in judging.without_verdict(verdicts)]
    return votes, notes


def _comparisons(asked: pd.DataFrame, rows: Any) -> list[judging.Comparison]:
    """Return pairs with the labelled response first."""
    places = {name: i for i, name in enumerate(rows["id"][:])}
    chosen = rows.select([places[name] for name in asked["id"]])
    comparisons = []
    values = values_of(chosen, "prompt", "chosen", "rejected", "chat")
    for observed, (prompt, *sides, chat) in zip(asked["observed"], values, strict=True):
        texts = [response_text(side, chat) for side in sides]
        responses = texts if observed == "chosen" else texts[::-1]
        comparisons.append(judging.Comparison(decode_messages(prompt) if chat else prompt, *responses))
    return comparisons


def reliability_of_judges(names: list[str], pairs: pd.DataFrame, found: Agreement) -> pd.DataFrame:
    """Return one row per judge: pairs asked about, verdicts, and reliability with its 95% interval."""
    pairs = pairs.drop_duplicates("pair")
    verdicts = [pairs[f"{VOTE}{j + 1}"].dropna() for j in range(len(names))]
    spoke = [bool((one != 0).any()) for one in verdicts]
    fitted = [found.reliabilities, *np.quantile(found.draws[:, 2:], (0.025, 0.975), axis=0)]
    reliability, low, high = (np.where(spoke, column, np.nan) for column in fitted)
    return pd.DataFrame(
        {
            "judge": names,
            "pairs": [len(one) for one in verdicts],
            "for_label": [int((one > 0).sum()) for one in verdicts],
            "against_label": [int((one < 0).sum()) for one in verdicts],
            "none": [int((one == 0).sum()) for one in verdicts],
            "reliability": reliability,
            "low": low,
            "high": high,
        }
    )
