"""``pacmr audit`` on a real run of a tiny model: values, halves, resuming, files, bad input."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from pacmr_lightning.audit import AuditOptions, cross_fit, scored_pairs
from pacmr_lightning.audit import audit as whole_audit
from pacmr_lightning.audit.cross_fit import CrossFit
from pacmr_lightning.audit.linear_probe import probe_log_odds
from pacmr_lightning.commands.audit import show
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.runs.finished_run import MOST_AT_ONCE, find_run, load_run
from pacmr_lightning.runs.folder import read_weights, weight_parts

from ...conftest import edit_config, read_lines, write_lines
from ..conftest import log_ratios
from .conftest import PAIRS, audit, fit, loaded, refused, world_rows


def as_trained(run):
    """The run's rows with the labels it was trained on, by its own record of the noise."""
    noise = pd.read_parquet(run / "noise_mask.parquet").set_index("id")["flipped"]
    rows = []
    for row in world_rows(PAIRS, 0):
        if noise[row["id"]]:
            row = row | {"chosen": row["rejected"], "rejected": row["chosen"]}
        rows.append(row | {"noise": bool(noise[row["id"]])})
    return rows


@pytest.fixture(scope="module")
def judged(finished, tmp_path_factory):
    """A run and its audit by the policy itself at a known rate, with a file of cleaned pairs."""
    run = shutil.copytree(finished, tmp_path_factory.mktemp("judged") / "run")
    more = {"noise_rate": 0.3, "top": PAIRS, "output": str(run / "out")}
    options = AuditOptions("policy", **more, cleaned=str(run / "clean.jsonl"), action="swap")
    return run, whole_audit(str(run), options=options)


def test_values_of_every_pair(judged):
    run, found = judged
    table = found.table.set_index("id")
    rows = as_trained(run)
    assert len(table) == PAIRS and sorted(table["rank"]) == list(range(1, PAIRS + 1))
    table = table.loc[[row["id"] for row in rows]]
    module = PreferenceModule.load_from_checkpoint(run / "checkpoints/last.ckpt")
    rewards = log_ratios(module.policy, rows)
    np.testing.assert_allclose(table["u"], rewards[:, 0] - rewards[:, 1], atol=1e-4)
    np.testing.assert_allclose(table["delta"], rewards.sum(1), atol=1e-4)
    np.testing.assert_allclose(table["loss"], np.log1p(np.exp(-table["u"])), rtol=1e-4)
    inputs = torch.tensor(rewards.sum(1)).float(), torch.tensor(rewards[:, 0] - rewards[:, 1]).float()
    with torch.no_grad():
        weight, a, b = module.vnet(*inputs)
    for name, value in {"weight": weight, "a": a, "b": b}.items():
        np.testing.assert_allclose(table[name], value, rtol=1e-4, atol=1e-3)
    assert table["weight"].std() > 0.01
    assert table["observed"].tolist() == ["rejected" if row["noise"] else "chosen" for row in rows]
    truth = [row["noise"] ^ row.get("flipped", False) for row in rows]
    assert table["flipped"].tolist() == truth and 0 < sum(truth) < PAIRS
    for name in ("category", "annotator"):
        assert table[name].tolist() == [row[name] for row in rows]
    mask = pd.read_parquet(run / "noise_mask.parquet").set_index("id")
    assert mask["annotator"].loc[table.index].equals(table["annotator"])
    assert found.table["u"].is_monotonic_increasing and found.table["p"].is_monotonic_increasing
    # p = sigmoid(logit(1 - eps) + k u) with one k.
    p = table["p"][table["u"].abs() > 0.01]
    k = (np.log(p / (1 - p)) - np.log(0.7 / 0.3)) / table["u"][p.index]
    assert k.min() > 0 and k.max() == pytest.approx(k.min(), rel=1e-3)


def test_files(judged, capsys):
    run, found = judged
    table, folder = found.table, run / "out"
    show(found)
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "pairs.parquet"), table, check_dtype=False)
    assert pd.read_csv(folder / "pairs.csv")["id"].tolist() == table["id"].tolist()
    assert pd.read_csv(folder / "methods.csv")["method"].tolist() == ["u"]
    assert pd.read_csv(folder / "shortcuts.csv").columns.tolist()[:2] == ["kind", "trait"]
    page = (folder / "report.html").read_text()
    assert "<td>a0</td><td>22</td>" in page.partition("<h2>By annotator</h2>")[2] and "By category<" in page
    assert f"{PAIRS} pairs with the lowest p, {len(found.suspected)} of them suspected</h2>" in page
    assert page.count("<article ") == PAIRS and page.count("<script") == 1 and "[U+202E]" in page
    assert "at a given rate of random flips of 30.0%" in page
    shown = " ".join(capsys.readouterr().out.split())
    assert "noise_rate 0.3" in shown and f"{PAIRS} labels" in shown and "labels swapped" in shown
    assert not list(run.rglob("*.partial"))


