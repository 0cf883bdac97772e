"""Numbers in README, docs/results.md, docs/real_text.md and the notebook are those of research/numbers."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, t

from research.frontier import at_best, at_kls, compared

ROOT = Path(__file__).parents[2]
DOCS, NUMBERS = ROOT / "docs", ROOT / "research" / "numbers"
README = (ROOT / "README.md").read_text(encoding="utf-8")
METHODS = {"DPO": "dpo", "PACMR-DPO": "pacmr", "rDPO, noise rate given": "rdpo"}
METHODS |= {"DPO, two epochs": "dpo_two_epochs", "Refined": "estimated"}
KINDS = {
    **{"symmetric": "", "annotators, more and less reliable": "_annotators"},
    **{"categories, known more and less": "_categories", "near ties": "_ties"},
    **{"resampled labels": "_temperature", "no flips": "_clean"},
    **{'15%, spurious feature: "golden"': "_golden", "spurious feature: longer response": "_length"},
}


def notebook(name: str) -> str:
    return (ROOT / "research" / "notebook" / f"{name}.md").read_text(encoding="utf-8")


def table(text: str, first_line: str) -> dict[str, list[str]]:
    """Return the cells of the table that begins with this line, by the first cell of each row."""
    rest = text.split(first_line)[1]
    lines = [line.strip() for line in rest.splitlines()[1:]]  # after the line of dashes
    lines = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    rows = [[cell.strip().replace("*", "") for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def runs(name: str, method: str, beta: float | None = None, **columns: float) -> pd.DataFrame:
    """The runs of a method, by seed."""
    frame = kept_runs(name)
    frame = frame[frame["method"] == method]
    for column, value in (columns if beta is None else columns | {"beta": beta}).items():
        frame = frame[np.isclose(frame[column], value)]
    return frame.set_index("seed")


def kept_runs(name: str) -> pd.DataFrame:
    return pd.read_csv(NUMBERS / f"{name}.csv")


def first_number(cell: str) -> float:
    return float(re.match(r"[+-]?\d+\.\d+", cell)[0])


def assert_means(reported: pd.DataFrame, reward: float, kl: float, accuracy: float) -> None:
    """Of ten seeds, as they are rounded in a table."""
    assert sorted(reported.index) == list(range(10))
    means = reported[["gold_reward", "sequence_kl", "gold_accuracy"]].mean()
    assert ((means - [reward, kl, accuracy]).abs().to_numpy() < (0.0051, 0.051, 0.00051)).all(), means


def interval(gaps: pd.Series) -> tuple[float, float, float]:
    """The mean of differences, and its 95% interval (Student's t)."""
    half = t.ppf(0.975, len(gaps) - 1) * gaps.sem()
    return gaps.mean(), gaps.mean() - half, gaps.mean() + half


def minus_dpo(everything: pd.DataFrame, method: str, rates: tuple[float, ...]) -> list[str]:
    """What a method at its best beta has more reward than DPO at its own, with intervals, by noise rate."""
    frame = everything[everything["method"].isin(["dpo", method])].assign(row=everything["beta"])
    gaps = compared(at_best(frame, [], "gold_reward"), method, []).query("measure == 'gold_reward'")
    found = []
    for rate in rates:
        (gap,) = gaps[np.isclose(gaps["noise"], rate)].to_dict("records")
        found.append(f"{gap['mean']:+.2f} [{gap['low']:+.2f}, {gap['high']:+.2f}]")
    return found


def assert_as_printed(values: list[float], printed: list[str]) -> None:
    """Each to as many digits as it is printed with."""
    for value, shown in zip(values, printed, strict=True):
        assert value == pytest.approx(float(shown), abs=0.51 * 10 ** -len(shown.split(".")[1]))


def assert_sentiment(run: pd.Series, cell: str) -> None:
    """Reward ± standard error, KL, perplexity and accuracy, as they are rounded in a table."""
    printed = [float(number) for number in re.findall(r"[\d.]+", cell.replace(",", ""))]
    names = ["reward", "reward_stderr", "sequence_kl", "perplexity", "accuracy_drawn"]
    differences = np.abs(run[names].to_numpy(float) - printed)
    assert (differences < [0.0051, 0.0051, 0.051, 0.51, 0.00051]).all(), cell


def test_betas_that_validation_accuracy_chooses():
    found = table(notebook("choosing-beta"), "\n| method | 20% flipped | 30% flipped | 40% flipped |\n")
    assert found.keys() == METHODS.keys()
    for label, cells in found.items():
        for noise, cell in zip((0.2, 0.3, 0.4), cells, strict=True):
            reward, beta, kl, accuracy = map(
                float, re.fullmatch(r"([\d.]+) ± [\d.]+ \(([\d.]+); ([\d.]+); ([\d.]+)\)", cell).groups()
            )
            reported = runs("validation-choice-report", METHODS[label], beta, noise=noise)
            assert_means(reported, reward, kl, accuracy)
            tuning = runs("frontier-tuning", METHODS[label], noise=noise)
            assert tuning.groupby("beta")["val_accuracy"].mean().idxmax() == beta, "chosen on other seeds"


@pytest.mark.parametrize(
    ("label", "method"),
    [("DPO, first pass", "first"), ("Refined", "estimated"), ("PerpCorrect", "perp_rounds")],
)
def test_best_betas(label, method):
    """The rows of the large table whose runs are kept."""
    text = notebook("methods-at-their-best-beta")
    cells = re.search(rf"^\|[^|]*\| {label} \|(.*)\|$", text, re.MULTILINE)[1]
    for noise, cell in zip((0.2, 0.3, 0.4), cells.replace("*", "").split("|"), strict=True):
        reward, kl, accuracy = map(
            float, re.fullmatch(r" ([\d.]+) ± [\d.]+ \(([\d.]+); ([\d.]+)\) ", cell).groups()
        )
        assert_means(runs("perpcorrect-report", method, noise=noise), reward, kl, accuracy)


def test_central_rows_run_again():
    """Means and paired differences of the runs that are kept."""
    first_line = "\n| second run | 20% flipped | 30% flipped | 40% flipped |\n"
    cells = table(notebook("methods-at-their-best-beta"), first_line)
    names = {"DPO, first pass": "first", **{name: METHODS[name] for name in METHODS if name in cells}}
    assert len(cells) == 12
    for row, printed in cells.items():
        label, accuracy, _ = row.partition(", accuracy")
        measure = "gold_accuracy" if accuracy else "gold_reward"
        for noise, cell in zip((0.2, 0.3, 0.4), printed, strict=True):
            shown = re.findall(r"[+-]?\d+\.\d+", cell)
            first, *other = (runs("frontier-report", names[x], noise=noise) for x in label.split(" minus "))
            if other:
                assert_as_printed(list(interval(first[measure] - other[0][measure])), shown)
            else:
                assert_means(first, *(float(shown[place]) for place in (0, 2, 3)))
    shown = ", ".join(minus_dpo(kept_runs("frontier-report"), "pacmr", (0.2, 0.3, 0.4)))
    assert shown.replace(", +", ", ") in README.replace("], +", "], ")


def test_what_the_large_table_says():
    """Gold reward at the best betas minus DPO's, by the table's own numbers."""
    page = notebook("methods-at-their-best-beta")
    cells = re.findall(
        r"^\| ([^|±]+) \| ([^|]+)" + r" \| \**([\d.]+)\** ±[^|]+" * 3 + r"\|$", page, re.MULTILINE
    )
    found = pd.DataFrame(cells).set_index(1).drop(["DPO, first pass", "Oracle weights"])
    twice, more = found.pop(0).str.contains("passes"), found.astype(float)
    more = (more - more.loc["DPO"]).round(2)
    others, once = more[twice].drop("PerpCorrect"), more[~twice].drop("Co-teaching")
    assert len(more) == 28 and once.abs().max(axis=None) < 0.1
    low, high, most = others.min(axis=None), others.max(axis=None), more.loc["PerpCorrect"].max()
    assert f"Co-teaching ({more.loc['Co-teaching'].min()} at 30%)" in page
    assert f"pass adds {low} to {high}, PerpCorrect with 256 clean pairs up to {most}." in page
    ropo, rpo_em = more.loc[["ROPO", "RPO-EM"], 2]
    assert f"ROPO and RPO-EM are ahead of DPO by {ropo} and {rpo_em}" in " ".join(page.split())


def test_checkpoints():
    """Mean reward and KL along the runs."""
    cells = table(notebook("methods-at-one-kl"), "\n| updates | 50 | 100 | 150 | 200 | 300 | 400 |\n")
    assert len(cells) == 5
    for label, printed in cells.items():
        name, beta = label.rsplit(", beta ", 1)
        for updates, cell in zip((50, 100, 150, 200, 300, 400), printed, strict=True):
            found = runs("checkpoints", METHODS[name], float(beta), updates=updates)
            numbers = [float(number) for number in re.findall(r"\d+\.\d+", cell)]
            assert len(found) == (5 if numbers else 0)
            if numbers:
                means = found[["gold_reward", "sequence_kl"]].mean()
                assert means.tolist() == pytest.approx(numbers, abs=0.0051)


AT_ONE_KL = {
    **{"DPO": "dpo", "PACMR-DPO": "pacmr", "rDPO": "rdpo", "DPO, two epochs": "dpo_two_epochs"},
    **{"Refined": "estimated", "Refined, assumed 45%": "refined", "Audited soft labels": "soft"},
    **{"Audited weights": "weights", "PerpCorrect": "perp_correct", "Oracle weights": "oracle"},
    **{"IPO": "ipo", "Dr.DPO": "drdpo", "ROPO": "ropo", "RPO-EM": "rpo_em", "cDPO": "cdpo", "MWN-DPO": "mwn"},
    **{"Suspected errors dropped": "dropped", "Suspected errors swapped": "flipped"},
    **{"Fixed sigmoid weighting": "fixed"},
    **{"R3M": "r3m", "Hölder-DPO": "holder_dpo", "Co-teaching": "co_teaching", "Selective DPO": "selective"},
    **{"cDPO, assumed 25%": "cdpo_25", "cDPO, assumed 35%": "cdpo_35"},
    **{"rDPO, assumed 25%": "rdpo_25", "rDPO, assumed 35%": "rdpo_35"},
    **{"Aligner": "aligner", "MetaPO-style": "metapo_style"},
}


def test_at_one_kl():
    text = notebook("methods-at-one-kl")
    first = "given | method | 20%, 1 nat | refined minus it | 30%, 1 nat | refined minus it | 40%, 0.5 nats"
    (rest,) = re.findall(rf"^\| {re.escape(first)}.*\n.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in rest.splitlines()]
    kept = {label: cells for label, *cells in rows}
    assert kept.keys() == AT_ONE_KL.keys()
    frame = kept_runs("frontier-tuning")
    asked = ((0.2, 1), (0.3, 1), (0.4, 0.5))
    matched = pd.concat([at_kls(frame[np.isclose(frame["noise"], rate)], [kl]) for rate, kl in asked])
    gaps = compared(matched, "estimated", ["kl"]).query("measure == 'gold_reward'")
    for label, cells in kept.items():
        for rate, mean, gap in zip((0.2, 0.3, 0.4), cells[::2], cells[1::2], strict=True):
            part = matched[matched["method"].eq(AT_ONE_KL[label]) & np.isclose(matched["noise"], rate)]
            if not mean:  # no run of any seed goes that far
                assert part.empty and not gap
                continue
            reward, accuracy, seeds = re.fullmatch(r"([\d.]+) \(([\d.]+)(?:; (\d))?\)", mean).groups()
            assert len(part) == int(seeds or 5)
            assert part["gold_reward"].mean() == pytest.approx(float(reward), abs=0.0051)
            assert part["gold_accuracy"].mean() == pytest.approx(float(accuracy), abs=0.00051)
            few = len(part) < 3 or (label == "Refined, assumed 45%" and rate == 0.4)
            assert bool(gap) != (label == "Refined" or few)
            if gap:
                chosen = gaps[gaps["method"].eq(AT_ONE_KL[label]) & np.isclose(gaps["noise"], rate)]
                (row,) = chosen.to_dict("records")
                printed = [float(number) for number in re.findall(r"[+-]\d\.\d\d", gap)]
                assert [row["mean"], row["low"], row["high"]] == pytest.approx(printed, abs=0.0051)


def test_changes_to_pacmr():
    """Each method at its best beta, minus DPO at its own, in the order of the table."""
    text = notebook("changes-to-pacmr").split("## 200 updates")[1].split("## 1,250 updates")[0]
    printed = re.findall(r"[+-]\d\.\d\d \[[+-]\d\.\d\d, [+-]\d\.\d\d\]", text)
    everything = kept_runs("frontier-tuning")
    found = []
    shapes = ("pacmr", "pacmr_soft_labels", "pacmr_offset")
    fast = ("pacmr_held_out_fast", "pacmr_fast", "pacmr_fast_soft", "pacmr_fast_soft_labels")
    for method in (*shapes, "pacmr_averaged", "peer_prior", "pacmr_held_out", *fast):
        found += minus_dpo(everything, method, (0.3, 0.4))
    assert found == printed


def test_changes_to_pacmr_in_long_runs():
    """Each at its best beta, minus DPO at its own; and at beta 1, where those that learn VNet collapse."""
    text = notebook("changes-to-pacmr").split("## 1,250 updates")[1].split("## Does a larger meta-batch")[0]
    printed = re.findall(r"[+-]\d\.\d\d \[[+-]\d\.\d\d, [+-]\d\.\d\d\]", text)
    everything = kept_runs("pacmr-variants-long")
    found = []
    for method in ("fixed", "peer_prior", "pacmr", "pacmr_soft_labels", "pacmr_offset"):
        found += minus_dpo(everything, method, (0.4,))
    assert found == printed
    means = everything.groupby(["method", "beta"])[["gold_reward", "sequence_kl", "flip_auroc"]].mean()
    assert round(means.loc[("dpo", 0.05), "gold_reward"], 2) == 3.61
    collapsed = means.loc[[(method, 1.0) for method in ("pacmr", "pacmr_soft_labels", "pacmr_offset")]]
    at_one = [float(number) for number in re.findall(r"\| (\d\.\d\d) \|$", text, re.MULTILINE)]
    assert collapsed["gold_reward"].round(2).tolist() == at_one and len(at_one) == 3
    assert collapsed["sequence_kl"].round().agg(["min", "max"]).tolist() == [16, 22]
    assert collapsed["flip_auroc"].round(2).agg(["min", "max"]).tolist() == [0.54, 0.57]
    assert round(means.loc[("fixed", 1.0), "flip_auroc"], 2) == 0.83


def test_wordings_of_the_meta_pairs():
    rows = table(notebook("changes-to-pacmr"), "| meta-batch | reward, 30% noise | reward, 40% noise |\n")
    (several_cells,) = (cells for label, cells in rows.items() if "all three augmented" in label)
    printed = " ".join([*several_cells, *rows["one augmented prompt minus three"]])
    means, less = [], []
    for rate in (0.3, 0.4):
        several = runs("meta-pairs", "several_wordings", noise=rate)["gold_reward"]
        one = runs("meta-pairs", "pacmr", noise=rate, meta_batch_size=64)["gold_reward"]
        assert sorted(several.index) == sorted(one.index) == [100, 101, 102, 103, 104]
        means.append(several.mean())
        less.append(one - several)
    found = [*means, *interval(less[0]), less[1].mean()]
    numbers = [float(number) for number in re.findall(r"[+-]?\d\.\d\d", printed)]
    assert found == pytest.approx(numbers, abs=0.0051)
    assert sum(less[1].abs() < 1e-5) == 3, "three of five"


RUN = r"^\| ([^|]+) \| (0\.\d+) \| (\S+) ± (\S+) \| (\S+) \| (\S+) \((\w)\) \|"
"""Label, accuracy, KL and its error, margin, AUROC, and whether it is that of g or of u."""


def assert_run(row, printed, judge, *others):
    """Accuracy, KL and its error, what else a table has, and how well weights or u find flips."""
    columns = ("accuracy", "sequence_kl", "sequence_kl_stderr", *others)
    auroc = row["flip_auroc"] if judge == "g" else row["flip_auroc_u"]
    assert_as_printed([*(row[name] for name in columns), auroc], printed)


def test_hh():
    """Each of three seeds: accuracy, KL, margin, and how well weights or u find flips."""
    numbers = kept_runs("hh").set_index("method")
    frame = numbers[numbers["seed"] == 42]
    text = notebook("hh").split("## Does a second pass gain accuracy")[1]
    found = re.findall(RUN, text, re.MULTILINE)
    names = ("dpo", "dpo_further", "rdpo", "fixed", "pacmr", "pacmr_ghost", "refined")
    assert len(found) == len(names) and list(frame.index) == list(names)
    for name, (_, *printed, judge) in zip(names, found, strict=True):
        assert_run(frame.loc[name], printed, judge, "margin")
    other = text.split("Seeds 43 and 44")[1]
    rows = re.findall(
        r"^\| (\d\d), [^|]+ \| (0\.\d+) \| (\S+) ± (\S+) \| (\S+) \((\w)\) \|", other, re.MULTILINE
    )
    frame = numbers[numbers["seed"] != 42]
    methods = ["dpo", "dpo_further", "pacmr", "refined"]
    assert list(frame.index) == [*methods, *methods[:2], "even", *methods[2:]]
    assert [int(seed) for seed, *_ in rows] == list(frame["seed"])
    for row, (_, *printed, judge) in zip(frame.to_dict("records"), rows, strict=True):
        assert_run(row, printed, judge)


def test_sentiment():
    """Of the five seeds at the lower learning rate: reward, KL, perplexity and accuracy."""
    frame = kept_runs("sentiment")
    frame = frame[np.isclose(frame["learning_rate"], 5e-4)].set_index(["method", "seed"])
    text = notebook("film-reviews").split("## Learning rate 5e-4")[1]
    rows = re.findall(r"^\| (\d) \| (.*) \|$", text.split("Differences over")[0], re.MULTILINE)
    methods = ("dpo", "dpo_further", "dpo_furthest", "refined", "pacmr", "dpo_two_epochs")
    printed = {}
    for seed, cells in rows:
        for method, cell in zip(methods, cells.split(" | "), strict=True):
            if cell != "–":
                printed[method, int(seed)] = cell
    assert printed.keys() == set(frame.index) and len(printed) == 25
    for run, cell in printed.items():
        assert_sentiment(frame.loc[run], cell)
    for method, than, column, more in (
        ("refined", "dpo", "reward", "0.89 [0.15, 1.63]"),
        ("pacmr", "dpo", "reward", "0.58 [0.38, 0.78]"),
        ("pacmr", "dpo_furthest", "reward", "0.06 [-0.42, 0.54]"),
        ("pacmr", "dpo_furthest", "sequence_kl", "1.68 [-0.79, 4.14]"),
        ("refined", "dpo_furthest", "reward", "0.37 [-0.57, 1.30]"),
        ("refined", "dpo_furthest", "sequence_kl", "5.85 [3.14, 8.56]"),
    ):
        mean, low, high = interval(frame.loc[method][column] - frame.loc[than][column])
        assert f"{mean:.2f} [{low:.2f}, {high:.2f}]" == more
        assert more in text
        if column == "reward":
            assert more in (DOCS / "real_text.md").read_text(encoding="utf-8")
        if (method, column) == ("refined", "reward"):
            assert f"+{more}" in README


def test_original_labels():
    """Readings of suspected label errors and of random pairs."""
    readings = kept_runs("readings")
    found = readings.groupby(["data", "drawn"])["label"].value_counts().unstack()[["wrong", "right", "open"]]
    text = notebook("hh").split("| original labels |")[1]
    rows = re.findall(r"^\| (HH|TL;DR)[^|]*, 20 ([^|]+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert len(rows) == 4
    for data, drawn, *counts in rows:
        kind = {"highest-ranked": "suspect", "at random": "random"}[drawn]
        assert found.loc[data, kind].tolist() == [int(count) for count in counts]
    both = found.groupby("drawn").sum()
    decided = [
        number
        for kind in ("suspect", "random")
        for number in (both["wrong"][kind], sum(both.loc[kind, ["wrong", "right"]]))
    ]
    words = "{} of {} suspected errors look wrong and {} of {} others"
    assert words.format(*decided) in " ".join(text.split())


def test_probes_by_size():
    """Ten draws of injected noise by data, number of pairs, noise rate and base model."""
    text, frame = notebook("probe-sizes"), kept_runs("probe-sizes")
    assert frame.groupby(["data", "pairs", "flips", "model"]).size().eq(10).all()
    for (data, pairs, flips, model), part in frame.groupby(["data", "pairs", "flips", "model"]):
        mean, low, high = part.mean(numeric_only=True), part["rate_low"], part["rate_high"]
        holds = ((low <= part["injected"]) & (part["injected"] <= high)).sum()
        line = (
            f"| {data}, {pairs} pairs, {flips:.0%}, {model} | "
            f"{mean['auroc']:.2f} ± {part['auroc'].std():.2f} | "
            f"{mean['average_precision']:.2f} | {100 * mean['precision_in_first_100']:.0f} | "
            f"{mean['accuracy']:.2f} | {mean['agreement']:.2f} | {low.mean():.0%} to {high.mean():.0%} | "
            f"{holds} | {part['rate_identified'].sum()} |"
        )
        assert line in text, line
    half = frame[frame["model"].str.contains("0.5b") & frame["flips"].eq(0.3)]
    most = half["pairs"].eq(half.groupby("data")["pairs"].transform("max"))
    means = half[most].groupby("data")["auroc"].mean()
    assert f"HH; TL;DR, 0.5B model | {means['HH']:.2f}; {means['TL;DR']:.2f} |" in README


def test_features_of_probes():
    text, frame = table(notebook("probe-sizes"), "| prompts, features |"), kept_runs("probe-features")
    models = ("smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
    columns = [(data, model) for data in ("HH", "TL;DR") for model in models]
    assert text.keys() - {"---"} == set(frame["half"] + ", " + frame["features"])
    for row, part in frame.set_index(["half", "features", "data", "model"]).groupby(["half", "features"]):
        for column, cell in zip(columns, text[", ".join(row)], strict=True):
            if (*row, *column) not in part.index:
                assert cell == ""
                continue
            found = part.loc[(*row, *column)]
            more = f" ({found['difference']:+.3f} ± {found['standard_error']:.3f})"
            assert cell == f"{found['auroc']:.3f}" + more * (found["minus"] == found["minus"])


def test_scorers_of_injected_noise():
    """AUROC on HH and film reviews, which the figure of docs/real_text.md shows."""
    auroc = kept_runs("judges").set_index(["data", "judge"])["auroc"]
    for data, page in (("HH", "hh"), ("Film reviews", "film-reviews")):
        for scorer in ("probe", "pre_update", "policy"):
            row = re.search(rf"^\|[^|]*`[^|`]*{scorer}`[^|]*\| \**(0\.\d+)", notebook(page), re.MULTILINE)
            assert float(row[1]) == auroc[data, scorer]


def test_sentiment_under_other_labels():
    """Reward, KL, perplexity and accuracy of one seed."""
    frame = kept_runs("sentiment-noise").set_index(["labels", "method", "beta"])
    text = notebook("film-reviews").split("## Other noise rates and kinds")[1]
    rows = re.findall(r"^\| ([^|]*\d?) \| (.*\(.*) \|$", text.split("**Cost of noise**")[0], re.MULTILINE)
    runs_of = (("dpo", 0.03), ("dpo", 0.003), ("refined", 0.03))
    learned = frame.loc[("annotators", "rpo_em_annotators", 0.03)]
    even = frame.loc[("categories", "cdpo", 0.03)]
    for run, end in ((learned, ""), (even, " there")):
        said = f"has {run['reward']:.2f} ± {run['reward_stderr']:.2f} at {run['sequence_kl']:.1f} nats{end}"
        assert said in " ".join(notebook("film-reviews").split())
    assert len(rows) * len(runs_of) + 2 == len(frame)
    kinds = ("clean", "20", "40", "annotators", "categories", "temperature", "ties", "length")
    for kind, (_, cells) in zip(kinds, rows, strict=True):
        for run, cell in zip(runs_of, cells.split(" | "), strict=True):
            assert_sentiment(frame.loc[(kind, *run)], cell)


def test_twenty_minutes():
    text = notebook("film-reviews").split("in twenty minutes?")[1].split("##")[0]
    printed = re.findall(r"(\d\.\d\d) ± (0\.\d\d) \((\d+\.\d)\)", text)
    found = kept_runs("sentiment-tiny")
    columns = ["reward", "reward_stderr", "sequence_kl"]
    for values, cell in zip(found[columns].to_numpy(), printed, strict=True):
        assert_as_printed(values, cell)


def test_tldr():
    frame = kept_runs("tldr")
    text = notebook("tldr").split("## Do policies learn")[1]
    found = re.findall(RUN, text.split("##")[0], re.MULTILINE)
    assert [int(draw[0]) for draw, *_ in found] == list(frame["draw"])
    for row, (_, *printed, judge) in zip(frame.to_dict("records"), found, strict=True):
        assert_run(row, printed, judge, "margin")


def test_hh_with_half_a_billion_parameters():
    rows = table(notebook("hh-half-billion"), "| run | accuracy")
    kept = kept_runs("hh-half-billion").to_dict("records")
    for row, cells in zip(kept, list(rows.values())[1:], strict=True):
        judge = cells[2][-2]
        auroc = row["flip_auroc" if judge == "g" else "flip_auroc_u"]
        numbers = [f"{row['accuracy']:.3f}", f"{row['token_kl']:.2f}", f"{auroc:.2f} ({judge})"]
        numbers.append(f"{row['response_tokens']:.0f}, {row['truncated']}")
        if row["method"] != "dpo":
            numbers.append(", ".join(f"{row[name]:.0f}" for name in ("wins", "ties", "losses")))
            for name in ("win_score", "controlled"):
                low, high = row[f"{name}_low"], row[f"{name}_high"]
                numbers.append(f"{row[name]:.2f} [{low:.2f}, {high:.2f}]")
        assert [cell for cell in cells if cell] == numbers


def test_alpha_in_vnets_gradient():
    """Means and standard errors over the kept seeds, and the paired differences of the paper's VNet."""
    lines = re.findall(r"^\| [^|]+ \| (?:true|false|difference) \|.*", notebook("vnet"), re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    frame = kept_runs("alpha").set_index(["method", "alpha_in_gradient", "seed"])
    columns = ["slope", "weight_gap", "gold_reward", "sequence_kl"]
    vnets = {"of Qu et al.": "pacmr", "fast, beta 4": "pacmr_fast_4", "fast": "pacmr_fast"}
    assert len(rows) > 2
    for vnet, alpha, seeds, *cells in rows:
        found = frame.loc[vnets[vnet]][columns]
        if alpha == "difference":
            part = (found.loc[True] - found.loc[False]).dropna()
        else:
            part = found.loc[alpha == "true"]
        assert len(part) == int(seeds)
        for column, cell in zip(columns, cells, strict=True):
            mean, error = cell.removeprefix("+").split(" ± ")
            assert_as_printed([part[column].mean(), part[column].sem()], [mean, error])


def test_how_many_runs_a_file_has():
    index = (ROOT / "research" / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"\| `([^|]*\.csv)` \| ([\d,]+) \|", index))
    assert listed == {path.name: f"{len(pd.read_csv(path)):,}" for path in NUMBERS.glob("*.csv")}


def test_judges_that_have_not_seen_the_pairs():
    rows = table(notebook("second-passes"), "| | 20% flipped | 30% flipped | 40% flipped |\n")
    numbers = [
        first_number(cell) for row in ("reward of the second pass", "refined minus it") for cell in rows[row]
    ]
    for noise, mean, less in zip((0.2, 0.3, 0.4), numbers[:3], numbers[3:], strict=True):
        halves = runs("halves-report", "halves", noise=noise)["gold_reward"]
        refined = runs("perpcorrect-report", "estimated", noise=noise)["gold_reward"]
        assert sorted(halves.index) == list(range(10))
        assert [halves.mean(), (refined - halves).mean()] == pytest.approx([mean, less], abs=0.0051)


def test_refined_over_betas():
    found = table(notebook("choosing-beta"), "| beta of the second pass | 20% flipped | 30% | 40% |\n")
    for beta, cells in found.items():
        for noise, cell in zip((0.2, 0.3, 0.4), cells, strict=True):
            tuning = runs("frontier-tuning", "estimated", float(beta), noise=noise)
            assert tuning["gold_reward"].mean() == pytest.approx(first_number(cell), abs=0.0051)


def test_kinds_of_noise():
    found = table(
        notebook("kinds-of-noise"),
        "| labels | first pass (DPO, beta 1) | PACMR-DPO, beta 2 | two epochs, best beta | refined "
        "| refined - first pass | refined - two epochs | the same, accuracy |\n",
    )
    assert found.keys() == KINDS.keys()
    for label, cells in found.items():
        kind = KINDS[label]
        beta = float(re.search(r"; ([\d.]+)\)", cells[2])[1])
        asked = (("first", None), ("pacmr", None), ("dpo_two_epochs", beta), ("estimated", None))
        kept = [runs("noise-kinds-report", name + kind, beta) for name, beta in asked]
        assert all(len(part) == 10 for part in kept)
        first, pacmr, twice, refined = (part["gold_reward"] for part in kept)
        means = [part.mean() for part in (first, pacmr, twice, refined)]
        assert means == pytest.approx([first_number(cell) for cell in cells[:4]], abs=0.0051)
        more = kept[3]["gold_accuracy"] - kept[2]["gold_accuracy"]
        for gaps, cell in zip((refined - first, refined - twice, more), cells[4:], strict=True):
            assert_as_printed(list(interval(gaps)), re.findall(r"[+-]\d\.\d+", cell))


PAGE = {
    "DPO, beta 1 (the first pass of refined)": "DPO, first pass",
    "DPO, best beta": "DPO",
    "PACMR-DPO, best beta": "PACMR-DPO",
    "DPO, two epochs, best beta": "DPO, two epochs",
    "Refined (`pacmr refine`), beta 1": "Refined",
    "PACMR-DPO minus DPO [95% interval]": "PACMR-DPO minus DPO",
    "Refined minus DPO, two epochs": "Refined minus DPO, two epochs",
}


def test_results_page():
    """Its table repeats rows of the notebook, whose numbers are checked above."""
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    first_line = "| gold reward ± standard error (KL in nats; accuracy) | 20% label noise | 30% | 40% |\n"
    found = table(text, first_line)
    page = notebook("methods-at-their-best-beta")
    kept = table(page, "\n| second run | 20% flipped | 30% flipped | 40% flipped |\n")
    oracle = re.search(r"^\| true labels \| Oracle weights \|(.*)\|$", page, re.MULTILINE)[1].replace("*", "")
    assert found.pop("Oracle weights (true probabilities)") == [cell.strip() for cell in oracle.split("|")]
    assert {PAGE[label]: cells for label, cells in found.items()}.items() <= kept.items() and len(found) == 7


TUNED = {0.0: 1.0, 0.1: 1.0, 0.2: 0.5, 0.3: 0.2, 0.4: 0.1, 0.45: 0.1}
"""Betas of two epochs of DPO, by noise rate: those with the highest gold reward on the tuning seeds."""


def test_reward_against_noise_rate():
    found = table(notebook("noise-rate"), "| method | 0% noise | 10% | 20% | 30% | 40% | 45% |\n")
    names = {"DPO, beta 1 (the first pass)": "first", "PACMR-DPO, beta 2": "pacmr"}
    names |= {"DPO, two epochs (KL; beta)": "dpo_two_epochs", "Refined, beta 1": "estimated"}
    kinds = pd.read_csv(NUMBERS / "noise-kinds-report.csv")
    clean = kinds[kinds["method"].str.endswith("_clean")]
    clean = clean.assign(method=clean["method"].str.removesuffix("_clean"), noise=0.0)
    files = ("told-nothing-report", "frontier-report")
    runs = pd.concat([clean, *(pd.read_csv(NUMBERS / f"{name}.csv") for name in files)])
    tuned = np.isclose(runs["beta"], runs["noise"].map(TUNED)) | (runs["method"] != "dpo_two_epochs")
    runs = runs[runs["method"].isin(names.values()) & tuned]
    kept = runs.set_index(["method", "noise", "seed"])[["gold_reward", "sequence_kl"]].sort_index()
    gaps = found.pop("Refined minus two epochs")
    assert found.keys() == names.keys()
    for place, rate in enumerate(TUNED):
        for label, cells in found.items():
            if cells[place]:
                mean, error, kl = map(float, re.match(r"(\S+) ± (\S+) \(([\d.]+)", cells[place]).groups())
                part = kept.loc[names[label], rate]
                values = [part["gold_reward"].mean(), part["gold_reward"].sem(), part["sequence_kl"].mean()]
                assert (np.abs(np.subtract(values, [mean, error, kl])) < [0.0051, 0.0051, 0.051]).all()
        refined, twice = (kept.loc[name, rate]["gold_reward"] for name in ("estimated", "dpo_two_epochs"))
        numbers = [float(number) for number in re.findall(r"[+-]\d\.\d\d", gaps[place])]
        assert list(interval(refined - twice)) == pytest.approx(numbers, abs=0.0051)
        if rate in (0.0, 0.2, 0.3, 0.4):
            mean, low, high = interval(refined - twice)
            assert f"{mean:+.2f} [{low:.2f}, {high:.2f}]" in README


def test_two_readers_of_original_labels():
    """Labels that both contradict, of pairs on which they agree; and one reader checked by the other."""
    text, pairs = notebook("original-labels"), pd.read_csv(NUMBERS / "original-labels.csv")
    checked = {}
    for data, name in (("hh", "HH"), ("tldr", "TL;DR")):
        of = pairs[pairs["data"] == data]
        for suspicious, kind in ((1, "highest-ranked"), (0, "random")):
            one = of[of["suspicious"] == suspicious]
            agreed = one[one["against_1"] == one["against_2"]]
            wrong = int(agreed["against_1"].sum())
            low, high = binomtest(wrong, len(agreed)).proportion_ci(0.95, "exact")
            share = f"{wrong} ({wrong / len(agreed):.0%})"
            line = f"| {name}, {kind} | {len(one)} | {len(agreed)} | {share} | {low:.0%} to {high:.0%} |"
            assert line in text
            short = f"{wrong} of {len(agreed)}"
            for page in (DOCS / "real_text.md", ROOT / "README.md"):
                assert short in page.read_text(encoding="utf-8")
        judged = of[of["against_1"] == 1]
        parts = {"all pairs": judged, "random": judged[judged["suspicious"] == 0]}
        parts["sure"] = judged[judged["sure_1"] > 1]
        for part, labels in parts.items():
            checked.setdefault(part, []).append(f"{labels['against_2'].sum()} of {len(labels)}")
    for counts in checked.values():
        assert f"| {counts[0]} | {counts[1]} |" in text


SCORES = {
    **{name: name for name in ("length", "tf-idf and length")},
    **{"Bradley-Terry": "Bradley-Terry over arguments", "probe, smollm2-135m": "probe, SmolLM2-135M"},
    **{"probe, gemma-3-270m": "probe, Gemma 3 270M"},
    **{"probe, qwen2.5-coder-0.5b": "probe, Qwen2.5-Coder-0.5B"},
    **{"probe, qwen2.5-coder-1.5b": "probe, Qwen2.5-Coder-1.5B (bfloat16)"},
}


def test_audits_of_votes():
    kept = kept_runs("votes").set_index("score")
    readme = " ".join(README.split())
    text = notebook("labels-that-people-made")
    found = table(text, next(line for line in text.splitlines(True) if line.startswith("| score | AUROC |")))
    columns = "auroc average_precision auroc_similar_length suspected expected others majority recall"
    columns += " first_100_majority largest_error_of_a_tenth"
    for score, row in kept.iterrows():
        *cells, cleanlab = found.pop(SCORES[score])
        values = [float(cell.replace(",", "")) for cell in cells]
        assert values == pytest.approx(row[columns.split()].tolist(), abs=0.0051)
        assert cleanlab == f"{row['cleanlab_suspected']:,.0f}, {row['cleanlab_majority']:.2f}"
    assert not found
    best, length = (kept.loc[name] for name in ("probe, qwen2.5-coder-1.5b", "length"))
    pairs = [f"{row['auroc']:.2f}, {row['average_precision']:.2f}" for row in (best, length)]
    assert f"| {'; '.join(pairs)} |" in readme
    small = kept.loc["probe, smollm2-135m"]
    assert f"contradict {small['suspected']:,.0f} of {small['pairs']:,.0f} labels" in readme
    assert f"{small['expected']:.0%} are expected" in readme
    assert f"interval {small['low']:.0%} to {small['high']:.0%}" in readme
    assert f"{small['others']:.0%} of their votes, and {small['majority']:.0%} of their majorities" in readme


def test_policies_on_votes():
    cells = kept_runs("vote-policies")
    text = notebook("vote-policies")
    found = table(text, "| method, beta | fold 0 | fold 1 | fold 2 | fold 3 |\n")
    names = {"PACMR-DPO": "pacmr", "floor 0.3": "pacmr_robust", "fixed sigmoid weighting": "fixed"}

    def runs_of(frame, row):
        name, beta = row.split(", ")
        same = frame["method"].eq(names.get(name, name.lower())) & np.isclose(frame["beta"], float(beta))
        return frame[same].sort_values("fold").itertuples()

    del found["the longer argument"]
    for name, shown in found.items():
        expected = [f"{run.accuracy:.3f} ({run.kl:.2f})" for run in runs_of(cells, name)]
        assert expected and [cell for cell in shown if cell] == expected
    larger = kept_runs("vote-policies-larger")
    dpo = larger[larger["method"] == "dpo"].sort_values("kl")
    found = table(text, "| method, beta | accuracy | KL | minus DPO | VNet updates |\n")
    assert len(found) == len(larger)
    for name, shown in found.items():
        [run] = runs_of(larger, name)
        at_kl = np.interp(np.log(run.kl), np.log(dpo["kl"]), dpo["accuracy"])
        gap = f"{round(run.accuracy - at_kl, 3) + 0:+.3f}"
        assert shown[:3] == [f"{run.accuracy:.3f}", f"{run.kl:.2f}", gap * (run.method != "dpo")]
    other = table(
        notebook("labels-that-people-made"),
        "| | accuracy (folds) | AUROC for contradicted votes | KL per token | minus DPO |\n",
    )
    at = cells[np.isclose(cells["beta"], 0.1)].set_index(["method", "fold"])
    for name, method in {"DPO": "dpo", "majority": "refined", "right": "right"}.items():
        part, dpo = at.loc[method], at.loc["dpo"]
        folds = ", ".join(f"{value:.3f}" for value in part["accuracy"])
        mean, low, high = interval(part["accuracy"] - dpo["accuracy"])
        gap = f"{mean:+.3f} ± {(high - low) / 2:.3f}" if method != "dpo" else ""
        expected = [f"{part['accuracy'].mean():.3f} ({folds})", f"{part['auroc'].mean():.3f}"]
        assert other[name] == [*expected, f"{part['kl'].mean():.2f}", gap]
        if method == "refined":
            assert gap in text
            assert f"four folds | {mean:+.2f} [{low:.2f}, {high:.2f}], at higher KL |" in README
