"""Pages agree with the code they describe: settings by model size, and the generated command reference."""

import re
import runpy
from pathlib import Path

import pytest

from pacmr_lightning.cli import RUNS, TOOLS
from pacmr_lightning.modules.schedule import suited_learning_rate

DOCS = Path(__file__).parents[1] / "docs"
UNITS = {"thousand": 1e3, "million": 1e6, "billion": 1e9}


@pytest.fixture(scope="module")
def commands():
    return runpy.run_path(str(DOCS / "generated.py"))["commands"]()


def test_learning_rates_by_model_size():
    rows = re.findall(r"^\| ([\d.]+) (\w+) \| (\S+) \|", (DOCS / "train.md").read_text(), re.MULTILINE)
    assert len(rows) == 5
    for number, unit, rate in rows:
        assert suited_learning_rate(int(float(number) * UNITS[unit]))[0] == float(rate)


def test_every_command_has_a_section(commands):
    titles = re.findall(r"^## pacmr (\S+)$", commands, re.MULTILINE)
    assert sorted(titles) == sorted([*RUNS, *TOOLS])


def test_every_option_has_a_meaning(commands):
    rows = re.findall(r"^\| `(\S+)` \| .*? \| (.*) \|$", commands, re.MULTILINE)
    assert len(rows) > 80 and {"--scorer", "--labels", "RUN"} <= {option for option, _ in rows}
    assert [option for option, meaning in rows if not meaning] == []