def only_part(run):
    visits = read_weights(run)
    first, *others = weight_parts(run)
    for part in others:
        part.unlink()
    visits.to_parquet(first)
    return first


def test_linear_probe(run, monkeypatch):
    table = audit(run, "probe").set_index("id")
    _, module, data, _ = loaded(run)
    states = data.train_state_differences(module.policy)
    truth = probe_log_odds(states, pd.factorize(pd.Series(data.train_pairs.rows["prompt"][:]))[0])
    np.testing.assert_allclose(table.loc[data.train_pairs.rows["id"][:], "probe_u"], truth)
    assert table["probe_u"].is_monotonic_increasing and table["probe_u"].std() > 0
    assert pd.read_csv(run / "audit/methods.csv")["method"][0] == "linear probe"
    page, u = (run / "audit/report.html").read_text(), table["probe_u"].iloc[0]
    assert "fitted to the labels of other prompts" in page and f" · u {u:.2f} · policy&#x27;s u " in page
    monkeypatch.setattr(PolicyModel, "reference_states", lambda *_: pytest.fail("the model was asked again"))
    pd.testing.assert_frame_equal(audit(run, "probe").set_index("id"), table)


@pytest.mark.parametrize(("side", "judge"), [(1, "u"), (-1, "linear probe")])
def test_who_judges_by_default(finished, tmp_path, capsys, side, judge):
    """By u of the first visit to any row of a pair; a pair without a visit was never trained on."""
    rows = [row | {"id": f"{new}{row['id']}"} for new in ("", "again-") for row in world_rows(PAIRS, 0)]
    twice = write_lines(tmp_path / "twice.jsonl", rows)
    run = fit(finished, tmp_path / "run", "--data.source.train", twice, "--trainer.max_epochs", "1")
    part = only_part(run)
    visits = pd.read_parquet(part).query("not id.str.startswith('again')").iloc[1:]
    later = visits.assign(u=-side * 5.0, step=visits["step"] + 100)
    copies = later.assign(id="again-" + later["id"])
    pd.concat([visits.assign(u=side * 5.0), later, copies]).to_parquet(part)
    audit(run)
    assert pd.read_csv(run / "audit/methods.csv")["method"][0] == judge
    said = " ".join(capsys.readouterr().out.split())
    share = re.search(rf"Scorer: {judge}. Agreement with .* each pair (\d+)% \(signed ranks", said)[1]
    assert abs(int(share) - 50 - side * 50) < 10
    seen = "u comes from a policy that was trained on these labels, wrong ones included."
    assert (seen in said) == (judge == "u")


def test_a_large_batch_is_taken_in_parts(run):
    found = find_run(str(run), "last")
    found.data["init_args"]["global_batch_size"] = 4096
    assert load_run(found)[0].micro_batch_size == MOST_AT_ONCE
    found.model["init_args"]["micro_batch_size"] = 4
    assert load_run(found)[0].micro_batch_size == 4


@pytest.fixture(scope="module")
def fitted(finished, tmp_path_factory):
    found, module, data, updates = loaded(finished)
    fit = CrossFit(found, data, updates, module.objective.beta, tmp_path_factory.mktemp("fit"))
    return fit, fit.u()


def test_each_policy_judges_what_it_has_not_seen(fitted, finished):
    fit, u = fitted
    prompts = fit.pairs.rows["prompt"][:]
    first, second = ({prompts[i] for i in half} for half in fit.halves)
    assert not first & second and len(fit.halves[0]) + len(fit.halves[1]) == PAIRS
    assert fit.updates == [round(8 * len(half) / PAIRS) for half in fit.halves]
    assert fit.data.train_pairs is fit.pairs and len(u) == PAIRS and u.notna().all()
    rows = as_trained(finished)
    for half in (0, 1):
        policy = PolicyModel(**fit.policy_options)
        policy.build()
        state = torch.load(fit.folder / f"half-{half}-{fit.key}.ckpt", weights_only=True)["state_dict"]
        for name, value in policy.adapter().items():
            value.data.copy_(state[f"policy.{name}"])
        judged = fit.halves[1 - half]
        ratios = log_ratios(policy, [rows[i] for i in judged])
        np.testing.assert_allclose(u.iloc[judged], ratios[:, 0] - ratios[:, 1], atol=1e-4)
        assert np.abs(u.iloc[judged]).max() > 0.01, "it has learned something"


def test_labels_of_the_judged_half_do_not_matter(fitted, finished, tmp_path):
    fit, u = fitted
    found, _, data, updates = loaded(finished)
    for i in fit.halves[1]:
        data.train_pairs.swapped[i] = not data.train_pairs.swapped[i]
    other = CrossFit(found, data, updates, 1.0, tmp_path)
    assert other.key != fit.key
    np.testing.assert_allclose(other.u().iloc[fit.halves[1]], -u.iloc[fit.halves[1]], atol=1e-3)


