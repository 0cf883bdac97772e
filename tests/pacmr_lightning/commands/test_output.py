"""Each command's standard output holds its result alone; what else is said goes to standard error."""

from pathlib import Path

import pytest
import yaml

from pacmr_lightning.command_line.output import only_results, print_result
from pacmr_lightning.runs.shipped_configs import FOLDER

from ...conftest import ended


def test_a_printed_config_can_be_given_back(inside, capsys):
    """Also where its configs are found by name; the module's class is made of it."""

    def printed(*configs):
        words = [word for config in configs for word in ("--config", config)]
        status, *said = ended(capsys, ["fit", *words, "--print_config"])
        assert status == 0
        return said

    for method, task in (("drdpo", "hh"), ("mwn", "tldr"), ("pacmr", "hh")):
        out, said = printed(f"{task}/preference", f"methods/{method}")
        assert said.count("--config ") == 2 and f"--config methods/{method} is {FOLDER}" in said
        Path("printed.yaml").write_text(out)
        assert yaml.safe_load(out)["model"]["init_args"]["method"] == method
        assert printed("printed.yaml") == [out, ""]


def test_only_results_pass(capsys):
    with pytest.raises(ValueError), only_results():
        print("talk")
        with only_results():
            print_result("result")
        print_result("x" * 300)
        raise ValueError
    print("after")
    assert capsys.readouterr() == (f"result\n{'x' * 300}\nafter\n", "talk\n")
