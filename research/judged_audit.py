"""Gain of an audit by votes of judges and decisions of a person, in the synthetic benchmark.

    python -m research.judged_audit --output runs/judged --seeds 0 1 --table judged.csv

One DPO run per noise rate and seed is trained and audited. Judges and a person are simulated on its scores,
in seconds per cell. Runs and rows that are there are not made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.metrics import average_precision_score, roc_auc_score

from pacmr_lightning.audit.asking import pairs_to_judge
from pacmr_lightning.audit.combination import VIEWS, combined_score
from pacmr_lightning.audit.noise_rate import NoiseRate, SampleEstimate, decide, estimate_noise_rate
from pacmr_lightning.audit.scorers import BASIS
from pacmr_lightning.audit.votes import Evidence
from pacmr_lightning.commands.second_pass import SAFE_SHARE
from pacmr_lightning.embedded_world import World
from pacmr_lightning.files import replacing

from . import command

PAIRS = 6400
RATES = (0.2, 0.3, 0.4)
BUDGETS = (100, 400, 1600, PAIRS)
RESAMPLES = 100
JUDGED_SEEDS = 3
"""Judges are simulated on the first seeds, decisions on all."""
WORD = "golden"
JUDGES = {
    "errors 10%": ["0.1"],
    "errors 20%": ["0.2"],
    "errors 30%": ["0.3"],
    "three, errors 20%": ["0.2"] * 3,
    "position bias": ["position"],
    "favoured word": ["word"],
}
"""Kinds of judges by their names in the table: an error rate, or a bias in units of gold reward."""
BIAS = 2.0
SECOND = (("", 0), ("decisions", 50), ("errors 20%", 400), ("errors 20%", 1600))
"""Evidence of second passes besides u: random decisions, or judges; and pairs."""
CHOICES = ("default", "uncertain", "suspicious", "near 0", "random")


@dataclass(frozen=True)
class Scored:
    """N pairs of one run with the policy's u under the labels as trained."""

    noise: float
    seed: int
    u: np.ndarray
    views: np.ndarray
    """(N, 2) differences of reference log-probabilities and of lengths."""
    prompts: np.ndarray
    flipped: np.ndarray
    gold: np.ndarray
    """(N,) gold reward of the chosen response minus that of the rejected one, labels as trained."""
    word: np.ndarray
    """(N,) 1 if only the chosen response has the favoured word, -1 if only the rejected one."""

    @property
    def wrong(self) -> np.ndarray:
        """(N,) True for labels that contradict the gold reward."""
        return self.gold < 0


def folder_of(output: str, noise: float, seed: int) -> Path:
    """Return the folder of a run."""
    return Path(output) / f"dpo-noise{100 * noise:g}-seed{seed}"


def train(output: str, seed: int) -> None:
    """Train and audit one DPO run per noise rate, unless its audit is there."""
    sft = Path(output) / "sft"
    if not (sft / "model" / "config.json").exists():
        _pacmr(
            "fit",
            *f"--config quickstart/sft --data.source.rows 20000 --trainer.default_root_dir {sft}".split(),
        )
    for noise in RATES:
        run = folder_of(output, noise, seed)
        if (run / "audit" / "audit.json").exists():
            continue
        words = f"--config quickstart/preference --config methods/dpo --model.policy.model {sft}/model"
        words += f" --model.objective.beta 1 --seed_everything {seed} --data.seed {seed}"
        words += f" --data.noise_seed {seed} --data.noise_rate {noise} --data.source.pairs {PAIRS}"
        words += f" --data.source.pairs_seed {seed} --trainer.default_root_dir {run}"
        words += " --trainer.limit_val_batches 0 --trainer.callbacks RunSummary"
        _pacmr("fit", *words.split())
        _pacmr("audit", run, "--scorer", "policy")


def _pacmr(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "pacmr_lightning", *map(str, words)], check=True)


