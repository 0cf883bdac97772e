"use strict";
// Decisions on the listed pairs: made by key or click, kept in this browser, saved to a file and loaded from one.
// Texts of the data are never made HTML here, and nothing is fetched or sent.
(() => {
  const WORDS = { k: "keep", x: "swap", d: "drop", u: "unsure" };
  const MEANS = {
    keep: "the label is right",
    swap: "the rejected response is the better one",
    drop: "the pair is unusable",
    unsure: "leave it to the audit",
  };
  const articles = [...document.querySelectorAll("article[data-pair]")];
  if (!articles.length) return;
  const pairs = articles.map((article) => JSON.parse(article.dataset.pair));
  const listed = new Map(pairs.map((pair) => [pair.id, pair]));
  const key = `pacmr-decisions-${document.body.dataset.labels}`;
  let decided = new Map(); // by id, also of pairs that an earlier page of the same labels has listed
  let current = -1;
  let stored = true;
  let saved = true;

  function element(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  // One decision a line.
  const text = () => [...decided.values()].map((row) => JSON.stringify(row) + "\n").join("");

  function parse(lines) {
    const found = new Map();
    lines.replace(/^\uFEFF/, "").split("\n").forEach((line, i) => {
      if (!line.trim()) return;
      let row = null;
      try {
        row = JSON.parse(line);
      } catch {
        // Invalid JSON is no decision.
      }
      if (typeof row?.id !== "string" || !Object.values(WORDS).includes(row.decision)) {
        throw new Error(`line ${i + 1} is no decision`);
      }
      const pair = listed.get(row.id);
      const observed = row.observed ?? pair?.observed; // JSON omits it if unknown
      if (pair && observed !== pair.observed) {
        throw new Error(`line ${i + 1} decides on a pair that had the other label there`);
      }
      // A pair of this page's sample counts there, also where it was decided on as a suspect before: a sample
      // without these would hold too few wrong labels.
      const sample = row.sample === true || pair?.sample === true;
      const texts = row.texts ?? pair?.texts;
      if (pair && texts !== pair.texts) {
        throw new Error(`line ${i + 1} decides on a pair that had other texts there`);
      }
      found.set(row.id, { id: row.id, decision: row.decision, observed, sample, texts });
    });
    return found;
  }

  function recall() {
    try {
      decided = parse(localStorage.getItem(key) ?? "");
    } catch (error) {
      stored = !(error instanceof DOMException);
    }
  }

  function keep() {
    saved = false;
    try {
      localStorage.setItem(key, text());
    } catch {
      stored = false;
    }
    show();
  }

  // What stands under each pair, and the bar.
  const buttons = articles.map((article, i) => {
    const made = Object.entries(WORDS).map(([letter, word]) =>
      element(
        "button",
        { type: "button", title: MEANS[word], onclick: () => decide(i, word) },
        element("kbd", {}, letter.toUpperCase()),
        ` ${word}`,
      ),
    );
    const group = element("div", { className: "decide" }, ...made);
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", "decision");
    article.append(group);
    article.tabIndex = -1;
    article.addEventListener("focusin", () => select(i));
    return made;
  });
  const bar = element("progress", { max: pairs.length });
  bar.setAttribute("aria-label", "pairs decided");
  const count = element("strong", { className: "count" });
  const said = element("span", { className: "said" });
  said.setAttribute("role", "status");
  const file = element("input", { type: "file", accept: ".jsonl,.json", hidden: true, onchange: load });
  const keys = [["K", "keep"], ["X", "swap"], ["D", "drop"], ["U", "unsure"], ["N", "next"], ["P", "previous"]];
  const controls = element(
    "div",
    { className: "bar" },
    element("span", {}, bar, " ", count),
    element("span", { className: "keys" }, ...keys.flatMap(([letter, word]) => [element("kbd", {}, letter), ` ${word} `])),
    element(
      "span",
      {},
      element("button", { type: "button", className: "next", onclick: () => go(undecided()) }, "Next undecided"),
      element("button", { type: "button", className: "save", onclick: save }, "Save decisions"),
      element("button", { type: "button", className: "load", onclick: () => file.click() }, "Load a file"),
      file,
    ),
    said,
  );
  controls.setAttribute("role", "region");
  controls.setAttribute("aria-label", "decisions");
  document.body.append(controls);
  document.body.classList.add("deciding");

  function show(message = "") {
    const done = pairs.filter((pair) => decided.has(pair.id));
    const sample = pairs.filter((pair) => pair.sample);
    const random = sample.length ? `; ${done.filter((pair) => pair.sample).length} of ${sample.length} in the random sample` : "";
    bar.value = done.length;
    count.textContent = `${done.length} of ${pairs.length} decided${random}`;
    const hint = stored ? "" : "This browser keeps nothing for this page: save the decisions before you leave.";
    said.textContent = [message, hint].filter(Boolean).join(" ");
    articles.forEach((article, i) => {
      const word = decided.get(pairs[i].id)?.decision;
      if (word) article.dataset.decision = word;
      else delete article.dataset.decision;
      buttons[i].forEach((button, j) => button.setAttribute("aria-pressed", Object.values(WORDS)[j] === word));
    });
  }

  function select(i) {
    articles[current]?.removeAttribute("aria-current");
    current = i;
    articles[i].setAttribute("aria-current", "true");
  }

  function go(i) {
    if (!articles[i]) return;
    articles[i].focus({ preventScroll: true });
    articles[i].scrollIntoView({ block: "start" });
  }

  function inView(article) {
    const { top, bottom } = article.getBoundingClientRect();
    return bottom > 0 && top < controls.getBoundingClientRect().top;
  }

  // The next pair without a decision, from the top again after the last one; -1 where all have one.
  function undecided() {
    const open = pairs.flatMap((pair, i) => (decided.has(pair.id) ? [] : [i]));
    return open.find((i) => i > current) ?? open[0] ?? -1;
  }

  function decide(i, word) {
    const { id, observed, sample, texts } = pairs[i];
    const before = decided.get(id);
    if (before?.decision === word) decided.delete(id); // the same once more takes it back
    else decided.set(id, { id, decision: word, observed, sample: sample || before?.sample === true, texts });
    keep();
    return decided.has(id);
  }

  function save() {
    const url = URL.createObjectURL(new Blob([text()], { type: "application/jsonl" }));
    element("a", { href: url, download: "decisions.jsonl" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
    saved = true;
    show(`${decided.size} decisions are in decisions.jsonl.`);
  }

  async function load() {
    const [chosen] = file.files;
    file.value = "";
    if (!chosen) return;
    let found;
    try {
      found = parse(await chosen.text());
    } catch (error) {
      show(`${chosen.name} was not loaded: ${error.message}.`);
      return;
    }
    found.forEach((row, id) => decided.set(id, row));
    keep();
    const elsewhere = [...found.keys()].filter((id) => !listed.has(id)).length;
    show(`${found.size} decisions loaded${elsewhere ? `, ${elsewhere} of them on pairs that are not on this page` : ""}.`);
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    const letter = event.key.toLowerCase();
    const word = WORDS[letter];
    // No decision on a pair that is out of view.
    if (word && current < 0) go(undecided());
    else if (word && !inView(articles[current])) go(current);
    else if (word) {
      if (decide(current, word)) go(undecided());
    } else if (letter === "n" || letter === "arrowright") go(current + 1);
    else if (letter === "p" || letter === "arrowleft") go(current - 1);
    else return;
    event.preventDefault();
  });
  window.addEventListener("storage", (event) => {
    if (event.key !== key) return;
    recall(); // another tab with the same page
    show();
  });
  window.addEventListener("beforeunload", (event) => {
    if (!stored && !saved) event.preventDefault();
  });
  recall();
  show();
})();
