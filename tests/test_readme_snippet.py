"""The program in Python of docs/train.md, run on rows of README; its run is audited, exported, refined."""

import json
import re
from pathlib import Path

import pytest
import yaml

from pacmr_lightning import cli
from pacmr_lightning.audit import AuditOptions, audit
from pacmr_lightning.commands.refine import refine
from pacmr_lightning.errors import UserError
from pacmr_lightning.modules import PreferenceModule

from .conftest import write_lines

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_snippet(tmp_path, monkeypatch, tiny_llama):
    monkeypatch.chdir(tmp_path)
    tiny_llama("path/to/your/sft-model")
    [rows] = [block for block in re.findall(r"```json\n(.*?)```", README, re.S) if '"rejected"' in block]
    text, _chat = map(json.loads, rows.splitlines())
    prompts = ("prompt", "augmented_prompt")
    many = [text | {"id": f"{i}"} | {name: f"{text[name]} {i}" for name in prompts} for i in range(96)]
    write_lines("pairs.jsonl", many)
    page = (ROOT / "docs" / "train.md").read_text()
    [program] = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "Trainer(" in code]
    short = program.replace("max_epochs=1,", "max_steps=2, accelerator='cpu',")
    exec(compile(short, "train.md", "exec"), {})
    run = Path("runs/python")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["init_args"]["learning_rate"] == 5e-4 and config["trainer"]["max_steps"] == 2
    assert config["model"]["init_args"]["weighting"]["class_path"].endswith("VNetWeighting")
    module = PreferenceModule.load_from_checkpoint(run / "checkpoints" / "last.ckpt")  # without arguments
    assert module.learning_rate == 5e-4 and module.vnet is not None
    assert (run / "adapter/adapter_config.json").is_file()

    found = audit(str(run), options=AuditOptions("dpo", noise_rate=0.3))
    assert len(found.table) == found.findings.pairs.shape[0] > 64
    said = (run / "audit" / "report.html").read_text(encoding="utf-8")
    assert "labels are probably wrong, at a given rate of random flips of 30.0%" in said
    cli.main(["export", str(run), "exported"])
    said = r"The policy did not move: its validation loss is 0\.69\d\d and its KL to the reference \d"
    with pytest.raises(UserError, match=said):
        refine(str(run), labels="weights", noise_rate=0.3)
    second = refine(str(run), labels="weights", noise_rate=0.3, scorer="policy", anyway=True)
    assert json.loads((second / "summary.json").read_text())["steps"] == 2
