"""Reward and accuracy against KL: what a sweep over an option such as beta says of methods.

A smaller beta takes a policy further from its reference, which buys reward with KL. So rewards at one beta
say how far methods went and not which is better; at one KL, each with the beta that takes it there, they do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.stats import t, ttest_rel

from ..errors import UserError
from .cells import Cell
from .results import row_label
from .spec import Frontier, Sweep

MATCHED = ("gold_reward", "gold_accuracy")
"""Measures that are compared, where anything is known of the truth."""
CHOSEN_BY = {"gold_reward": "gold reward", "val_accuracy": "validation accuracy"}
"""What a method's option is chosen by: the truth, as a bound, and what a user has."""
OPTION = ["method", "noise", "row"]
"""Columns that tell a method's option, at a noise rate."""


def measures(frame: pd.DataFrame) -> list[str]:
    """The measures that can be compared: those of ``MATCHED`` with numbers, else validation accuracy."""
    return [name for name in MATCHED if frame[name].notna().any()] or ["val_accuracy"]


def choosers(frame: pd.DataFrame) -> list[str]:
    """The measures of ``CHOSEN_BY`` that have numbers.

    Raises:
        UserError: there is none, or nothing tells how far runs went.
    """
    if frame["sequence_kl"].isna().all():
        raise UserError(
            "A frontier compares methods at one KL, but no finished run has val/sequence_kl; add the "
            "callback GoldReward or SequenceKL to trainer.callbacks."
        )
    if found := [name for name in CHOSEN_BY if frame[name].notna().any()]:
        return found
    raise UserError(
        "A frontier compares gold rewards or validation accuracies, but no finished run has either; let runs "
        "validate (trainer.limit_val_batches above 0), or add the callback GoldReward to trainer.callbacks."
    )


