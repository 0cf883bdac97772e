"""Pairs whose true labels are known: two continuations of each film review, labelled by a sentiment lexicon.

    python examples/fetch.py model runs/examples/model
    python examples/fetch.py reviews runs/examples/reviews.jsonl
    python -m examples.sentiment --output runs/examples/sentiment_tiny --prompts 512
    python -m pacmr_lightning sweep examples/sentiment_tiny.yaml

Labels are Bradley-Terry samples: P(first is chosen) = sigmoid(r(first) - r(second)). So some contradict the
lexicon; ``eta`` is the probability that the chosen response wins. ``python -m`` finds the class
``examples.sentiment.LexiconReward``, which the configs name; a reward of your own is such a class too.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scipy.special import expit

from pacmr_lightning.command_line.output import print_result
from pacmr_lightning.command_line.parser import run_script
from pacmr_lightning.datamodules.reading import numbered_rows
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.response_files import ResponsePair, pair_rows, read_responses
from pacmr_lightning.files import local_path, unit_hash, write_json_lines

CONFIG = Path(__file__).with_suffix(".yaml")
_SHIPPED = {"vader": ("vaderSentiment", "vader_lexicon.txt"), "afinn": ("afinn", "data/AFINN-en-165.txt")}
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


class LexiconReward:
    """Sum of the valences of a response's distinct words, in small letters and without punctuation.

    Each word counts once, so that repeating it gains nothing. Words outside the lexicon count 0; its entries
    of several words or of signs are ignored.

    Args:
        lexicon: "vader" (Hutto and Gilbert 2014; -4 to 4 per word), "afinn" (Nielsen, arXiv 1103.2903; -5 to
            5), both of extra ``examples``, or a file with a word, a tab and its valence in each line.

    Raises:
        UserError: the package or file is missing, or a line is no word with its valence.
    """

    def __init__(self, lexicon: str = "vader"):
        self.valences: dict[str, float] = {}
        path = _path(lexicon)
        if not path.is_file():
            raise UserError(f"lexicon is {path}, which is no file; name one, or vader or afinn.")
        for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
            word, _, rest = line.partition("\t")
            try:
                if line.strip():
                    self.valences[word.strip().casefold()] = float(rest.split("\t")[0])
            except ValueError:
                raise UserError(
                    f"{path}, line {number}: {line[:60]!r} is no word with its valence; put a tab between."
                ) from None

    def __call__(self, prompt: str, response: str) -> float:
        """Return the response's reward; the prompt does not count."""
        words = {word.casefold().replace("’", "'") for word in _WORD.findall(response)}
        return math.fsum(self.valences.get(word, 0.0) for word in words)


def _path(lexicon: str) -> Path:
    if lexicon not in _SHIPPED:
        return local_path(lexicon)
    package, file = _SHIPPED[lexicon]
    found = find_spec(package)  # only its word list is read
    if found is None or not found.submodule_search_locations:
        raise UserError(
            f"lexicon {lexicon} comes with the package {package}, which is missing; install "
            '"pacmr-lightning[examples]".'
        )
    return Path(found.submodule_search_locations[0]) / file


def sentiment(
    *,
    output: str,
    model: str = "runs/examples/model",
    reviews: str = "runs/examples/reviews.jsonl",
    prompts: int = 1600,
    prompts_seed: int = 0,
    lexicon: str = "vader",
    seed: int = 42,
) -> None:
    """Writes pairs of continuations of film reviews, with labels sampled from a lexicon's reward.

    The model samples two responses to each prompt, into responses-1.jsonl and responses-2.jsonl, which
    another call reuses. Pairs of equal or empty responses are left out.

    Args:
        output: folder for pairs.jsonl, for data.source Files, and the responses.
        model: folder or Hub id of the model.
        reviews: JSON Lines file of prompts and categories, as examples/fetch.py writes it.
        prompts: number of prompts, drawn at random.
        prompts_seed: seed of that draw.
        lexicon: vader, afinn, or a file; see LexiconReward.
        seed: seed of the labels; a label depends on it and on the pair's id only.
    """
    reward = LexiconReward(lexicon)
    categories = {row.get("prompt"): row.get("category") for _, row in numbered_rows(reviews)}
    files = [str(Path(output) / f"responses-{number}.jsonl") for number in (1, 2)]
    for number, file in enumerate(files, 1):
        if Path(file).exists():
            print(f"{file} is used as it is; delete it to draw responses by other options.", file=sys.stderr)
        else:
            options = ["--model.policy.model", model, "--model.policy.dtype", "bfloat16"]
            options += ["--data.source", "Prompts", "--data.source.file", reviews, "--data.reference", "live"]
            options += ["--data.predict_prompts", str(prompts), "--data.predict_seed", str(prompts_seed)]
            options += ["--generation.temperature", "1", "--generation.seed", str(number)]
            words = ["predict", "--config", str(CONFIG), *options, "--generation.output", file]
            # A process of its own, as a predict in a terminal is.
            done = subprocess.run([sys.executable, "-m", "pacmr_lightning", *words], check=False)
            if done.returncode:
                raise UserError(f"pacmr predict ended with status {done.returncode}; see above.")
    pairs = pair_rows(*map(read_responses, files), (files[0], files[1]))
    rows = [
        labelled(pair, reward, seed) | {"category": categories.get(pair.prompt)}
        for pair in pairs
        if not pair.identical and pair.first.strip() and pair.second.strip()
    ]
    if not rows:
        raise UserError(f"{' and '.join(files)} have no prompt with two different responses.")
    path = Path(output) / "pairs.jsonl"
    write_json_lines(path, rows)
    against = sum(row["eta"] < 0.5 for row in rows) / len(rows)
    print_result(
        f"{path}: {len(rows):,} pairs labelled by the lexicon {lexicon}, with {against:.1%} of the labels "
        f"against it. {len(pairs) - len(rows):,} pairs with equal or empty responses were dropped."
    )


def labelled(pair: ResponsePair, reward: LexiconReward, seed: int) -> dict[str, Any]:
    """Return a row of preference data: P(the first response is chosen) = sigmoid(r(first) - r(second))."""
    prompt = str(pair.prompt)
    eta = float(expit(reward(prompt, pair.first) - reward(prompt, pair.second)))
    chosen, rejected = pair.first, pair.second
    # A separate hash: prompt sampling and label noise use that of id and seed.
    if unit_hash(f"label of {pair.id}", seed) >= eta:
        chosen, rejected, eta = rejected, chosen, 1 - eta
    return {"id": f"{pair.id}-{seed}", "prompt": prompt, "chosen": chosen, "rejected": rejected, "eta": eta}


if __name__ == "__main__":
    run_script(sentiment)
