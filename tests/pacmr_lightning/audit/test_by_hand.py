"""Decisions by hand, applied by an audit; the truth of planted flips decides on the sample."""

import json

import pandas as pd
import pytest
import torch
from scipy.special import expit, logit

from pacmr_lightning.audit import AuditOptions
from pacmr_lightning.audit.combination import VIEWS
from pacmr_lightning.audit.decisions import random_sample
from pacmr_lightning.audit.pipeline import conclude
from pacmr_lightning.audit.scored_pairs import ScoredPairs
from pacmr_lightning.batch import LogProbs
from pacmr_lightning.commands.audit import show
from pacmr_lightning.datamodules import Files
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import AuditedWeights

from ...conftest import read_lines, write_lines
from .test_findings import frame

N, SAMPLE = 1500, 60
SURE = {"keep": 0.0, "swap": 1.0}


def row_of(i):
    return {"id": f"pair-{i}", "prompt": f"q {i}", "chosen": f"good {i}", "rejected": f"bad {i}"}


class Audit:
    """A judge's u of N pairs, of which a run's noise has exchanged 30%, and what an audit makes of it."""

    def __init__(self, folder):
        self.folder = folder
        self.pairs = frame(N).assign(**dict.fromkeys(VIEWS, 0.0))  # responses of one length
        self.wrong = dict(zip(self.pairs["id"], self.pairs["flipped"].tolist(), strict=True))
        self.pairs["observed"] = self.pairs["flipped"].map({True: "rejected", False: "chosen"}).astype(object)
        self.source = Files(write_lines(folder / "pairs.jsonl", map(row_of, range(N))))
        drawn = random_sample(self.pairs["id"].tolist(), SAMPLE)
        self.drawn = [
            {"id": name, "decision": "swap" if self.wrong[name] else "keep", "sample": True} for name in drawn
        ]

    def __call__(self, top=5, **options):
        scored = ScoredPairs(self.pairs.copy(), "dpo", self.source.load_all(), self.source)
        scored.noise_flips = self.wrong
        found = conclude(scored, "runs/a", self.folder, AuditOptions(top=top, **options))
        show(found)
        self.rate = found.findings.rate
        return found.table.set_index("id")

    def decide(self, name, rows):
        return write_lines(self.folder / name, rows)


@pytest.fixture(scope="module")
def audit(tmp_path_factory):
    return Audit(tmp_path_factory.mktemp("by_hand"))


@pytest.fixture(scope="module")
def plain(audit):
    return audit()


def test_a_sample_tells_the_share(audit, plain, capsys):
    assert "decision" not in plain and not (audit.folder / "sample.csv").exists()
    # Suspects that were picked are all wrong, and must not count in the sample's own rate.
    picked = [{"id": name, "decision": "swap"} for name in plain.index[plain["flipped"]][:200]]
    known = {row["id"] for row in audit.drawn}
    rows = [*audit.drawn, *(row for row in picked if row["id"] not in known)]
    capsys.readouterr()
    table = audit(decisions=audit.decide("sample.jsonl", rows))
    said = " ".join(capsys.readouterr().out.split())
    count = sum(audit.wrong[row["id"]] for row in audit.drawn)
    sample = pd.read_csv(audit.folder / "sample.csv").iloc[0]
    assert (sample["wrong"], sample["right"]) == (count, SAMPLE - count)
    assert sample["noise_rate"] == pytest.approx(count / SAMPLE)
    assert sample["low"] < sum(audit.wrong.values()) / N < sample["high"]
    assert not sample["contradicts"] and sample["own_low"] < sample["own"] < sample["own_high"]
    share = f"{count / SAMPLE:.1%}"
    assert f"Of {SAMPLE} randomly sampled labels that were reviewed by hand, {count} are wrong" in said
    used = audit.rate
    assert not used.known and abs(used.rate - sum(audit.wrong.values()) / N) < 0.04
    assert f"The estimate that takes all decisions in, {used.rate:.1%}, lies in this interval." in said
    assert f"{count} are wrong: {share}" in (audit.folder / "report.html").read_text()

    kept = pd.read_parquet(audit.folder / "pairs.parquet").set_index("id")
    assert kept["p_wrong"].to_dict() == table["p_wrong"].to_dict()
    sure = {row["id"]: SURE[row["decision"]] for row in rows}
    assert kept["p_wrong"][list(sure)].to_dict() == sure
    assert kept["decision"].dropna().to_dict() == {row["id"]: row["decision"] for row in rows}
    told = audit(noise_rate=used.rate)
    assert told["p_wrong"].between(0, 1, inclusive="neither").all()
    rest = [name for name in table.index if name not in sure]
    assert (table["p_wrong"][rest] - told["p_wrong"][rest]).abs().max() < 0.05, (
        "k is fitted to decisions, too"
    )
    assert not (audit.folder / "sample.csv").exists(), "the last audit knew of no sample"


def test_a_sample_that_disagrees(audit, capsys):
    rows = [row | {"decision": "swap" if i < 2 else "keep"} for i, row in enumerate(audit.drawn)]
    audit(decisions=audit.decide("other.jsonl", rows), noise_rate=0.25)
    said = " ".join(capsys.readouterr().out.split())
    assert "2 are wrong: 3.3%" in said and "That disagrees with the audit's own estimate" in said
    assert "25.0%, as given" in said and "The audit uses" not in said
    audit(decisions=audit.decide("other.jsonl", rows))
    said = " ".join(capsys.readouterr().out.split())
    assert "The audit uses a noise rate of 3.3%." in said and "3.3%, as given" in said


