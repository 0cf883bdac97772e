"""Command ``pacmr label``: preference pairs with labels drawn from a reward."""

from typing import Any

from scipy.special import expit

from ..command_line.output import print_result
from ..datamodules.hashing import unit_hash
from ..datamodules.reading import numbered_rows
from ..errors import UserError, check_within
from ..evaluation.answer_store import content_key
from ..evaluation.conversation import message_text
from ..evaluation.response_files import (
    ResponsePair,
    output_path,
    pair_rows,
    read_responses,
)
from ..evaluation.reward_function import LexiconReward, RewardFunction
from ..files import write_json_lines

# The reward is imported for its short name on the command line.
__all__ = ["LexiconReward", "label"]


def label(
    first: str,
    second: str,
    *,
    output: str,
    reward: RewardFunction,
    temperature: float = 1.0,
    categories: str | None = None,
    seed: int = 42,
) -> None:
    """Writes preference pairs from two responses to each prompt, with labels sampled from a reward.

    Labels are Bradley-Terry samples: P(first is chosen) = sigmoid((r(first) - r(second)) / temperature). So
    some labels contradict the reward; eta in the output is the probability that the chosen response wins.
    Rows of the two files match by id, or by prompt and order. Pairs with equal or empty responses are
    dropped.

    Args:
        first: JSON Lines file with prompt and response, such as pacmr predict writes at a temperature.
        second: such a file of another seed or model.
        output: file to write, ending in .jsonl, for data.source Files.
        reward: reward function, such as LexiconReward.
        temperature: temperature of the labels, above 0, in units of the reward.
        categories: JSON Lines or Parquet file with prompt and category; a pair gets the category of its
            prompt.
        seed: seed of the labels; a label depends on it and on the pair's id only.
    """
    check_within("(0, inf)", temperature=temperature)
    path = output_path(output)
    pairs = pair_rows(read_responses(first), read_responses(second), (first, second))
    kept = [p for p in pairs if not p.identical and p.first.strip() and p.second.strip()]
    if not kept:
        raise UserError(
            f"{first} and {second} have no prompt with two different responses; sample both at a temperature "
            "above 0, with different seeds."
        )
    rows = [_row(pair, reward, temperature, seed) for pair in kept]
    if categories is not None:
        rows = _with_categories(rows, categories)
    write_json_lines(path, rows)
    against = sum(row["eta"] < 0.5 for row in rows) / len(rows)
    print_result(
        f"{path}: {len(rows):,} pairs labelled by {reward.name} at temperature {temperature:g}, with "
        f"{against:.1%} of the labels against it. {len(pairs) - len(rows):,} pairs with equal or empty "
        "responses were dropped."
    )


def _row(pair: ResponsePair, reward: RewardFunction, temperature: float, seed: int) -> dict[str, Any]:
    prompt = pair.prompt if isinstance(pair.prompt, str) else message_text(pair.prompt[-1])
    eta = float(expit((reward(prompt, pair.first) - reward(prompt, pair.second)) / temperature))
    chosen, rejected = pair.first, pair.second
    # A separate hash: prompt sampling and label noise use that of id and seed.
    if unit_hash(f"label of {pair.id}", seed) >= eta:
        chosen, rejected, eta = rejected, chosen, 1 - eta
    sides: dict[str, Any] = {"chosen": chosen, "rejected": rejected}
    if not isinstance(pair.prompt, str):
        sides = {name: [{"role": "assistant", "content": text}] for name, text in sides.items()}
    return {"id": f"{pair.id}-{seed}", "prompt": pair.prompt, **sides, "eta": eta, **pair.columns}


def _with_categories(rows: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    named: dict[str, str] = {}
    for place, row in numbered_rows(path):
        prompt, category = row.get("prompt"), row.get("category")
        if category is None:
            continue
        for name, value, kinds in (("prompt", prompt, (str, list)), ("category", category, (str, int))):
            if not isinstance(value, kinds):
                raise UserError(f"{place}: {name!r} is {value!r}, but it must be a text.")
        known = named.setdefault(content_key(prompt), str(category))
        if known != str(category):
            raise UserError(
                f"{place}: the prompt {str(prompt)[:80]!r} has the category {category!r}, but {known!r} "
                "before; give each prompt one category."
            )
    found = [{**row, "category": named.get(content_key(row["prompt"]))} for row in rows]
    if missing := [row for row in found if row["category"] is None]:
        raise UserError(
            f"{path} has no category for {len(missing)} of {len(rows)} pairs, such as one with the prompt "
            f"{str(missing[0]['prompt'])[:80]!r}; name the file that has the prompts."
        )
    return found
