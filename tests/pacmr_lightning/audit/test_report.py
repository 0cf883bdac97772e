"""The report: hostile text stays text, and nothing is loaded from elsewhere."""

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pacmr_lightning.audit.decisions import Texts
from pacmr_lightning.audit.html_report import FOLD, html_report, visible_text
from pacmr_lightning.audit.shortcuts import shortcuts

from .conftest import HOSTILE
from .test_suspected import find_with, frame

NASTY = f"</div></details>{HOSTILE}&amp;<!-- \x00\x07\x1b[31m \u202eabc\u2066 \r\n\t😀 \x85 ' \" ]]>"
VISIBLE = NASTY.replace("\r\n", "\n")
for character in "\x00\x07\x1b\u202e\u2066\x85":
    VISIBLE = VISIBLE.replace(character, f"[U+{ord(character):04X}]")
SCRIPT = (Path(__file__).parents[3] / "pacmr_lightning/audit/report.js").read_text(encoding="utf-8")


class Page(HTMLParser):
    """Tags, attributes and the text inside of ``class=text`` elements."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.texts, self.open, self.scripts = [], [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attributes]
        if tag not in ("meta", "img", "input"):
            self.open.append((tag, dict(attributes).get("class")))
            if tag == "script":
                self.scripts.append("")
            if self.open[-1][1] == "text":
                self.texts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            self.scripts[-1] += data
        if ("div", "text") in self.open or ("span", "text") in self.open:
            self.texts[-1] += data


@pytest.fixture(scope="module")
def page():
    pairs = frame(600)
    pairs["id"] = [f"{HOSTILE}{i}" for i in range(600)]
    pairs["category"] = np.where(pairs["u"] < 0, NASTY, f"other {NASTY}")
    found = find_with(pairs, "policy", 0.3)
    long = NASTY + "x" * 100_000
    first, second, drawn = found.pairs["id"][[0, 1, 400]]
    texts = {
        first: Texts(NASTY, "", long),
        second: Texts("prompt\n\n", "good", "bad"),
        drawn: Texts("which one?", "this", "that"),
    }
    followed = shortcuts(np.arange(600), ["good"] * 600, ["bad"] * 600)
    assert "good" in set(followed["trait"])
    return html_report(found, f"runs/{HOSTILE}", texts, [f"A note of {NASTY}."], followed, [drawn])


def test_hostile_text_is_text(page):
    parsed = Page(page)
    assert parsed.open == [], "every element is closed where it should be"
    assert not {"iframe", "object", "embed", "link", "base", "form", "svg"} & set(parsed.tags)
    assert parsed.scripts == [SCRIPT] and parsed.tags.count("script") == 1, "the page's own, and no other"
    assert parsed.tags.count("img") == 1, "the figure, and none from the rows"
    assert not [a for a in parsed.attributes if a[1].startswith("on")]
    links = [value for _, name, value in parsed.attributes if name in ("src", "href", "srcset", "action")]
    assert len(links) == 1 and all(link.startswith("data:image/png;base64,") for link in links)
    contents = [value for tag, name, value in parsed.attributes if tag == "meta" and name == "content"]
    (policy,) = [value for value in contents if "default-src 'none'" in value]
    (scripts,) = [part for part in policy.split("; ") if part.startswith("script-src")]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert scripts == f"script-src 'sha256-{digest}'", "no other script runs"
    assert "url(" not in page and "@import" not in page
    assert VISIBLE in parsed.texts and VISIBLE + "x" * 100_000 in parsed.texts
    assert "" in parsed.texts and "prompt\n\n" in parsed.texts
    assert not set("\x00\x07\x1b\x85\u202e\u2066") & set(page)
    named = [json.loads(value) for tag, name, value in parsed.attributes if name == "data-pair"]
    assert [pair["sample"] for pair in named] == [True, False, False]
    assert all(pair["id"].startswith(HOSTILE) and pair["observed"] == "chosen" for pair in named)


def test_what_the_sample_does_not_say(page):
    sample, _, suspected = page.partition("<h2>A random sample</h2>")[2].partition("most suspected labels")
    assert "random pair 1 of 1" in sample and "which one?" in sample and "which one?" not in suspected
    for told in ("p 0.", "suggestion", "weight", "the label is"):
        assert told not in sample and told in suspected
    parsed = Page(page)
    assert parsed.tags.count("details") == 2, "of the statistics, and of a long text"
    assert VISIBLE + "x" * (FOLD // 2 - len(NASTY)) + " …" in parsed.texts
    for text in ("\ud800", "a\rb", "\x7f", "\u2028"):
        assert visible_text(text).encode() and "\r" not in visible_text(text)


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
    coins = pairs.assign(cross_fit_u=np.random.default_rng(0).standard_normal(1500))
    coins = page_of(find_with(coins, "dpo"))
    for words in (
        "These 1,500 labels cannot be predicted from the scores better than by a coin, so no label is",
        "the ranks say which pairs to read first",
        "labels that the scorer contradicts most",
    ):
        assert words in coins
