"""Audits of labels that people made, checked by the other votes on the same pairs.

    python -m research.votes runs/votes.jsonl --models '[runs/smollm2-135m]' --output rows.csv

The file has single votes as labels, and counts of the other votes of each pair: ``others_for``,
``others_against``, ``others_equal``, and ``flipped``, true where most others contradict the label, null
where they do not decide. No score sees them. A prompt is a side of a debate, so its pairs are scored by
labels of other debates.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Console
from scipy.special import expit
from scipy.stats import pearsonr
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import KFold

from pacmr_lightning.audit.agreement import Agreement, agreement
from pacmr_lightning.audit.linear_probe import FOLDS, mirror_signs, probe_log_odds
from pacmr_lightning.audit.suspected import detection_quality, is_suspected
from pacmr_lightning.datamodules.reading import read_preferences
from pacmr_lightning.datamodules.tokenization import tokenize_pairs
from pacmr_lightning.datamodules.tokenized_pairs import TokenizedPairs
from pacmr_lightning.datamodules.tokenizer import load_tokenizer
from pacmr_lightning.files import content_digest, replacing, text_hash, write_frame, write_json_lines
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.numerics import AskedDtype

from . import command, write_png

SIDES = ("chosen", "rejected")
COLORS = ("0.55", "#56b4e9", "#d55e00", "#0072b2", "#009e73", "#cc79a7")
SIMILAR = 1.25
"""Longer response over shorter one, in characters, below which lengths say little."""
SHARES = (0.0, 0.2, 0.3)
"""Rates of injected flips."""
LEAST = 30
"""Checkable votes of an annotator."""


def votes(
    file: str,
    models: tuple[str, ...] = (),
    *,
    output: str | None = None,
    flips: str | None = None,
    figure: str | None = None,
    dtype: AskedDtype = "float32",
    folder: str = "runs/votes",
) -> None:
    """Measure, and print tables.

    Args:
        file: pairs with votes, JSON Lines.
        models: folders of base models for probes; their names name the rows.
        output: CSV with a row per score.
        flips: CSV with a row per score and rate of injected flips, which are all errors to be found.
        figure: PNG of expected and measured contradiction by tenths of p.
        dtype: of the models; bfloat16 is several times as fast on CPUs that have it.
        folder: keeps states of models.
    """
    pairs = pd.read_json(file, lines=True, dtype=False)
    prompts = pd.factorize(pairs["prompt"])[0]
    names = [Path(model).name for model in models]
    names = names if len(set(names)) == len(names) else [*models]
    differences = (state_differences(model, pairs, folder, dtype) for model in models)
    states = dict(zip(names, differences, strict=True))
    found = dict(baselines(pairs, prompts))
    found |= {f"probe, {name}": probe_log_odds(values, prompts) for name, values in states.items()}
    table = pd.DataFrame([measured(name, u, pairs, prompts) for name, u in found.items()])
    Console(width=220).print(table.round(3).to_string(index=False), highlight=False)
    if output is not None:
        write_frame(output, table)
    if flips is not None:
        write_frame(flips, injected(pairs, prompts, states))
    if figure is not None:
        write_png(diagram(found, pairs, prompts), figure, 200)


def state_differences(
    model: str, pairs: pd.DataFrame, folder: str, dtype: AskedDtype = "float32"
) -> np.ndarray:
    """Return (N, H) ``PolicyModel.response_states``, chosen minus rejected.

    A response's state does not depend on the other one, so each response is computed once; they are kept.
    """
    rows = text_hash(pairs[["prompt", *SIDES]].to_json(orient="values"))
    kept = Path(folder) / f"{Path(model).name}-{dtype}-{content_digest(model)[:12]}-{rows}.npy"
    if kept.exists():
        return np.load(kept)
    sides = [pairs[["prompt", side]].set_axis(["prompt", "text"], axis=1) for side in SIDES]
    texts = pd.concat(sides).drop_duplicates(ignore_index=True)
    covering = []
    for prompt, part in texts.groupby("prompt")["text"]:
        ends = [*part, *([part.iloc[0]] if len(part) % 2 else [])]
        covering += [
            {"id": str(len(covering) + i), "prompt": prompt, "chosen": a, "rejected": b}
            for i, (a, b) in enumerate(zip(ends[::2], ends[1::2], strict=True))
        ]
    path = Path(folder) / "responses.jsonl"
    write_json_lines(path, covering)
    tokenizer = load_tokenizer(model)
    tokens, _ = tokenize_pairs(read_preferences(str(path)), tokenizer, 2048)
    policy = PolicyModel(model, rank=1, dtype=dtype)
    policy.build()
    batches = TokenizedPairs(tokens, tokenizer.pad_token_id)
    states = {}
    with torch.no_grad():
        for i, row in enumerate(covering):
            both = policy.reference_states(batches.batch([i]))[0].numpy()
            states |= {(row["prompt"], row[side]): x for side, x in zip(SIDES, both, strict=True)}
    first, second = (
        np.stack([states[key] for key in zip(pairs["prompt"], pairs[side], strict=True)]) for side in SIDES
    )
    with replacing(kept) as temporary, open(temporary, "wb") as file:
        np.save(file, first - second)
    return first - second


def baselines(pairs: pd.DataFrame, prompts: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and (N,) scores without a model; all learn from labels of other prompts or pairs."""
    lengths = pairs["chosen"].str.len().to_numpy() - pairs["rejected"].str.len().to_numpy()
    yield "length", lengths.astype(float)
    words = TfidfVectorizer(min_df=5, sublinear_tf=True).fit([*pairs["chosen"], *pairs["rejected"]])
    difference = (words.transform(pairs["chosen"]) - words.transform(pairs["rejected"])).toarray()
    both = np.column_stack([difference, lengths / lengths.std()])
    yield "tf-idf and length", probe_log_odds(both, prompts)
    yield "Bradley-Terry", bradley_terry(pairs)


