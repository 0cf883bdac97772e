"""The program in Python of docs/train.md, run on rows of README; its module is audited, and trained again."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pacmr_lightning.audit import AuditOptions, audit
from pacmr_lightning.errors import UserError
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.weighting import AuditedWeights, VNetWeighting

from .conftest import quiet_trainer, write_lines

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_snippet(inside, tiny_llama):
    tiny_llama("path/to/your/sft-model")
    [rows] = [block for block in re.findall(r"```json\n(.*?)```", README, re.S) if '"rejected"' in block]
    text, _chat = map(json.loads, rows.splitlines())
    prompts = ("prompt", "augmented_prompt")
    many = [text | {"id": f"{i}"} | {name: f"{text[name]} {i}" for name in prompts} for i in range(96)]
    write_lines("pairs.jsonl", many)
    page = (ROOT / "docs" / "train.md").read_text()
    [program] = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "Trainer(" in code]
    short = program.replace("max_epochs=1,", "max_steps=2, accelerator='cpu',")
    names: dict[str, Any] = {}
    exec(compile(short, "train.md", "exec"), names)
    run, module, data = Path("runs/python"), names["module"], names["data"]
    assert module.learning_rate == 5e-4 and (run / "adapter/adapter_config.json").is_file()
    assert len(names["found"].table) == len(data.train_pairs) > 64
    assert (run / "audit/pairs.parquet").is_file() and not (run / "config.yaml").exists()

    found = audit(module, data, AuditOptions("probe", noise_rate=0.3, output="audit"))
    said = Path("audit/report.html").read_text(encoding="utf-8")
    assert "labels are probably wrong, at a given rate of random flips of 30.0%" in said
    assert data.train_pairs.reference is None  # the next fit may have another
    u, by_policy = (each.table.set_index("id")["u"].sort_index() for each in (found, names["found"]))
    pd.testing.assert_series_equal(u, by_policy)
    weighting = AuditedWeights("audit/pairs.parquet", soft_labels=True)
    second = PreferenceModule(PolicyModel("path/to/your/sft-model"), weighting=weighting)
    quiet_trainer("second", max_steps=1).fit(second, data)
    parts = {"policy": PolicyModel("path/to/your/sft-model"), "weighting": VNetWeighting()}
    again = PreferenceModule.load_from_checkpoint(run / "checkpoints/last.ckpt", **parts)
    assert again.method == "pacmr" and again.vnet is not None
    for wrong, options, said in (
        ((module,), None, r"call audit\(module, datamodule\) after trainer\.fit"),
        ((again, data), None, r"call audit\(module, datamodule\) after trainer\.fit"),
        ((module, data), AuditOptions("dpo"), "scorer is dpo, which needs a run of pacmr fit"),
        ((module, data), AuditOptions(dtype="float32"), "dtype is float32, but a module is audited as it is"),
        ((second, data), AuditOptions(output="audit"), "was trained with the audit in its folder"),
        (("runs/python",), None, r"calls pacmr_lightning\.audit\.audit\(module, datamodule\)"),
        (("path/to/your/sft-model", data), None, "source is a datamodule, but run is path/to"),
    ):
        with pytest.raises(UserError, match=said):
            audit(*wrong, options=options)
    quiet_trainer("third", names["callbacks"][:2], max_steps=1).fit(module, data)  # a cell that is run again
    assert pd.read_json("third/summary.json", typ="series")[["vnet_updates", "vnet_skipped"]].sum() == 1
    assert "so no label counts as unseen" in audit(module, data).notes[0]
