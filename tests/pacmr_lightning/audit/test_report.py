"""The report: hostile text stays text, and nothing is loaded from elsewhere."""

import base64
import hashlib
import html
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pacmr_lightning.audit.html_report import FOLD, _edges, html_report, visible_text
from pacmr_lightning.audit.manual_review import Texts, random_sample
from pacmr_lightning.audit.shortcuts import shortcuts

from .conftest import HOSTILE, pairs_on
from .test_suspected import find_with, frame

NASTY = f"</div></details>{HOSTILE}&amp;<!-- \x00\x07\x1b[31m \u202eabc\u2066 \r\n\t😀 \x85 ' \" ]]>"
VISIBLE = NASTY.replace("\r\n", "\n")
for character in "\x00\x07\x1b\u202e\u2066\x85":
    VISIBLE = VISIBLE.replace(character, f"[U+{ord(character):04X}]")
SCRIPT = (Path(__file__).parents[3] / "pacmr_lightning/audit/report.js").read_text(encoding="utf-8")


def hostile_report():
    """The page of an audit of hostile rows, and the pairs on it: two of a random sample, and three others."""
    pairs = frame(600)
    pairs["id"] = [f"{HOSTILE}\x00\x7f\u202e😀 {i}" for i in range(600)]
    pairs["category"] = np.where(pairs["u"] < 0, NASTY, f"other {NASTY}")
    pairs.loc[pairs.index[::2], "observed"] = "rejected"
    found = find_with(pairs, "policy", 0.3)
    drawn = random_sample(pairs["id"].tolist(), 2)
    others = [name for name in found.pairs["id"] if name not in drawn][:3]
    long = NASTY + "x" * 100_000
    texts = dict.fromkeys(drawn, Texts("which one?", "this", "that\n" * 60))
    texts |= {others[0]: Texts(NASTY, "", long), others[1]: Texts("prompt\n\n", "good", "bad")}
    texts |= {others[2]: Texts("?", "good", "bad")}
    followed = shortcuts(np.arange(600), ["good"] * 600, ["bad"] * 600)
    page = html_report(found, f"runs/{HOSTILE}", texts, [f"A note of {NASTY}."], followed, drawn)
    return page, pairs.set_index("id").loc[[*drawn, *others]]


@pytest.fixture(scope="module")
def report():
    return hostile_report()


def test_hostile_text_is_text(report):
    page, listed = report
    for text in (VISIBLE, VISIBLE + "x" * 100_000, "", "prompt\n\n"):
        assert f'<div class="text" dir="auto">{html.escape(text)}</div>' in page
    assert not set("\x00\x07\x1b\x7f\x85\u202e\u2066") & set(page)
    named = listed.assign(sample=[True, True, False, False, False]).reset_index()
    assert pairs_on(page) == named[["id", "observed", "sample", "texts"]].to_dict("records")
    own = f"<script>{SCRIPT}</script>"
    assert page.count(own) == 1
    rest = page.replace(own, "")
    tags = re.findall(r"<(\w+)", rest)
    assert "script" not in tags and tags.count("img") == 1, "the figure alone, and nothing from the rows"
    for tag in ("div", "details", "article", "table"):
        assert tags.count(tag) == rest.count(f"</{tag}>") > 0
    assert not {"iframe", "object", "embed", "link", "base", "form", "svg"} & set(tags)
    assert not re.search(r"<[^>]* on\w+=", re.sub('"[^"]*"', "", rest)), "no handler of events"
    [link] = re.findall(r' (?:src|href|srcset|action)="(.*?)"', rest)
    assert link.startswith("data:image/png;base64,") and "url(" not in page and "@import" not in page
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    [policy] = re.findall(r'content="(default-src .*?)"', page)
    assert policy.startswith("default-src 'none'; ") and policy.endswith(f"; script-src 'sha256-{digest}'")


def test_what_the_sample_does_not_say(report):
    page, _ = report
    sample, _, suspected = page.partition("<h2>A random sample</h2>")[2].partition("The 3 pairs with the low")
    assert "random pair 1 of 2" in sample and "which one?" in sample and "which one?" not in suspected
    for told in ("p 0.", "suggestion", "weight", "the label is"):
        assert told not in sample and told in suspected
    assert "Labels follow a shortcut: in 100% of 600 pairs with the word “bad” in only one response" in page
    assert page.count("<details>") == 2, "of the statistics, and of a long text"
    assert f"{html.escape(VISIBLE)}{'x' * (FOLD // 2 - len(NASTY))} …</span>" in page
    for text in ("\ud800", "a\rb", "\x7f", "\u2028"):
        assert visible_text(text).encode() and "\r" not in visible_text(text)


@pytest.mark.parametrize("value", [0.0, 1.0, -3e4])
def test_the_figure_of_nearly_equal_scores(value):
    for scores in (np.array([value, *[np.nextafter(value, np.inf)] * 2]), np.full(3, value)):
        edges = _edges(scores, 30)
        assert np.histogram(scores, edges)[0].sum() == 3 and (np.diff(edges) > 0).all()


def test_what_it_says():
    pairs = frame(1500)

    def page_of(found):
        return html_report(found, "runs/a", {}, [], shortcuts(np.arange(2), ["a"] * 2, ["b"] * 2))

    found = find_with(pairs, "dpo")
    known = page_of(found)
    said = known.partition('<p class="verdict">')[2].partition("</p>")[0]
    assert known.index(said) < known.index("<details>") < known.index("AUROC")
    share, low, high = found.contradicted
    assert (
        f"A second annotator would probably contradict {found.suspected:,} of 1,500 labels. Of these "
        f"suspected labels {share:.0%} are expected to be contradicted (95% interval {low:.0%} to "
        f"{high:.0%}). Known to be wrong: {int(pairs['flipped'].sum()):,} of 1,500"
    ) in said
    rate = found.agreement
    flips = f"Rate of random flips, if the errors are such: {rate.rate:.1%} (95% interval {rate.low:.1%} to "
    assert flips in known and "<h2>By category</h2>" in known
    clean = page_of(find_with(frame(1500, rate=0.0, known=False).assign(category=pd.NA), "dpo"))
    for without in ("AUROC", "precision", "nown to be wrong", "Rate of random flips", "<h2>By category</h2>"):
        assert without not in clean
