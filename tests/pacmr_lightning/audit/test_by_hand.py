"""Decisions by hand, applied by an audit; the truth of planted flips decides on the sample."""

import pandas as pd
import pytest
import torch

from pacmr_lightning.audit import AuditOptions
from pacmr_lightning.audit.combination import VIEWS
from pacmr_lightning.audit.manual_review import random_sample, sample_estimate
from pacmr_lightning.audit.pipeline import conclude
from pacmr_lightning.audit.scored_pairs import ScoredPairs
from pacmr_lightning.batch import LogProbs
from pacmr_lightning.commands.audit import show
from pacmr_lightning.datamodules import Files
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import AuditedWeights

from ...conftest import read_lines, write_lines
from .conftest import pairs_on
from .test_suspected import frame

N, SAMPLE = 1500, 60


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
        self.left = set(found.suspected["id"])
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
    assert "decision" not in plain
    # Suspected labels that were picked are all wrong, and must not count in the sample's own share.
    picked = [{"id": name, "decision": "swap"} for name in plain.index[plain["flipped"]][:200]]
    known = {row["id"] for row in audit.drawn}
    rows = [*audit.drawn, *(row for row in picked if row["id"] not in known)]
    capsys.readouterr()
    table = audit(decisions=audit.decide("sample.jsonl", rows))
    said = " ".join(capsys.readouterr().out.split())
    count = sum(audit.wrong[row["id"]] for row in audit.drawn)
    share = sample_estimate(["swap"] * count + ["keep"] * (SAMPLE - count))
    assert share in said and share in (audit.folder / "report.html").read_text()
    assert f"The score is learned from {len(rows)} decisions: " in said

    kept = pd.read_parquet(audit.folder / "pairs.parquet").set_index("id")
    assert kept["p"].to_dict() == table["p"].to_dict()
    sure = {row["id"]: float(row["decision"] == "keep") for row in rows}
    assert kept["p"][list(sure)].to_dict() == sure
    assert kept["decision"].dropna().to_dict() == {row["id"]: row["decision"] for row in rows}
    # The other views are zero here, so that the other pairs keep their p.
    rest = [name for name in table.index if name not in sure]
    assert (table["p"][rest] - plain["p"][rest]).abs().max() < 0.01


def test_few_decisions(audit, plain, capsys):
    """They set p of their own pairs alone, which come last on the page; a random sample comes first."""
    few = [row | {"sample": False} for row in audit.drawn[:10]]
    table = audit(decisions=audit.decide("few.jsonl", few), sample=7)
    said = " ".join(capsys.readouterr().out.split())
    assert "10 labels are decided as right or wrong; from 30 on they also improve the score." in said
    assert "randomly sampled labels" not in said
    rest = [name for name in table.index if name not in {row["id"] for row in few}]
    assert table["p"][rest].to_dict() == plain["p"][rest].to_dict()
    found = pairs_on((audit.folder / "report.html").read_text())
    drawn = random_sample(audit.pairs["id"].tolist(), 7)
    suspected = [*rest[:5], *(name for name in table.index if name not in {*rest, *drawn})]
    assert [(pair["id"], pair["sample"]) for pair in found] == [
        *((name, True) for name in drawn),
        *((name, False) for name in suspected),
    ]


def test_a_decision_counts_for_all_rows_of_a_pair_but_ties_which_are_not_sampled(tmp_path):
    audit = Audit(tmp_path)
    audit.pairs["observed"], audit.wrong = "chosen", {}
    audit.pairs.loc[:3, "pair"], audit.pairs.loc[2, "side"], audit.pairs.loc[3, "tie"] = 0, -1, True
    table = audit(decisions=audit.decide("one.jsonl", [{"id": "pair-0", "decision": "swap"}]), sample=N - 1)
    assert table["decision"].dropna().to_dict() == {"pair-0": "swap", "pair-1": "swap", "pair-2": "keep"}
    assert table["p"][["pair-0", "pair-1", "pair-2"]].tolist() == [0, 0, 1]
    cleaned = {row["id"]: row["chosen"][0] for row in read_lines(tmp_path / "cleaned.jsonl")}
    assert [cleaned[f"pair-{i}"] for i in range(4)] == ["b", "b", "g", "g"]
    assert "pair-3" not in [pair["id"] for pair in pairs_on((tmp_path / "report.html").read_text())]


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
    assert table.index.drop([*decided]).equals(plain.index.drop([*decided]))
    assert table["p"].is_monotonic_increasing and table["suggested"].equals(plain["suggested"][table.index])
    suspected = table.index[table["suggested"] == "swap"].tolist()
    assert audit.left == set(suspected) - {name for name, word in decided.items() if word != "unsure"}
    left, page = len(audit.left), (audit.folder / "report.html").read_text()
    assert f". Of the {left} undecided ones {1 - table.p[[*audit.left]].mean():.0%} are expected" in page
    counts = (f"{left + 14} of 1,500 labels. ", f"<td>{left + 14}</td>", "decided: ", "suggestion: ")
    assert "hand: 14 wrong, 2 right, 2 dropped." in page and [*map(page.count, counts)] == [1, 1, 18, 7]
    shown = page.count("decided: swap") + page.count("suggestion: swap")
    assert f"{shown} of them suspected" in page and shown > 14
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
        left = table["p_majority"][names[3]]
        expected = [1, 0, 0.5 if soft else 0, float(left >= 0.5) if hard else left]
        assert found == pytest.approx(expected, abs=1e-6)
