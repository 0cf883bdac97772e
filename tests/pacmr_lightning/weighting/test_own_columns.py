"""Weights and soft labels from columns of the rows: through ``pacmr fit``, and what is said of others."""

import pandas as pd
import pytest

from pacmr_lightning import cli
from pacmr_lightning.runs.folder import weight_parts

from ...conftest import write_lines


@pytest.fixture
def fit(tiny_llama, pair_rows, inside, caplog):
    tiny_llama("model")

    def run(method, columns, *words):
        rows = [row | {"id": str(i)} | columns(i) for i, row in enumerate(pair_rows(24))]
        write_lines(inside / "pairs.jsonl", rows)
        options = "--data.global_batch_size 4 --model.learning_rate 0.001 --trainer.callbacks WeightRecorder"
        caplog.clear()
        start = ["fit", "--model", "model", "--data", "pairs.jsonl", "--method", method, "--output", "run"]
        cli.main([*start, *options.split(), "--trainer.max_steps", "5", *words])
        found = pd.concat(map(pd.read_parquet, weight_parts("run"))).set_index("id")
        return found, " ".join(caplog.messages)

    return run


def probability(i):
    return 0.5 + i / 50


def test_weights_and_the_other_columns(fit):
    votes = {"votes_for": 3, "votes_against": 2}
    found, said = fit("own_weights", lambda i: {"weight": i / 4, "p_right": probability(i), **votes})
    assert found["weight"].tolist() == [int(i) / 4 for i in found.index]
    assert "Weights are the column weight of the rows" in said
    assert "AuditedWeights does not use the column p_right or votes_for of the rows" in said


def test_soft_labels_follow_injected_noise(fit):
    noise = ("--data.noise_rate", "0.4")
    own = lambda i: {"p_right": probability(i), "weight": 2} if i else {"label": "tie"}  # noqa: E731
    found, said = fit("soft_labels", own, *noise)
    flips = pd.read_parquet("run/noise_mask.parquet").set_index("id")["flipped"]
    assert flips[found.index].any() and not flips[found.index].all()
    expected = [1 - probability(int(i)) if flips[i] else probability(int(i)) for i in found.index]
    assert found["weight"].tolist() == pytest.approx(expected)
    assert "Soft labels are the column p_right" in said
    assert "AuditedWeights does not use the column weight of the rows" in said


@pytest.mark.parametrize(("hard", "weights"), [("false", [0.5, 3 / 4, 3 / 5]), ("true", [0.5, 1, 1])])
def test_votes_and_ties(fit, hard, weights):
    def columns(i):
        return {"label": "tie"} if i % 3 == 0 else {"votes_for": 3, "votes_against": i % 3}

    found, said = fit("soft_labels", columns, "--model.weighting.hard", hard)
    assert found["weight"].tolist() == pytest.approx([weights[int(i) % 3] for i in found.index])
    assert "labels are ties" not in said
    _, said = fit("dpo", columns, "--output", "other")
    assert "Unweighted does not use the column votes_for of the rows" in said
    assert "labels are ties, from which Unweighted learns that chosen is better" in said


def test_only_ties_beside_single_labels(fit):
    noise = ("--data.noise_rate", "0.4", "--model.weighting", "DropFlipped")
    found, said = fit("dpo", lambda i: {"label": "Tie (bothbad)" if i % 2 else "chosen"}, *noise)
    assert found["weight"].groupby(found.index.astype(int) % 2).min().tolist() == [0, 1]
    assert "labels are ties" in said and "votes_for" not in said and "not read" not in said


@pytest.mark.parametrize(
    ("method", "columns", "message"),
    [
        ("own_weights", lambda i: {}, "the rows have no column weight, p_right or votes_for"),
        ("soft_labels", lambda i: {"weight": 1}, "the rows have no column p_right or votes_for"),
        ("own_weights", lambda i: {"weight": 1} if i else {}, "have no weight (0 for one)"),
        ("own_weights", lambda i: {"weight": -1}, "'weight' is -1, but it must be a number of at least 0"),
        ("own_weights", lambda i: {"weight": "high"}, "'weight' is 'high', but it must be a number of at"),
        ("dpo", lambda i: {"votes_for": 3}, "line 1 has 3.0 votes_for and None votes_against"),
        ("dpo", lambda i: {"votes_for": 0, "votes_against": 0}, "of at least one vote in all"),
        (
            "dpo",
            lambda i: {"label": "tie", "votes_for": 2, "votes_against": 1},
            "has the label 'tie', but 2 votes_for and 1 votes_against",
        ),
    ],
)
def test_columns_that_cannot_be_used(fit, method, columns, message, capsys):
    with pytest.raises(SystemExit) as stop:
        fit(method, columns)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
