"""AuditedWeights: a run whose weights come from the audit of another run."""

import shutil

import numpy as np
import pandas as pd
import pytest

from pacmr_lightning import cli
from pacmr_lightning.errors import UserError
from pacmr_lightning.runs.folder import read_weights
from pacmr_lightning.weighting import AuditedWeights

from .conftest import PAIRS, audit


@pytest.fixture(scope="module")
def table(finished, tmp_path_factory):
    """A real audit's table. So few pairs say nothing of labels, so the probabilities are put in."""
    run = shutil.copytree(finished, tmp_path_factory.mktemp("audited") / "run")
    audit(run)
    table = pd.read_parquet(run / "audit/pairs.parquet")
    assert table["p_wrong"].isna().all()
    table["p_wrong"] = np.random.default_rng(0).uniform(size=PAIRS)
    return table


@pytest.fixture
def audited(run, table):
    """The table's file in a run that a test may change."""
    path = run / "audit/pairs.parquet"
    path.parent.mkdir()
    table.to_parquet(path)
    return path


def second_pass(run, path, *options):
    """``pacmr fit`` of the same config with the weights of an audit."""
    cli.main(
        [
            *("fit", "--config", str(run / "config.yaml"), "--model.method", "second"),
            *("--model.weighting", "AuditedWeights", "--model.weighting.audit", str(path)),
            *("--trainer.callbacks+", "WeightRecorder", "--trainer.default_root_dir", str(run / "second")),
            *options,
        ]
    )


def test_weights_are_the_audits(run, audited):
    second_pass(run, audited)
    recorded = read_weights(run / "second").set_index("id")
    right = 1 - pd.read_parquet(audited).set_index("id")["p_wrong"]
    assert len(recorded) == PAIRS
    np.testing.assert_allclose(recorded["weight"], right[recorded.index], rtol=1e-6)
    assert recorded["a"].isna().all()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda table: table.iloc[3:], (), f"does not know 3 of {PAIRS} training pairs"),
        (lambda table: table.drop(columns="p_wrong"), (), "is no table of pacmr audit"),
        (lambda table: table.assign(p_wrong=np.nan), (), "could not tell the share of wrong labels"),
        (None, ("--data.noise_seed", "7"), "training pairs with the other label; audit a run with the same"),
        (None, ("--model.weighting.audit", "nowhere"), "There is no file nowhere; pacmr audit RUN"),
    ],
)
def test_bad_input(change, options, message, run, audited, capsys):
    if change:
        change(pd.read_parquet(audited)).to_parquet(audited)
    with pytest.raises(SystemExit) as stop:
        second_pass(run, audited, *options)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and message in said and "Traceback" not in said
    assert not (run / "second").exists()


def test_a_pair_that_it_does_not_know(audited, make_batch):
    """From Python there may be no datamodule to look at."""
    with pytest.raises(UserError, match="does not know the pair"):
        AuditedWeights(str(audited)).weights(None, make_batch(2))