def second_passes(output: str, table: Path, noise: float, seeds: Sequence[int]) -> None:
    """Train second passes with soft labels from audits by ``SECOND``, and keep their gold reward."""
    done = pd.read_csv(table, keep_default_na=False).to_dict("records") if table.exists() else []
    sft = Path(output) / "sft"
    for pairs in scored(output):
        if pairs.noise != noise or pairs.seed not in seeds:
            continue
        alone = estimate_noise_rate(pairs.u, pairs.prompts, None, RESAMPLES)
        found = pd.read_parquet(folder_of(output, noise, pairs.seed) / "audit" / "pairs.parquet")
        for evidence, number in SECOND:
            keys = {"noise": noise, "seed": pairs.seed, "evidence": evidence, "number": number}
            if any({name: row[name] for name in keys} == keys for row in done):
                continue
            # Without an estimate, what refine assumes.
            rate = (
                alone
                if alone.identified
                else estimate_noise_rate(pairs.u, pairs.prompts, min(SAFE_SHARE, alone.at_most), RESAMPLES)
            )
            p_wrong = rate.wrong(pairs.u)
            if evidence == "decisions":
                p_wrong = decided(pairs, "random", number, "sample", alone).p_wrong
            elif number:
                rate = judged(pairs, evidence, CHOICES[0], number, alone)[0]
                p_wrong = rate.wrong(pairs.u)
            name = f"second-noise{100 * noise:g}-seed{pairs.seed}-{evidence[:6]}{number}"
            folder = Path(output) / name.replace(" ", "")
            folder.mkdir(exist_ok=True)
            file = folder.with_suffix(".parquet")
            found.assign(p_wrong=p_wrong).to_parquet(file)
            words = f"--config quickstart/preference --model.policy.model {sft}/model"
            words += f" --model.objective.beta 1 --seed_everything {pairs.seed} --data.seed {pairs.seed}"
            words += f" --data.noise_seed {pairs.seed} --data.noise_rate {noise} --data.source.pairs {PAIRS}"
            words += f" --data.source.pairs_seed {pairs.seed} --trainer.default_root_dir {folder}"
            words += " --model.weighting AuditedWeights --model.weighting.soft_labels true"
            words += f" --model.weighting.audit {file} --trainer.callbacks RunSummary"
            words += " --trainer.callbacks+ GoldReward --trainer.callbacks.samples 1440"
            words += " --trainer.callbacks.max_new_tokens 12"
            _pacmr("fit", *words.split())
            metrics = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["metrics"]
            names = ("gold_reward", "sequence_kl", "gold_accuracy")
            done.append(keys | {name: metrics[f"val/{name}"] for name in names})
            with replacing(table) as temporary:
                pd.DataFrame(done).to_csv(temporary, index=False, float_format="%.4f")


def scored(output: str) -> Iterator[Scored]:
    """Yield the finished runs of a folder, with what the benchmark knows of their pairs."""
    world = World(0)
    for path in sorted(Path(output).glob("dpo-*/audit/pairs.parquet")):
        noise, seed = path.parent.parent.name.removeprefix("dpo-noise").split("-seed")
        table = pd.read_parquet(path).set_index("id")
        rows = {row["id"]: row for row in world.preference_rows(PAIRS, 2 * int(seed))}
        found, word = [], []
        for name, observed in table["observed"].items():
            row = rows[str(name)]
            sides = row["chosen"], row["rejected"]
            chosen, rejected = map(str, sides if observed == "chosen" else sides[::-1])
            prompt = str(row["prompt"])
            found.append(world.gold_reward(prompt, chosen) - world.gold_reward(prompt, rejected))
            word.append((WORD in chosen) - (WORD in rejected))
        prompts = pd.factorize(np.array([str(rows[str(name)]["prompt"]) for name in table.index]))[0]
        yield Scored(
            int(noise) / 100,
            int(seed),
            table["unpulled_u"].to_numpy(),
            table[list(VIEWS)].to_numpy(),
            prompts,
            table["flipped"].to_numpy(dtype=bool),
            np.array(found),
            np.array(word),
        )


