"""Rows that an audit has cleaned, in TRL's own trainer."""

import json
from pathlib import Path

import pytest

from .conftest import audit


# Of what TRL calls by old names.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trl_trains_on_them(run, finished, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl", reason="TRL is in the extra oracle")
    from datasets import load_dataset

    monkeypatch.chdir(tmp_path)
    table = audit(run, "policy", share=0.3, cleaned="cleaned.jsonl", action="drop")
    dropped = int(table["suggested"].eq("flip").sum())
    rows = load_dataset("json", data_files="cleaned.jsonl", split="train", cache_dir=str(tmp_path / "cache"))
    written = [json.loads(line) for line in Path("cleaned.jsonl").read_text().splitlines()]
    assert dropped > 0 and len(rows) == len(written) == len(table) - dropped
    options = {"output_dir": "cleaned", "max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True}
    options |= {"report_to": [], "save_strategy": "no", "bf16": False, "max_length": None}
    options["gradient_checkpointing"] = False
    model = str(finished.parent / "model")
    trainer = trl.DPOTrainer(model, args=trl.DPOConfig(**options), train_dataset=rows)
    assert trainer.train().global_step == 2