def bradley_terry(pairs: pd.DataFrame) -> np.ndarray:
    """(N,) log-odds by a strength of each argument, fitted to the labels of other pairs."""
    keys = [pairs["prompt"] + pairs[side] for side in SIDES]
    places = pd.factorize(pd.concat(keys))[0].reshape(2, -1)
    strength = np.zeros(len(pairs))
    for learned, judged in KFold(FOLDS, shuffle=True, random_state=0).split(strength):
        rows = np.zeros((len(learned), places.max() + 1))
        signs = mirror_signs(len(learned))
        rows[np.arange(len(learned)), places[0, learned]] = signs
        rows[np.arange(len(learned)), places[1, learned]] = -signs
        model = LogisticRegression(fit_intercept=False, C=1.0, max_iter=1000).fit(rows, signs)
        strength[judged] = model.coef_[0][places[0, judged]] - model.coef_[0][places[1, judged]]
    return strength


def measured(name: str, u: np.ndarray, pairs: pd.DataFrame, prompts: np.ndarray) -> dict[str, object]:
    """Return one row: how the other votes bear out the score u, and p by the audit."""
    found = agreement(u, prompts)
    p = found.p
    decided = pairs["flipped"].notna().to_numpy()
    wrong = pairs["flipped"].fillna(False).astype(bool).to_numpy()
    others = Others(pairs)
    suspected, quality = detected(found, u, pairs["flipped"])
    a, b = (pairs[side].str.len() for side in SIDES)
    similar = decided & (np.maximum(a, b) < SIMILAR * np.minimum(a, b)).to_numpy()
    expected, low, high = found.contradicted(suspected) if suspected.any() else (np.nan,) * 3
    tenths = np.array_split(np.argsort(p, kind="stable"), 10)
    first = np.argsort(u, kind="stable")[:100]
    row: dict[str, object] = {
        "score": name,
        "pairs": len(u),
        "auroc": quality["auroc"],
        "average_precision": quality["average_precision"],
        "auroc_similar_length": roc_auc_score(wrong[similar], -u[similar]),
        "suspected": quality["suspected"],
        "expected": expected,
        "low": low,
        "high": high,
        "others": others.share(suspected),
        "majority": quality["precision"],
        "recall": quality["recall"],
        "first_100_majority": wrong[first][decided[first]].mean(),
        "first_100_others": others.share(first),
        "all_expected": (1 - p).mean(),
        "all_others": others.share(np.ones(len(u), bool)),
        "largest_error_of_a_tenth": max(abs((1 - p[part]).mean() - others.share(part)) for part in tenths),
        "rate_of_flips": found.rate,
        "rate_identified": found.identified,
    }
    learned = confident_learning(u * found.slope, pairs["id"].tolist())
    row["cleanlab_suspected"] = int(learned.sum())
    row["cleanlab_majority"] = wrong[learned & decided].mean()
    row |= annotators(p, pairs, decided, wrong, others)
    return row


