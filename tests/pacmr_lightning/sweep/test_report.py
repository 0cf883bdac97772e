"""Tables and figures of finished cells against numbers computed by hand."""

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

import pandas as pd
import pytest

from pacmr_lightning import cli
from pacmr_lightning.analysis.surface import save_surface
from pacmr_lightning.sweep.cells import cells
from pacmr_lightning.sweep.figures import draw_noise
from pacmr_lightning.sweep.results import MEASURES
from pacmr_lightning.sweep.spec import read_sweep
from pacmr_lightning.sweep.tables import Table

from ...conftest import write_lines
from ..analysis.test_figures import surface
from .conftest import end, write

ORACLE = {"config": "dpo", "label": "Oracle", "bound": True, "options": {"model.weighting": "DropFlipped"}}
METHODS = {
    "dpo": {"label": "DPO"},
    "pacmr": {"label": "PACMR_DPO", "vary": {"model.weighting.outer.tau": [0.5, 0.6]}},
    "oracle": ORACLE,
}
SEEDS = [0, 1, 2]
# Gold rewards of four samples, by row, noise rate in percent and seed.
SAMPLED = {
    ("dpo", 20): [[1, 2, 3, 4], [2, 2, 2, 2], [0, 1, 0, 1]],
    ("dpo", 42.5): [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]],
    ("pacmr-tau0.5", 20): [[2, 2, 2, 5], [2, 3, 3, 1], [1, 1, 1, 1]],
    ("pacmr-tau0.5", 42.5): [[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
    ("pacmr-tau0.6", 20): [[1, 2, 3, 5], [2, 2, 2, 3], [0, 1, 0, 2]],
    ("pacmr-tau0.6", 42.5): [[1, 1, 1, 2], [0, 0, 1, 1], [1, 1, 1, 1]],
    **{("oracle", percent): [[9, 9, 9, 9]] * 3 for percent in (20, 42.5)},
}
TAU = {"pacmr-tau0.5": "PACMR_DPO, τ = 0.5", "pacmr-tau0.6": "PACMR_DPO, τ = 0.6"}


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory) -> Iterator[None]:
    """A sweep whose cells have ended, one seed of the oracle apart, with tables in the working directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        end_cells(world)
        yield


def end_cells(world: Path) -> None:
    path = write(
        world,
        **{"methods": METHODS, "noise_rates": [0.2, 0.425], "seeds": SEEDS},
        comparisons={"both": ["dpo", "pacmr"]},
    )
    for cell in cells(read_sweep(path)):
        if cell.method == "oracle" and cell.seed == 2:
            continue
        key = "-".join([cell.method, *(f"tau{tau}" for tau in cell.variation.values())])
        rewards = SAMPLED[key, round(100 * cell.noise, 1)][cell.seed]
        gap = None if cell.method == "dpo" else 0.1 * cell.seed + cell.noise
        summary = {
            "metrics": {"val/gold_reward": mean(rewards)},
            "val_accuracy": 0.8 - 0.01 * cell.seed,
            "weight_mean_unflipped": 0.9,
            "weight_mean_flipped": None if gap is None else 0.9 - gap,
            "weight_gap": 0.0 if gap is None else gap,
            "flip_auroc": gap,
            "flip_auroc_u": 0.75,
        }
        if cell.method == "pacmr":
            updates = 0 if (cell.noise, cell.seed, *cell.variation.values()) == (0.425, 2, 0.6) else 8
            summary |= {"vnet_updates": updates, "vnet_skipped": 10 - updates}
        if (key, cell.noise, cell.seed) == ("dpo", 0.2, 1):
            summary["metrics"]["val/guard/restored_step"] = 30
        if key == "pacmr-tau0.5":
            probe = {"mean_unflipped": 0.5 + cell.seed, "mean_flipped": 0.5, "gap": cell.seed}
            summary["metrics"] |= {f"pair_weights/probe_{name}": value for name, value in probe.items()}
        end(cell, summary)
        if key == "pacmr-tau0.5" and cell.seed == 0:
            for step in (5, 10, 12) if cell.noise == 0.2 else (10,):
                save_surface(surface(points=8, noise=cell.noise, step=step), cell.folder)
        samples = [{"prompt": "p", "response": "r", "gold_reward": reward} for reward in rewards]
        write_lines(cell.folder / "samples.jsonl", samples)
    cli.main(["sweep", path, "--tables_only"])


def moments(values: list[float]) -> list[float]:
    return [mean(values), stdev(values) / math.sqrt(len(values))]


def table(name: str) -> pd.DataFrame:
    return pd.read_csv(f"out/tables/{name}.csv", index_col="Method")


def test_cells_without_a_validation(write_sweep):
    vary = {"model.objective.beta": [0.1, 0.2]}
    for validated in ((), ("dpo",)):
        output = f"out{len(validated)}"
        path = write_sweep(output=output, methods={"dpo": {"vary": vary}, "ipo": {"vary": vary}}, anchor=None)
        for cell in cells(read_sweep(path)):
            end(cell, {} if cell.method in validated else {"val_accuracy": None})
        cli.main(["sweep", path, "--tables_only"])
        assert Path(output, "figures/noise-rates.png").exists() == bool(validated)


def test_options_whose_last_word_another_column_has(write_sweep):
    """Their columns have the whole option, and those of the run stay what they are."""
    kinds = ["NearTieNoise", "AnnotatorNoise"]
    methods = {"dpo": {"label": "DPO", "vary": {"data.noise": kinds}}, "ipo": None, "pacmr": None}
    methods["ipo"] = {"vary": {"a.tau": [0.1, 0.2], "b.tau": [0.3], "c.value": [5], "d.every": [2, None]}}
    path = write_sweep(methods=methods, anchor=None, comparisons={"no": ["pacmr"]})
    for cell in filter(lambda cell: cell.method != "pacmr", cells(read_sweep(path))):
        reward = 1.0 if cell.variation.get("data.noise") == kinds[1] else 0.5
        end(cell, {"metrics": {"val/gold_reward": reward}})
    cli.main(["sweep", path, "--tables_only"])
    found = pd.read_csv("out/cells.csv")
    assert set(found["noise"]) == {0.3} and set(found["method"]) == {"dpo", "ipo"}
    assert found["data.noise"].dropna().tolist() == 2 * kinds
    assert set(found["b.tau"].dropna()) == {0.3} and set(found["a.tau"].dropna()) == {0.1, 0.2}
    assert set(found["c.value"].dropna()) == {5} and set(found["every"].dropna()) == {2}
    rewards = table("gold_reward")["30% flipped"]
    assert rewards["DPO, data.noise = AnnotatorNoise"] == 1 and rewards["ipo, a.tau = 0.2, every = 2"] == 0.5
    assert "| 2 |" in (md := Path("out/tables.md").read_text()) and "| None |" in md and "### ;" not in md
    assert pd.read_csv("out/tables/dpo-data.noise.csv")["data.noise"].tolist() == kinds


def test_means_and_wins(finished):
    gold, wins = table("gold_reward"), table("main")
    assert list(gold.index) == ["DPO", *TAU.values(), "Oracle"]
    for (key, percent), samples in SAMPLED.items():
        if key == "oracle":
            continue
        row = TAU.get(key, "DPO")
        column = f"{percent}% flipped"
        expected = moments([mean(rewards) for rewards in samples])
        assert gold.loc[row, [column, f"{column}, standard error"]].tolist() == pytest.approx(expected)
        if key == "dpo":
            assert row not in wins.index
            continue
        pairs = [list(zip(*seed, strict=True)) for seed in zip(samples, SAMPLED["dpo", percent], strict=True)]
        won = [sum(a > b for a, b in seed) for seed in pairs]
        lost = [sum(a < b for a, b in seed) for seed in pairs]
        rates = [100 * w / 4 for w in won]
        scores = [1 + (w - x) / 4 for w, x in zip(won, lost, strict=True)]
        for heading, values in (("Win rate (%)", rates), ("Win-score", scores)):
            found = wins.loc[row, [f"{heading}, {column}", f"{heading}, {column}, standard error"]]
            assert found.tolist() == pytest.approx(moments(values))
    assert "DPO" not in table("weight_gap").index, "a method without weights has no gap"


def test_differences(finished):
    """Seed by seed: not the difference of the means with the errors of both."""
    found = pd.read_csv("out/differences.csv").set_index(["measure", "noise", "first", "second"])
    gold = {key: [mean(rewards) for rewards in samples] for key, samples in SAMPLED.items()}
    for first, second in (("pacmr-tau0.6", "dpo"), ("pacmr-tau0.5", "pacmr-tau0.6")):
        gaps = [a - b for a, b in zip(gold[first, 42.5], gold[second, 42.5], strict=True)]
        row = found.loc[("gold_reward", 0.425, TAU[first], TAU.get(second, "DPO"))]
        assert row[["mean", "stderr"]].tolist() == pytest.approx(moments(gaps)) and row["seeds"] == 3
    # Two seeds of the oracle, which are compared with the same two.
    gaps = [9 - value for value in gold["dpo", 20][:2]]
    row = found.loc[("gold_reward", 0.2, "Oracle", "DPO")]
    assert row[["mean", "stderr"]].tolist() == pytest.approx(moments(gaps)) and row["seeds"] == 2
    assert abs(found.loc[("val_accuracy", 0.2, TAU["pacmr-tau0.5"], "DPO"), "stderr"]) < 1e-12


def test_layouts(finished):
    text = Path("out/tables.md").read_text()
    # The best of 2.00, 1.92 and 1.67, and of 0.50, 0.50 and 0.92; never a bound.
    shown = {(key, p): moments([mean(r) for r in seeds]) for (key, p), seeds in SAMPLED.items()}
    half, more = (["{:.2f} ± {:.2f}".format(*shown[key, p]) for p in (20, 42.5)] for key in TAU)
    assert f"| PACMR_DPO, τ = 0.5 | **2.00**{half[0][4:]} | {half[1]} |" in text
    assert f"| PACMR_DPO, τ = 0.6 | {more[0]} | **0.92**{more[1][4:]} |" in text
    assert "| Oracle | 9.00 ± 0.00 | 9.00 ± 0.00 |" in text
    assert "mean ± standard error over 2 to 3 seeds" in text

    latex = Path("out/tables/main.tex").read_text()
    assert r" & \multicolumn{2}{c}{Win rate (\%)} & \multicolumn{2}{c}{Win-score} \\" in latex
    assert r"Method & 20\% flipped & 42.5\% flipped & 20\% flipped & 42.5\% flipped \\" in latex
    assert r"PACMR\_DPO, $\tau$ = 0.6 & $" in latex and "\nOracle & $100.0" in latex
    assert latex.count("{") == latex.count("}")

    taus = pd.read_csv("out/tables/pacmr-tau.csv")
    assert taus["τ"].tolist() == [0.5, 0.6] * 2
    assert taus["Noise rate"].tolist() == ["20%", "20%", "42.5%", "42.5%"]
    assert pd.read_csv("out/tables/both.csv")["Method"].tolist() == 2 * ["DPO", *TAU.values()]
    weights = pd.read_csv("out/tables/learned-weights.csv")
    row = weights[(weights["Method"] == TAU["pacmr-tau0.5"]) & (weights["Noise rate"] == "20%")].iloc[0]
    expected = [0.9, mean([0.7, 0.6, 0.5]), *moments([0.2, 0.3, 0.4])]
    names = ["Mean weight (unflipped)", "Mean weight (flipped)", "Weight gap", "Weight gap, standard error"]
    assert row[names].tolist() == pytest.approx(expected)
    assert row[["VNet's updates", "skipped"]].tolist() == [8, 2]
    assert "of the start, in: PACMR_DPO, τ = 0.6 at 42.5%, seed 2.\n" in text
    assert "went back to an earlier policy in: DPO at 20%, seed 1.\n" in text
    final = pd.read_csv("out/tables/final-weights.csv")
    assert final["Method"].tolist() == [TAU["pacmr-tau0.5"]] * 2
    assert final["Noise rate"].tolist() == ["20%", "42.5%"]
    assert final["Mean weight (unflipped)"].tolist() == [1.5, 1.5] and final["Weight gap"].tolist() == [1, 1]
    assert "**0.800" not in text and "0.6000 ± 0.0577 | 0.3000" in text, "equal rows have no best"
    pages = {path.stem for path in Path("out/figures").glob("pacmr-tau0.5-*.png")}
    assert pages == {"pacmr-tau0.5-step-00010"}
    for name in ("noise-rates", "pacmr-tau0.5-step-00010"):
        assert Path(f"out/figures/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert Path(f"out/figures/{name}.pdf").read_bytes().startswith(b"%PDF")
    frame = pd.read_csv("out/cells.csv").assign(**dict.fromkeys(MEASURES) | {"val_accuracy": 0.5})
    figure = draw_noise(pd.concat([frame.assign(noise=i / 20) for i in range(10)]))
    figure.draw_without_rendering()
    assert figure.get_tightbbox().x0 >= 0 and figure.get_tightbbox().x1 <= figure.get_figwidth()
    assert all(abs(y - round(y)) < 0.45 for line in figure.axes[0].lines for y in line.get_ydata())


def test_what_latex_would_take_for_its_own():
    latex = Table("t", "50% & more", [("", "β"), ("", "ε")], [["a_b", r"$x^2 {~} \ σ"]]).latex()
    assert r"\caption{50\% \& more.}" in latex and r"$\beta$ & $\epsilon$ \\" in latex
    row = r"a\_b & \$x\textasciicircum{}2 \{\textasciitilde{}\} \textbackslash{} $\sigma$ \\"
    assert row in latex.splitlines()