def by_seeds(frontier: Frontier | None, found: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    """The tuning seeds' cells, which all run (every cell where there are no such seeds), and the others."""
    seeds = frontier.tuning_seeds if frontier else []
    decide = [cell for cell in found if not seeds or cell.seed in seeds]
    return decide, [cell for cell in found if seeds and cell.seed not in seeds]


def chosen_cells(sweep: Sweep, frame: pd.DataFrame, others: Sequence[Cell]) -> list[Cell]:
    """Of the reported seeds' cells, those with the options that were best on the tuning seeds.

    Those that were best by the first measure of ``CHOSEN_BY`` come first.

    Args:
        sweep: of the cells.
        frame: rows of ``results.results`` of the tuning seeds.
        others: cells of the reported seeds.

    Raises:
        UserError: no run has a measure to choose by, or a KL.
    """
    best = pd.concat([_best(frame, measure) for measure in choosers(frame)]).drop_duplicates()
    places = {row: place for place, row in enumerate(best.itertuples(index=False, name=None))}
    rows = {cell.name: (cell.method, cell.noise, row_label(sweep, cell)) for cell in others}
    chosen = [cell for cell in others if rows[cell.name] in places]
    return sorted(chosen, key=lambda cell: places[rows[cell.name]])


def of_tuning_seeds(frame: pd.DataFrame, tuning: Sequence[int]) -> pd.DataFrame:
    """The rows of the seeds that have runs at all options; all rows where there are no such seeds."""
    return frame[frame["seed"].isin(tuning)] if tuning else frame


def at_kls(frame: pd.DataFrame, kls: Sequence[float], names: Sequence[str] = MATCHED) -> pd.DataFrame:
    """Measures at given KLs, seed by seed.

    Between two runs of one method, noise rate and seed they are interpolated linearly in log KL; never beyond
    the runs.

    Args:
        frame: rows of ``results.results``.
        kls: in nats a response.
        names: the measures.

    Returns:
        ``method, noise, seed, kl`` and the measures; rows that no two runs enclose are missing.
    """
    rows = []
    wanted = np.log(kls)
    known = frame.dropna(subset=["sequence_kl", *names])
    for (method, noise, seed), part in known.groupby(["method", "noise", "seed"], sort=False):
        part = part.sort_values("sequence_kl")
        x = np.log(part["sequence_kl"].clip(lower=1e-12))
        inside = (wanted >= x.iloc[0]) & (wanted <= x.iloc[-1])
        for kl, place in zip(np.asarray(kls)[inside], wanted[inside], strict=True):
            values = {name: np.interp(place, x, part[name]) for name in names}
            rows.append({"method": method, "noise": noise, "seed": seed, "kl": kl, **values})
    return pd.DataFrame(rows, columns=["method", "noise", "seed", "kl", *names])


def at_best(frame: pd.DataFrame, tuning: Sequence[int], by: str) -> pd.DataFrame:
    """Each method's runs with the option that was best on the tuning seeds, at each noise rate.

    Args:
        frame: rows of ``results.results``.
        tuning: seeds that decide, and that are not reported; where none is left to report, all are.
        by: the measure that decides by its mean over these seeds.
    """
    reported = frame[~frame["seed"].isin(tuning)]
    reported = frame if reported.empty else reported
    return reported.merge(_best(of_tuning_seeds(frame, tuning), by), on=["method", "noise", "row"])


def _best(frame: pd.DataFrame, by: str) -> pd.DataFrame:
    """``OPTION`` of the rows with the highest mean over seeds, all of the same seeds."""
    whole = frame[~_lacks_a_seed(frame, by)]
    scores = whole.groupby(OPTION, sort=False)[by].mean().dropna().reset_index()
    places = scores.groupby(["method", "noise"], sort=False)[by].idxmax()
    return scores.loc[places, OPTION]


def _lacks_a_seed(frame: pd.DataFrame, by: str) -> pd.Series:
    """Whether a row's option has no number of a seed of which another option of the method has one.

    Seeds differ by more than options do, so the mean over other seeds would choose by the seeds.
    """
    seeds = frame["seed"].where(frame[by].notna())
    own, every = (
        seeds.groupby([frame[key] for key in keys]).transform("nunique") for keys in (OPTION, OPTION[:2])
    )
    return own < every


def left_out(frame: pd.DataFrame, by: Sequence[str]) -> str:
    """A sentence on the options that cannot be chosen, since runs of theirs have failed; empty without any.

    Args:
        frame: rows of ``results.results`` of the seeds that decide.
        by: the measures that decide.
    """
    rows = pd.concat([frame[_lacks_a_seed(frame, measure)] for measure in by]).drop_duplicates(OPTION)
    names = [f"{row.row} ({row.noise:.0%} flipped)" for row in rows.itertuples()]
    return f"Not chosen from, as they lack results of some seeds: {'; '.join(names)}." if names else ""


def compared(
    found: pd.DataFrame, subject: str, keys: Sequence[str], names: Sequence[str] = MATCHED
) -> pd.DataFrame:
    """The subject minus each other method, seed by seed, with intervals and Holm's correction.

    Args:
        found: rows with ``method``, ``noise``, ``seed``, ``keys`` and the measures.
        subject: a method.
        keys: what is held alike beside noise and seed, such as the KL.
        names: the measures.

    Returns:
        ``measure, noise, *keys, method, mean, low, high, p, p_holm, seeds``: the mean difference with its 95%
        interval (Student's t), the paired test's p, and that p after Holm's correction over the whole table.
        Differences with fewer than two seeds are left out.
    """
    rows = []
    for measure in names:
        table = found.pivot_table(measure, ["noise", *keys, "seed"], "method")
        if subject not in table:
            continue
        for other in table.columns.drop(subject):
            both = table[[subject, other]].dropna()
            for group, part in both.groupby(["noise", *keys]):
                gaps = part[subject] - part[other]
                if len(gaps) < 2:
                    continue
                half = t.ppf(0.975, len(gaps) - 1) * gaps.sem()
                rows.append(
                    {"measure": measure, **dict(zip(["noise", *keys], group, strict=True)), "method": other}
                    | {"mean": gaps.mean(), "low": gaps.mean() - half, "high": gaps.mean() + half}
                    | {"p": ttest_rel(part[subject], part[other]).pvalue, "seeds": len(gaps)}
                )
    columns = ["measure", "noise", *keys, "method", "mean", "low", "high", "p", "p_holm", "seeds"]
    return pd.DataFrame(rows).assign(p_holm=holm([row["p"] for row in rows])).reindex(columns=columns)


def holm(p: Sequence[float]) -> np.ndarray:
    """Holm's adjusted p-values: the share of families of tests in which one would be refused by chance."""
    values = np.asarray(p, dtype=float)
    order = np.argsort(values)
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)).clip(max=1)
    return adjusted


def labels(sweep: Sweep) -> dict[str, str]:
    """What tables call each method."""
    return {name: method.label or name for name, method in sweep.methods.items()}


def summary(found: pd.DataFrame, sweep: Sweep, keys: Sequence[str], names: Sequence[str]) -> pd.DataFrame:
    """Mean and standard error of the measures over seeds, in the sweep's blocks of what a method is told.

    Returns:
        ``told, method, noise, *keys``, and for each measure of ``names`` (and ``sequence_kl`` where it is
        no key) its mean and ``..._stderr``; ``seeds``.
    """
    numbers = [*names, *(["sequence_kl"] if "sequence_kl" in found else [])]
    groups = found.groupby(["method", "noise", *keys], sort=False)[numbers]
    table = groups.mean().join(groups.sem().add_suffix("_stderr")).join(groups.size().rename("seeds"))
    table = table.reset_index()
    table.insert(0, "told", table["method"].map({name: m.told for name, m in sweep.methods.items()}))
    order = list(dict.fromkeys(method.told for method in sweep.methods.values()))
    places = {name: i for i, name in enumerate(sweep.methods)}
    keyed = table.assign(block=table["told"].map(order.index), place=table["method"].map(places))
    keyed = keyed.sort_values(["noise", *keys, "block", "place"], kind="stable")
    return keyed.drop(columns=["block", "place"]).reset_index(drop=True)
