"""WeightGap in real runs: the table, resumes; in two processes: test_groups.py."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import roc_auc_score

from pacmr_lightning import cli
from pacmr_lightning.analysis.last_pass import last_pass
from pacmr_lightning.callbacks.weight_gap import probe_indices
from pacmr_lightning.runs.finished_run import find_run, load_run
from pacmr_lightning.runs.folder import read_weights

from ..conftest import short_fit, with_callback


@pytest.fixture
def words(tmp_path, tiny_llama):
    """A run of 6 updates of 8 pairs, with VNet updates every 2 and 13 probe pairs."""
    options = f"""--data.source EmbeddedWorld --data.source.pairs 56 --data.source.validation_pairs 8
        --data.global_batch_size 8 --data.meta_batch_size 4 --data.noise_rate 0.4
        --model.weighting VNetWeighting --model.weighting.every 2 --model.weighting.learning_rate 0.05
        --model.learning_rate 0.01 --model.micro_batch_size 4 --trainer.max_steps 6
        --trainer.log_every_n_steps 1 --checkpoint.every_n_train_steps 2 --checkpoint.save_top_k -1
        {with_callback("WeightRecorder")} {with_callback("WeightGap", probe_pairs=13)}"""
    return short_fit(tiny_llama(tmp_path / "model", initializer_range=0.2), options)


def fit(words, folder, *more):
    cli.main([*words, "--trainer.default_root_dir", str(folder), *more])
    return pd.read_csv(folder / "analysis" / "weight-gap.csv")


EVERY = ("--trainer.callbacks.every", "2")


@pytest.mark.filterwarnings("ignore:.*stay until this fit overwrites them")
def test_the_table_and_what_it_leaves_alone(words, tmp_path):
    """However often it looks, the run and the random state are the same."""
    table, state = fit(words, tmp_path / "once"), torch.get_rng_state()
    assert table["step"].tolist() == [6] and table["pairs"].tolist() == [13]
    module, data, _ = load_run(find_run(tmp_path / "once", "last"), as_trained=True)
    data.setup("fit")
    pairs = last_pass(module, data.train_pairs).iloc[probe_indices(data.train_pairs.rows["id"][:], 13)]
    wrong, weight = pairs["flipped"].astype(bool), pairs["weight"]
    assert wrong.nunique() == 2 and weight.std() > 0
    row = table.iloc[0]
    assert row["mean"] == pytest.approx(weight.mean(), rel=1e-5)
    assert row["gap"] == pytest.approx(weight[~wrong].mean() - weight[wrong].mean(), abs=1e-5)
    assert row["auroc"] == pytest.approx(roc_auc_score(wrong, -weight), abs=1e-5)
    logged = pd.read_csv(tmp_path / "once" / "metrics.csv")["pair_weights/probe_gap"].dropna()
    assert logged.tolist() == [pytest.approx(row["gap"], abs=1e-6)]

    folder = tmp_path / "often"
    often = fit(words, folder, *EVERY)
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(set(often["step"])) == [2, 4, 6]
    pd.testing.assert_frame_equal(often[often["step"] == 6].reset_index(drop=True), table)
    pd.testing.assert_frame_equal(read_weights(folder), read_weights(tmp_path / "once"))

    # A resume neither doubles nor loses rows.
    again = fit(words, folder, *EVERY, "--ckpt_path", str(folder / "checkpoints" / "step-4.ckpt"))
    pd.testing.assert_frame_equal(again, often)


def test_unknown_flips_have_no_gap(words, tmp_path):
    table = fit(words, tmp_path / "run", "--data.noise_rate", "0", "--model.weighting", "SigmoidPrior")
    # Rows of the synthetic benchmark say that they are not flipped; without the column nothing is known.
    assert table["mean_flipped"].isna().all() and table["auroc"].isna().all()
    assert table["mean"].between(0, 1).all()


def test_the_probe_set_depends_on_ids_alone():
    ids = [f"pair-{i}" for i in range(500)]
    chosen = {ids[i] for i in probe_indices(ids, 100)}
    backwards = ids[::-1]
    assert chosen == {backwards[i] for i in probe_indices(backwards, 100)}
    assert {ids[i] for i in probe_indices(ids, 50)} < chosen
    assert len(probe_indices(ids[:7], 100)) == 7
    # As good as random: the mean position of 100 of 500 has a standard error of 13.
    assert abs(np.mean([int(name.split("-")[1]) for name in chosen]) - 249.5) < 52