def votes_of(pairs: Scored, judges: list[str], seed: int = 0) -> np.ndarray:
    """Return (N, J) votes of simulated judges on all pairs, each asked in both orders."""
    votes = []
    for j, kind in enumerate(judges):
        rng = np.random.default_rng([seed, pairs.seed, j])
        first = second = pairs.gold  # with the chosen response shown first, and second
        if kind == "position":
            first, second = pairs.gold + BIAS, pairs.gold - BIAS
        elif kind == "word":
            first = second = pairs.gold + BIAS * pairs.word
        vote = np.where(np.sign(first) == np.sign(second), np.sign(first), 0).astype(int)
        if kind not in ("position", "word"):
            vote = np.where(rng.random(len(vote)) < float(kind), -vote, vote)
        votes.append(vote)
    return np.stack(votes, axis=1)


def chosen(pairs: Scored, alone: NoiseRate, choice: str, number: int) -> np.ndarray:
    """Return the places of the pairs to ask about."""
    if choice == "uncertain":
        return pairs_to_judge(alone, pairs.u, number * 4 // 3 + 1)[:number]
    if choice == "random":
        return np.random.default_rng(pairs.seed).permutation(len(pairs.u))[:number]
    if choice == "default":
        return pairs_to_judge(alone, pairs.u, number)
    return np.argsort(pairs.u if choice == "suspicious" else np.abs(pairs.u), kind="stable")[:number]


def result(pairs: Scored, rate: NoiseRate, suspicion: np.ndarray, p_wrong: np.ndarray) -> dict[str, object]:
    """Return the quality of a ranking, of the suspected errors, and of the noise rate, by both truths."""
    row: dict[str, object] = {
        "identified": rate.identified,
        "rate": rate.rate,
        "low": rate.low,
        "high": rate.high,
    }
    suspected = np.nan_to_num(p_wrong) > 0.5
    row["suspected"] = int(suspected.sum())
    for name, truth in (("gold", pairs.wrong), ("flipped", pairs.flipped)):
        row[f"true_{name}"] = truth.mean()
        row[f"auroc_{name}"] = roc_auc_score(truth, suspicion)
        row[f"ap_{name}"] = average_precision_score(truth, suspicion)
        row[f"precision_{name}"] = truth[suspected].mean() if suspected.any() else np.nan
    return row


def judged(
    pairs: Scored, judges: str, choice: str, number: int, alone: NoiseRate
) -> tuple[NoiseRate, np.ndarray]:
    """Return the noise rate with votes of ``judges`` on ``number`` pairs, and (N, J) votes on all pairs."""
    votes = votes_of(pairs, JUDGES[judges])
    asked = np.zeros(len(pairs.u), dtype=bool)
    asked[chosen(pairs, alone, choice, number)] = True
    evidence = Evidence(JUDGES[judges], votes * asked[:, None], asked, np.zeros(len(asked), dtype=int))
    return estimate_noise_rate(pairs.u, pairs.prompts, None, RESAMPLES, evidence), votes


def by_judges(pairs: Scored, judges: str, choice: str, number: int, alone: NoiseRate) -> dict[str, object]:
    """Return the result with votes of ``judges`` on ``number`` pairs."""
    rate, votes = judged(pairs, judges, choice, number, alone)
    assert rate.judged is not None
    row = result(pairs, rate, -rate.judged.log_odds, rate.wrong(pairs.u))
    first = rate.judged.table.iloc[0]
    row |= {
        "reliability": first["reliability"],
        "reliability_low": first["low"],
        "reliability_high": first["high"],
    }
    voted = votes[:, 0] != 0
    row["true_reliability"] = ((votes[:, 0] > 0) != pairs.wrong)[voted].mean()
    return row


@dataclass(frozen=True)
class Decided:
    """An audit with decisions."""

    rate: NoiseRate
    suspicion: np.ndarray
    p_wrong: np.ndarray
    interval: tuple[float, float] | None
    """95% interval of the rate by the sample."""


def decided(pairs: Scored, choice: str, number: int, use: str, alone: NoiseRate) -> Decided:
    """Return an audit with decisions as ``anchors`` of the model, or as a ``sample`` for the rate."""
    places = chosen(pairs, alone, choice, number)
    truth = np.zeros(len(pairs.u), dtype=int)
    truth[places] = np.where(pairs.wrong[places], -1, 1)
    u = combined_score(pairs.u, pairs.views, truth)[0]
    wrong = int(pairs.wrong[places].sum())
    read = SampleEstimate(wrong, number - wrong, 0, 0) if use == "sample" else None
    evidence = Evidence([], np.zeros((len(truth), 0), dtype=int), truth != 0, truth)
    frame = pd.DataFrame({"u": u, "unpulled_u": u, BASIS["combined"]: u, "prompt": pairs.prompts})
    rate = decide(frame, "combined", None, None, False, read, evidence).rate
    p_wrong = rate.wrong(u)
    # A decided label is fixed, so ranks put it first or last.
    fixed = np.where(truth < 0, np.inf, np.where(truth > 0, -np.inf, -rate.slope * u))
    fixed = pd.Series(fixed).rank().to_numpy()
    return Decided(rate, fixed, np.where(truth == 0, p_wrong, truth < 0), read and read.interval)


def by_decisions(pairs: Scored, choice: str, number: int, use: str, alone: NoiseRate) -> dict[str, object]:
    """Return the result of ``decided``."""
    found = decided(pairs, choice, number, use, alone)
    row = result(pairs, found.rate, found.suspicion, found.p_wrong)
    if found.interval is not None:
        row["low"], row["high"] = found.interval
    return row


def cells(seed: int) -> Iterator[tuple[str, str, str, int]]:
    """Yield what to measure on a run: kind, judges or use of decisions, choice of pairs, number."""
    yield "alone", "", "", 0
    for judges in JUDGES if seed < JUDGED_SEEDS else ():
        for number in BUDGETS:
            yield "judges", judges, CHOICES[0], number
        for choice in CHOICES[1:] if judges == "errors 20%" else ():
            for number in BUDGETS[:3]:
                yield "judges", judges, choice, number
    for number in (50, 100):
        yield "decisions", "sample", "random", number
        for choice in CHOICES:
            yield "decisions", "anchors", choice, number


KEYS = ["noise", "seed", "kind", "judges", "choice", "number"]


def judged_audit(
    *, output: str, table: str, seeds: list[int] | None = None, second: str | None = None
) -> None:
    """Train runs of some seeds, and measure every cell of every run that is not in the table yet.

    Args:
        output: folder of the runs.
        table: CSV file of the results, a row per run and cell.
        seeds: seeds of pairs, label noise and adapter, to be trained; gold reward and reference stay.
        second: CSV file for the gold rewards of second passes at the highest noise rate, on these seeds.
    """
    for seed in seeds or ():
        train(output, seed)
    if second is not None:
        second_passes(output, Path(second), max(RATES), seeds or ())
    path = Path(table)
    rows = (
        pd.read_csv(path, keep_default_na=False, na_values=["nan"]).to_dict("records")
        if path.exists()
        else []
    )
    done = {tuple(str(row[name]) for name in KEYS) for row in rows}
    for pairs in scored(output):
        alone = estimate_noise_rate(pairs.u, pairs.prompts, None, RESAMPLES)
        for kind, judges, choice, number in cells(pairs.seed):
            keys = dict(zip(KEYS, (pairs.noise, pairs.seed, kind, judges, choice, number), strict=True))
            if tuple(map(str, keys.values())) in done:
                continue
            if kind == "judges":
                found = by_judges(pairs, judges, choice, number, alone)
            elif kind == "decisions":
                found = by_decisions(pairs, choice, number, judges, alone)
            else:
                found = result(pairs, alone, -pairs.u, alone.wrong(pairs.u))
            rows.append(keys | found)
        with replacing(path) as temporary:
            pd.DataFrame(rows).to_csv(temporary, index=False, float_format="%.4f", na_rep="nan")


main = command("judged_audit", judged_audit)

if __name__ == "__main__":
    main()
