"""Every pacmr command in README, docs and configs is one that its parser takes; so is every part of a config;
scripts have the options named.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from pacmr_lightning.cli import RUNS, TOOLS, tool_of
from pacmr_lightning.command_line.parser import ToolParser, takes_words
from pacmr_lightning.command_line.short_forms import expanded
from pacmr_lightning.commands.fit import parser_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "benchmarks/README.md", *sorted((ROOT / "research").rglob("*.md"))]
NOTEBOOK = ROOT / "examples/noisy_labels.ipynb"
VALUES = {"$method": "dpo", "$seed": "1", "$HOST": "node1", "$RANK": "0"}
VALUES |= {"{MODEL}": "path/to/model", "{FILE}": "pairs.jsonl"}
"""Variables of the shell and of the notebook that no line of theirs sets, and a value that they have."""
OWN_PROGRAM = "train.py"
"""Of docs/coming_from_trl.md, which shows it, and whose own test runs it."""
LAUNCHERS = r"^(srun |(torchrun .*|python) -m (?=pacmr_lightning )|!)(pacmr)(_lightning)?"


def blocks() -> list[tuple[str, str]]:
    """Names of pages, and the commands that they show: blocks of bash, and the notebook's cells."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [(page.name, block) for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)]
    for page in sorted((ROOT / "configs").rglob("*.yaml")):
        comments = re.findall("^#  +(.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        found.append((page.name, "\n".join(comments)))
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found + [(NOTEBOOK.name, "".join(c["source"])) for c in cells if c["cell_type"] == "code"]


def commands(start: str) -> list:
    """Words of the commands that begin so, with ``pacmr`` also those that a launcher starts."""
    found = []
    for page, block in blocks():
        own = {f"${name}": value for name, value in re.findall(r'^([A-Z]+)="?(.*?)"?$', block, flags=re.M)}
        for line in block.replace("\\\n", " ").splitlines():
            for name, value in (VALUES | own).items():
                line = line.replace(name, value)
            line = re.sub(LAUNCHERS, r"\3", line.strip())
            line = f"pacmr fit --config tldr/preference {line}" if line.startswith("--") else line
            if line.startswith(start):
                words = shlex.split(line, comments=True)
                words = words[: words.index(";")] if ";" in words else words
                found.append(pytest.param(words, id=f"{page}: {' '.join(words)[:80]}"))
    return found


@pytest.fixture
def here(inside):
    (inside / "configs").symlink_to(ROOT / "configs")
    text = (ROOT / "configs/preference.yaml").read_text()
    text = text.replace("rank: 16", "model: path/to/model\n        rank: 16")
    text = text.replace("validation: null", "train: pairs.jsonl\n        validation: null")
    for name in ("mine.yaml", "runs/mine/config.yaml", "runs/mine-refined/config.yaml"):
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        (inside / name).write_text(text)


@pytest.mark.parametrize("words", commands("pacmr "))
def test_it_is_taken(words, here):
    _, command, *words = words
    if command in RUNS:
        rest = ["--config", "tldr/preference"] if "..." in words else []
        written = expanded([command, *rest, *(word for word in words if word != "...")])
        parser_of(command).parse_args(written[1:])
        return
    assert command in TOOLS
    if "..." in words:
        pytest.skip("the rest of the command is the reader's")
    _, function, arguments = tool_of([command, *words])
    parser = ToolParser(exit_on_error=False)
    parser.add_function_arguments(function, as_positional=takes_words(function))
    parser.parse_args(arguments)


def configs() -> list:
    found = []
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            keys = list(yaml.safe_load(block))
            if "my_preferences" in block or {"methods", "frontier", "prepare", "evaluate"} & set(keys):
                continue  # tests/extension trains these, and tests/pacmr_lightning/sweep reads whole sweeps
            found.append(pytest.param(block, id=f"{page.name}: {', '.join(keys)}"))
    return found


@pytest.mark.parametrize("block", configs())
def test_a_config_is_taken(block, here):
    Path("block.yaml").write_text(block)
    parser_of("fit").parse_args(["--config", "configs/tldr/preference.yaml", "--config", "block.yaml"])


@pytest.mark.parametrize("words", [p for p in commands("python ") if OWN_PROGRAM not in p.values[0]])
def test_a_script_has_the_options(words):
    script = f"{words[2].replace('.', '/')}.py" if words[1] == "-m" else words[1]
    scripts = (ROOT / script).read_text() + (ROOT / "benchmarks/timed_runs.py").read_text()
    options = [word.strip("-") for word in words if word.startswith("--")]
    assert all(name in scripts or name.replace("-", "_") in scripts for name in options)


def test_pages_have_commands():
    assert len(commands("pacmr ")) > 50 and len(commands("python ")) > 5 and len(configs()) > 1
