"""Help on one page: every option of the function stands there, with its text and default."""

import inspect
import re
from dataclasses import fields

import pytest

from pacmr_lightning import cli
from pacmr_lightning.audit import AuditOptions
from pacmr_lightning.command_line.help_pages import tool_page


@pytest.mark.parametrize("command", cli.TOOLS)
def test_every_option_is_on_the_page(command):
    page = tool_page(command)
    parameters = dict(inspect.signature(cli.tool_of([command])[1]).parameters)
    if parameters.pop("options", None):
        parameters |= {field.name: field for field in fields(AuditOptions)}
    for name, parameter in parameters.items():
        found = re.search(rf"^  (?:--)?{name}\b(.*\n(?: {{5,}}\S.*\n)*)", page, re.M | re.I)
        assert found and re.search(r"[a-z]{3}", found[1]), name
        value = parameter.default
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            assert f"[{value}]" in found[1], name
    assert ("--data" in page) == ("source" in parameters)
    assert "``" not in page and max(map(len, page.splitlines())) <= 112
    assert page.splitlines()[0].startswith(f"usage: pacmr {command}")


@pytest.mark.parametrize("command", ["audit", "validate", "predict"])
def test_the_page_is_what_help_prints(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    page = capsys.readouterr().out
    assert stop.value.code == 0 and len(page.splitlines()) <= 100 and "--help_all" in page


def test_types(tmp_path):
    page = tool_page("audit")
    assert "usage: pacmr audit RUN [options]" in page and "--source CLASS" in page
    assert "--scorer {probe,policy,dpo,judge}" in page
    assert "checkpoints. [last]" in page
    assert "RUNS ..." in tool_page("compare")
