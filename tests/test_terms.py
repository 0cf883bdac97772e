"""Prose, comments and messages use the field's terms, and a docstring's first line names the thing."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("pacmr_lightning", "datamodules", "callbacks", "research", "benchmarks", "examples")
TERMS = {
    r"\b(second|other|another) (wording|view)s?\b|\breworded prompts?\b": "augmented prompt",
    r"\bembedded[- ]world\b|\bworlds?\b(?! size)": "synthetic benchmark",
    r"\b(is|are|was|were|be|been|being|not|when|if) told\b": "noise rate unknown, given or assumed",
    r"\btold (nothing|the (true )?(noise )?(rate|share)|\d)": "noise rate unknown, given or assumed",
    r"\b(shares?|part) of (wrong|flipped) labels\b|\b(true|estimated|assumed|expected) share\b": "noise rate",
    r"\bplanted\b": "injected label noise",
    r"\blabels as they (came|are found)\b": "original labels",
    r"\bsuspects?\b": "suspected label errors",
    r"\bwho(ever)? judges\b|\bjudged by (the|a) (probe|policy|run)\b": "scorer",
    r"\bghost dot-product\b": "ghost dot product",
    r"\bmeta pairs?\b": "meta-batch",
    r"\b(goes|go|gone|going) (further|farther)\b|\bnats away\b": "higher or lower KL",
    r"\bby heart\b": "memorised",
    r"\b(leaves?|left|out of) the language\b": "degenerates",
    r"\brules? of thumb\b|\b(learned|learns|follow(s|ed)?|named?s?) (the|a|that) rule\b": "spurious feature",
    r"\bturn(s|ed|ing)? round\b": "swap",
    r"\b(labels?|responses|sides)\b[^.:;\n]{0,30}\bexchanged?\b": "swap",
    r"\bexchanged? (the |some |its )?(labels?|responses|sides)\b": "swap",
    r"\bfixed prior\b": "fixed sigmoid weighting",
    r"\blevel with\b|\b(cannot|can not|can) be told\b|\btold apart\b": "no significant difference",
    r"\b(nats|tokens|pairs|seconds|bytes|updates|operations|rows?|[GM]iB|numbers|dollars|prompts|responses) "
    r"an? (update|pair|second|token|step|device|process|visit|run|seed|line|response|layer)\b": "per",
    r"\bthe paper('s)?\b": "Qu et al.",
    r"\brun's own policy\b": "the trained policy",
    r"\buntouched (model|reference|policy|one)\b": "base model",
    r"\b(our|this|the|that|a|of) (room|house|road)s?\b|\bhouse's\b": "no words that are only ours",
}
"""Patterns of writing.md's left column, and the words in their place."""
OPENINGS = re.compile(r"(What|Whether|Those|Who|Of)\b")
CODE = re.compile(
    r"```.*?```|``[^`]*``|`[^`\n]*`|\$[^$\n]*\$|\]\([^)]*\)|https?://\S+|[\w./-]+\.(?:yaml|py|md|csv|png|jsonl)\b|\{[^{}]*\}",
    re.DOTALL,
)
SPOKEN = re.compile(r"[A-Za-z]{2,}[ \n]+\S")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each paragraph of prose in a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, CODE.sub(lambda found: "\n" * found[0].count("\n"), source)
    elif path.suffix == ".yaml":
        for number, line in enumerate(source.splitlines(), 1):
            if comment := re.search(r"(?:^|\s)#(.*)", line):
                yield number, CODE.sub("", comment[1])
    else:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], CODE.sub("", token.string)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and SPOKEN.search(node.value):
                yield node.lineno, CODE.sub(lambda found: "\n" * found[0].count("\n"), node.value)


def offences(path: Path) -> list[str]:
    """Return a file's terms of the left column, and docstrings that do not name the thing."""
    found = []
    for line, text in texts(path):
        for pattern, term in TERMS.items():
            for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
                words = " ".join(match[0].split())
                found.append(f"{line + text[: match.start()].count(chr(10))}: {words!r}, say {term}")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Expr) else None
            if isinstance(text, ast.Constant) and (opening := OPENINGS.match(str(text.value).strip())):
                found.append(f"{node.lineno}: docstring opens with {opening[0]}; name the thing")
    return found


def test_terms():
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("research/**/*.md")]
    for folder in ("configs", "research", "tests/extension"):
        files += (ROOT / folder).rglob("*.yaml")
    for folder in PACKAGES:
        files += [path for path in (ROOT / folder).rglob("*.py") if "tests" not in path.parts]
    found = [f"{path.relative_to(ROOT)}:{bad}" for path in files for bad in offences(path)]
    assert not found, "\n" + "\n".join(found)