def confident_learning(u: np.ndarray, ids: list[str]) -> np.ndarray:
    """Return a mask of suspected label errors by cleanlab's confident learning on sigmoid(u).

    It needs two classes, so a hash of the id puts the chosen response first or second.
    """
    from cleanlab.filter import find_label_issues

    turned = np.array([hashlib.blake2b(pair.encode(), digest_size=1).digest()[0] % 2 for pair in ids])
    first = expit(np.where(turned, -u, u))
    return find_label_issues(turned, np.stack([first, 1 - first], axis=1), n_jobs=1)


def detected(found: Agreement, u: np.ndarray, flipped: pd.Series) -> tuple[np.ndarray, dict[str, float]]:
    """Return a mask of the suspected labels, and ``detection_quality`` by (N,) ``flipped``."""
    suspected = is_suspected(found, np.zeros(len(u), bool), 0.5)
    return suspected, detection_quality(u, suspected, flipped)


def injected(pairs: pd.DataFrame, prompts: np.ndarray, states: dict[str, np.ndarray]) -> pd.DataFrame:
    """Return one row per score and rate of ``SHARES``; scores learn from the labels with the flips.

    The errors to be found are the flips, and at a rate of 0 the labels that most others contradict.
    """
    rows = []
    for share in SHARES:
        flip = np.random.default_rng(1).random(len(pairs)) < share
        sides = {side: np.where(flip, pairs[other], pairs[side]) for side, other in (SIDES, SIDES[::-1])}
        turned = pairs.assign(**sides)
        scores = dict(baselines(turned, prompts))
        sign = np.where(flip, -1, 1)[:, None]
        scores |= {
            f"probe, {name}": probe_log_odds(values * sign, prompts) for name, values in states.items()
        }
        truth = pd.Series(flip) if share else pairs["flipped"]
        for name, u in scores.items():
            found = agreement(u, prompts, resamples=20)
            _, quality = detected(found, u, truth)
            rates = {"rate_of_flips": found.rate, "rate_identified": found.identified}
            rows.append({"score": name, "flips": share, **quality, **rates})
    return pd.DataFrame(rows)


def diagram(found: dict[str, np.ndarray], pairs: pd.DataFrame, prompts: np.ndarray) -> Figure:
    """Return a reliability diagram of some scores, by tenths of p over all pairs."""
    drawing = Figure(figsize=(5, 4.6), layout="constrained")
    axis = drawing.subplots()
    axis.axline((0, 0), slope=1, color="0.6", linewidth=1, linestyle=":")
    others = Others(pairs)
    for color, (name, u) in zip(COLORS, found.items(), strict=False):
        p = agreement(u, prompts, resamples=0).p
        tenths = np.array_split(np.argsort(p, kind="stable"), 10)
        expected = [(1 - p[part]).mean() for part in tenths]
        measured = [others.share(part) for part in tenths]
        axis.plot(expected, measured, marker="o", color=color, label=name)
    axis.set(xlim=(0, 0.8), ylim=(0, 0.8), aspect="equal")
    axis.set_xlabel("expected: another annotator contradicts the label")
    axis.set_ylabel("measured: share of the other votes against it")
    axis.legend(frameon=False, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
    return drawing


class Others:
    """The other votes on each pair; a vote for neither side counts half."""

    def __init__(self, pairs: pd.DataFrame):
        self.against = (pairs["others_against"] + pairs["others_equal"] / 2).to_numpy()
        self.number = pairs[["others_for", "others_against", "others_equal"]].sum(axis=1).to_numpy()

    def share(self, which: np.ndarray) -> float:
        """Return the share of the other votes on some pairs that contradict the label."""
        return float(self.against[which].sum() / max(self.number[which].sum(), 1))


def annotators(
    p: np.ndarray, pairs: pd.DataFrame, decided: np.ndarray, wrong: np.ndarray, others: Others
) -> dict[str, float]:
    """Return how the mean of 1 - p of an annotator's labels agrees with what the others say of them."""
    rows = []
    for places in pairs.groupby("annotator").indices.values():
        if decided[places].sum() >= LEAST:
            checked = places[decided[places]]
            rows.append(((1 - p[places]).mean(), wrong[checked].mean(), others.share(places)))
    if len(rows) < 5:
        return {}
    expected, majority, by_others = np.array(rows).T
    return {
        "annotators": len(rows),
        "annotators_correlation": float(pearsonr(expected, majority).statistic),
        "annotators_error": float(np.abs(expected - by_others).mean()),
    }


main = command("votes", votes)

if __name__ == "__main__":
    main()