@pytest.mark.parametrize(("number", "right", "share"), [(1, 0, "100.0%"), (7, 6, "53.8%")])
def test_a_sample_without_a_rate(number, right, share, audit, plain, capsys):
    """Of which half or more is wrong: the decisions are anchors, as without a sample."""
    wrong, rest = ([row for row in audit.drawn if row["decision"] == word] for word in ("swap", "keep"))
    wrong = wrong[:number] + rest[:right]
    table = audit(decisions=audit.decide("wrong.jsonl", wrong))
    said = " ".join(capsys.readouterr().out.split())
    assert f"{share} (95%" in said and "lies in this interval" in said
    anchored = audit(decisions=audit.decide("anchors.jsonl", [row | {"sample": False} for row in wrong]))
    pd.testing.assert_frame_equal(table, anchored)
    rest = [name for name in table.index if name not in {row["id"] for row in wrong}]
    assert (table["p_wrong"][rest] - plain["p_wrong"][rest]).abs().max() > 0.001, "they count"


@pytest.mark.parametrize("action", [None, "drop", "swap"])
def test_cleaned_follows_decisions_and_then_the_audit(action, audit, plain):
    suspected = plain.index[plain["suggested"] == "swap"].tolist()
    others = plain.index[plain["suggested"] == "keep"].tolist()
    # On the most doubtful ones, and mostly one way, so that they matter.
    words = ("keep", "swap", "drop", "unsure", *["swap"] * 6)
    decided = {names[i]: word for names in (suspected[::-1], others) for i, word in enumerate(words)}
    path = audit.decide("few.jsonl", [{"id": name, "decision": word} for name, word in decided.items()])
    cleaned = audit.folder / "cleaned.jsonl"
    table = audit(decisions=path, cleaned=str(cleaned), action=action)
    # Decisions move the threshold, along the same ranking.
    assert table.index.equals(plain.index)
    suspected = table.index[table["suggested"] == "swap"].tolist()
    assert suspected == table.index[: len(suspected)].tolist()
    # At the most probable eps it is the mean of P(wrong), to which a decision adds its log-odds, of 98%.
    eps, k = audit.rate.rate, audit.rate.slope
    said = table.index.map(decided).map({"keep": -1, "swap": 1}).fillna(0).to_numpy(dtype=float)
    by_u = logit(eps) - k * table["u"].to_numpy()
    assert expit(by_u + said * logit(0.98)).mean() == pytest.approx(eps, abs=1e-4)
    assert abs(expit(by_u).mean() - eps) > 1e-3, "as if nothing had been decided"
    done = dict.fromkeys(suspected if action else (), "drop" if action == "drop" else "swap")
    done |= {name: word for name, word in decided.items() if word != "unsure"}
    expected = []
    for i in range(N):
        row = row_of(i)
        word = done.get(row["id"])
        if word == "drop":
            continue
        # As trained, the noise has exchanged the wrong ones.
        swap = audit.wrong[row["id"]] != (word == "swap")
        sides = (row["rejected"], row["chosen"]) if swap else (row["chosen"], row["rejected"])
        expected.append((row["id"], *sides))
    assert [(row["id"], row["chosen"], row["rejected"]) for row in read_lines(cleaned)] == expected


def test_weights_of_decided_pairs(audit, make_batch):
    names = audit.pairs["id"][:4].tolist()
    words = dict(zip(names, ("keep", "swap", "drop", "unsure"), strict=True))
    table = audit(decisions=audit.decide("w.jsonl", [{"id": n, "decision": w} for n, w in words.items()]))
    batch, zeros = make_batch(4), torch.zeros(4)
    assert batch.ids == names
    nothing = Rewards(LogProbs(zeros, zeros), LogProbs(zeros, zeros), 1.0)
    file = str(audit.folder / "pairs.parquet")
    for soft, hard in ((False, False), (False, True), (True, False), (True, True)):
        found = AuditedWeights(file, soft_labels=soft, hard=hard).weights(nothing, batch).g.tolist()
        left = 1 - table["p_wrong"][names[3]]
        expected = [1, 0, 0.5 if soft else 0, float(left >= 0.5) if hard else left]
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_sample_to_read(audit):
    tasks = audit.folder / "tasks.json"
    table = audit(top=5, sample=7, label_studio=str(tasks))
    drawn = random_sample(audit.pairs["id"].tolist(), 7)
    found = [task["data"] for task in json.loads(tasks.read_text())]
    suspected = [name for name in table.index[:5] if name not in drawn]
    assert [task["pair"] for task in found] == [*drawn, *suspected]
    assert [task["sample"] for task in found] == [True] * 7 + [False] * len(suspected)
    for task in found:
        row, swapped = row_of(int(task["pair"].removeprefix("pair-"))), audit.wrong[task["pair"]]
        sides = (row["rejected"], row["chosen"]) if swapped else (row["chosen"], row["rejected"])
        assert (task["prompt"], task["chosen"], task["rejected"]) == (row["prompt"], *sides)
        assert task["observed"] == ("rejected" if swapped else "chosen")
    page = (audit.folder / "report.html").read_text()
    assert page.count("<article") == len(found) and "random pair 7 of 7" in page
