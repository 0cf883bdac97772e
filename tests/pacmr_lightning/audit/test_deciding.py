"""Deciding on the report's page, by key and click in a real browser, with the texts of hostile rows."""

import json
from urllib.parse import urlsplit

import pytest

from pacmr_lightning.audit.manual_review import read_decisions

from .chromium import BROWSER, chromium
from .conftest import HOSTILE
from .test_report import hostile_report

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")

COUNT = "document.querySelector('.count').textContent"
SAID = "document.querySelector('.said').textContent"
CURRENT = "[...document.querySelectorAll('article')].findIndex(a => a.getAttribute('aria-current'))"
DECIDED = "[...document.querySelectorAll('article')].map(a => a.dataset.decision ?? null)"
NO_STORAGE = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('refused') }})"


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """The file of a page, the ids on it, and which column was chosen in training."""
    page, pairs = hostile_report()
    path = tmp_path_factory.mktemp("deciding") / "report.html"
    path.write_text(page, encoding="utf-8")
    return path, pairs.index.tolist(), pairs["observed"]


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture
def page(listed, tab):
    tab.open(listed[0].as_uri())
    tab.value("localStorage.clear()")
    tab.open(listed[0].as_uri())
    return tab


def saved(tab, folder):
    path = folder / "decisions.jsonl"
    tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    tab.click(".save")
    tab.wait(path.exists)
    return path


def test_by_key(page, listed, tmp_path):
    _, ids, observed = listed
    assert page.value(COUNT) == "0 of 5 decided; 0 of 2 in the random sample"
    page.press("x")
    assert page.value(CURRENT) == 0 and page.value(DECIDED) == [None] * 5, "shown first, then decided on"
    page.press("x", "k", "p", "p", "n", "U", "d")
    # The second was decided on again, and then the third was the next without a decision.
    assert page.value(DECIDED) == ["swap", "unsure", "drop", None, None] and page.value(CURRENT) == 3
    top, bottom = page.value(
        "(r => [r.top, r.bottom])(document.querySelector('[aria-current]').getBoundingClientRect())"
    )
    assert 0 <= top < 100 and bottom > top, "it is in view"
    page.press("k", modifiers=2)  # with Ctrl it is the browser's
    assert page.value(COUNT) == "3 of 5 decided; 2 of 2 in the random sample"
    page.press("p", "d")
    assert page.value(DECIDED)[2] is None, "the same once more takes it back"
    page.value("window.scrollTo(0, 0)")
    page.press("k")
    assert page.value(DECIDED)[2] is None and page.value(CURRENT) == 2, "out of view: shown again first"
    page.press("k")
    assert read_decisions(str(saved(page, tmp_path))).rows == {
        name: {
            **{"decision": word, "observed": observed[name], "sample": name in ids[:2]},
            "texts": f"texts of {name.rpartition(' ')[2]}",
        }
        for name, word in zip(ids, ("swap", "unsure", "keep"), strict=False)
    }
    assert "3 decisions are in decisions.jsonl" in page.value(SAID)
    asked = [e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
    assert {urlsplit(url).scheme for url in asked} <= {"file", "data", "blob"}, "no server's"
    assert page.value("document.title") == f"Label audit of runs/{HOSTILE}"


def test_by_click_and_in_another_tab(page, listed, tmp_path):
    path, ids, _ = listed
    page.click("article:nth-of-type(4) .decide button:nth-of-type(2)")
    assert page.value(DECIDED) == [None, None, None, "swap", None] and page.value(CURRENT) == 3
    page.click(".next")
    assert page.value(CURRENT) == 4
    page.press("k")
    assert page.value(CURRENT) == 0, "from the top again"
    page.press("x")
    # The browser keeps decisions for a page of these labels, which may list fewer pairs, and for no other.
    text = path.read_text(encoding="utf-8")
    other, fewer = tmp_path / "other.html", tmp_path / "fewer.html"
    other.write_text(text.replace(page.value("document.body.dataset.labels"), "of others"), encoding="utf-8")
    page.open(other.as_uri())
    assert page.value(DECIDED) == [None] * 5
    start, end = text.index("<article"), text.index("</article>") + len("</article>")
    fewer.write_text(text[:start] + text[end:], encoding="utf-8")
    page.open(fewer.as_uri())
    assert page.value(DECIDED) == [None, None, "swap", "keep"]
    assert set(read_decisions(str(saved(page, tmp_path))).words) == {ids[0], ids[3], ids[4]}


def test_where_storage_is_refused_on_a_narrow_screen(page, listed, tmp_path):
    script = page.call("Page.addScriptToEvaluateOnNewDocument", source=NO_STORAGE)
    page.open(listed[0].as_uri())
    page.call("Page.removeScriptToEvaluateOnNewDocument", **script)
    assert "keeps nothing" in page.value(SAID)
    page.press("k", "k", "x")
    assert len(read_decisions(str(saved(page, tmp_path))).words) == 2
    size = {"width": 380, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    page.call("Emulation.setDeviceMetricsOverride", **size)
    assert page.value("document.documentElement.scrollWidth <= window.innerWidth"), "nothing is out of view"
    assert page.value("document.querySelector('.bar').getBoundingClientRect().height < 250")


def test_a_file_is_loaded_back(page, listed, tmp_path):
    _, ids, observed = listed

    def line(i, **other):
        row = {"id": ids[i], "decision": "keep", "observed": observed[ids[i]], "sample": False}
        return json.dumps(row | other) + "\n"

    def load(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        page.give_file("input[type=file]", tmp_path / name)
        page.wait(lambda: "loaded" in page.value(SAID))
        said = page.value(SAID)
        page.value("document.querySelector('.said').textContent = ''")
        return said

    said = load("good.jsonl", line(0) + line(3, decision="drop") + line(4, id="elsewhere", sample=True))
    assert said == "3 decisions loaded, 1 of them on pairs that are not on this page."
    assert page.value(DECIDED) == ["keep", None, None, "drop", None]
    found = read_decisions(str(saved(page, tmp_path))).rows
    # The first is of this page's sample, wherever it was decided on.
    assert {name for name in found if found[name]["sample"]} == {ids[0], "elsewhere"} and len(found) == 3
    side = "chosen" if observed[ids[1]] == "rejected" else "rejected"
    for name, text, why in (
        ("no.jsonl", "[1, 2]\n", "line 1 is no decision"),
        ("word.jsonl", line(1) + line(2, decision="flip"), "line 2 is no decision"),
        ("side.jsonl", line(1, observed=side), "line 1 decides on a pair that had the other label there"),
        ("texts.jsonl", line(1, texts="others"), "line 1 decides on a pair that had other texts there"),
    ):
        assert load(name, text) == f"{name} was not loaded: {why}."
        assert page.value(DECIDED) == ["keep", None, None, "drop", None]