def test_a_second_audit_trains_nothing(fitted, finished, monkeypatch, tmp_path):
    fit, u = fitted
    monkeypatch.setattr(cross_fit, "Trainer", None)
    found, _, data, updates = loaded(finished)
    again = CrossFit(found, data, updates, 1.0, fit.folder)
    pd.testing.assert_series_equal(again.u(), u)
    again.path.unlink()  # the policies themselves are kept too
    pd.testing.assert_series_equal(again.u(), u)
    assert CrossFit(found, data, updates, 0.5, fit.folder).kept() is None, "another beta, other policies"
    checkpoint = torch.load(found.checkpoint, weights_only=True)
    checkpoint["reference"]["digest"] = "of others"
    torch.save(checkpoint, tmp_path / "other.ckpt")
    other = replace(found, checkpoint=tmp_path / "other.ckpt")
    assert CrossFit(other, data, updates, 1.0, fit.folder).kept() is None, "other base weights"


def test_training_goes_on_after_a_kill(fitted, finished, tmp_path, monkeypatch):
    fit, u = fitted
    found, _, data, updates = loaded(finished)
    steps, real = [], PreferenceModule.training_step

    def step(self, batch, batch_idx):
        steps.append(self.global_step)
        if len(steps) == 3:
            raise RuntimeError("killed")
        return real(self, batch, batch_idx)

    monkeypatch.setattr(PreferenceModule, "training_step", step)
    with pytest.raises(RuntimeError, match="killed"):
        CrossFit(found, data, updates, 1.0, tmp_path).u()
    assert data.train_pairs is not None and len(data.train_pairs) == PAIRS
    found, _, data, updates = loaded(finished)
    again = CrossFit(found, data, updates, 1.0, tmp_path)
    np.testing.assert_array_equal(again.u(), u)
    assert steps == [0, 1, 2, *range(2, fit.updates[0]), *range(fit.updates[1])]
    assert not list(tmp_path.glob("unfinished*"))


def test_dpo_scorer_and_both_in_the_table(run):
    assert audit(run)["cross_fit_u"].isna().all()
    only_part(run).unlink()  # without first visits nothing is chosen by them
    table = audit(run, "dpo")
    assert table["cross_fit_u"].is_monotonic_increasing
    assert pd.read_csv(run / "audit/methods.csv")["method"][0] == "cross-fitted u"
    kept = audit(run, "policy").set_index("id")["cross_fit_u"]
    assert kept.loc[table["id"]].tolist() == table["cross_fit_u"].tolist()
    assert pd.read_csv(run / "audit/methods.csv")["method"][:2].tolist() == ["u", "cross-fitted u"]


def test_cleaned(judged):
    run, audited = judged
    suspected = set(audited.suspected["id"])
    expected = [
        row | {"chosen": row["rejected"], "rejected": row["chosen"]} if row["id"] in suspected else row
        for row in as_trained(run)
    ]
    found = read_lines(run / "clean.jsonl")
    for name in ("id", "chosen", "rejected", "annotator"):
        assert [row[name] for row in found] == [row[name] for row in expected]
    said = audited.cleaned
    assert f"{len(suspected)} labels swapped" in said and "without noise options" in said


def test_as_trained_keeps_clean_pairs_out(run):
    found = find_run(str(run), "last")
    write_lines(run / "clean.jsonl", world_rows(4, 0))
    source = {"class_path": "Files", "init_args": {"train": str(run / "clean.jsonl")}}
    found.data["init_args"] |= {"clean_meta": source}
    for as_trained, count in ((True, PAIRS - 4), (False, PAIRS)):
        _, data, _ = load_run(found, as_trained=as_trained)
        data.setup("fit")
        assert len(data.train_pairs) == count and any(data.train_pairs.swapped) == as_trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--threshold 1.5", "threshold is 1.5"),
        ("--output /dev/null/x", "output is /dev/null/x, but /dev/null is a file and no folder"),
        ("--cleaned a.parquet --action drop", "ending in"),
        ("--max_length 9", "/run is a run, whose configuration has it; leave it out"),
        ("--checkpoint first", "no checkpoint first"),
        ("--sample 99", f"sample is 99, but there are {PAIRS} pairs without ties; lower it"),
        ("--decisions {odd}", "has a decision on 'nobody', which is no training pair here"),
        ("--cleaned {odd} --decisions {odd}", "odd.jsonl, which is the file of decisions; name another file"),
    ],
)
def test_bad_input(options, message, run, tmp_path, capsys):
    odd = write_lines(tmp_path / "odd.jsonl", [{"id": "nobody", "decision": "keep"}])
    assert message in refused(capsys, "audit", run, *options.format(odd=odd).split())
    assert not (run / "audit").exists()


def test_too_few_pairs(run, capsys, monkeypatch):
    edit_config(run, "data", global_batch_size=60)
    monkeypatch.setattr(scored_pairs, "last_pass", None)
    said = refused(capsys, "audit", run, "--scorer", "dpo")
    assert "fewer than the run's global_batch_size 60" in said
