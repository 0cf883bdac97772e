"""The files that a plain DPO step enters are those that docs/architecture.md names, in twelve lines."""

import re
import sys
from pathlib import Path

from lightning.pytorch import Trainer

import pacmr_lightning
from pacmr_lightning.datamodules import EmbeddedWorld, PreferenceDataModule
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.policy import PolicyModel

FOLDER = Path(pacmr_lightning.__file__).parent
PAGE = Path(__file__).parents[1] / "docs/architecture.md"
OTHERS = {
    "meta_gradient/per_pair_gradients.py": {"pair_losses", "_kept"},
    "numerics.py": {"wide"},
    "ranks.py": {"sum_over_ranks", "several_ranks", "ranks"},
    "strategies/sharding.py": {"is_sharded", "shape"},
    "strategies/deepspeed.py": {"set_gradient"},
    "metrics.py": {"reward_values", "_share_above_zero", "update", "_metrics", "add"},
    "objectives/base.py": {"pair_weights", "observe"},
}
"""What a step enters beside them, and which functions there."""


def test_a_plain_step_is_in_twelve_files(tmp_path, tiny_llama, monkeypatch):
    entered: dict[str, set[str]] = {}
    step = PreferenceModule.training_step

    def watch(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(FOLDER):
            entered.setdefault(path.relative_to(FOLDER).as_posix(), set()).add(frame.f_code.co_name)

    def watched(self, batch, batch_idx):
        if batch_idx:  # the first step checks model and strategy
            sys.setprofile(watch)
        try:
            return step(self, batch, batch_idx)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(PreferenceModule, "training_step", watched)
    model = tiny_llama(tmp_path / "model", vocab_size=300)
    module = PreferenceModule(PolicyModel(model))
    data = PreferenceDataModule(EmbeddedWorld(16, 8), model, global_batch_size=8)
    options = {"logger": False, "enable_checkpointing": False, "limit_val_batches": 0}
    shown = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    Trainer(max_steps=2, accelerator="cpu", default_root_dir=tmp_path, **options, **shown).fit(module, data)

    listed = re.findall(r"^\d+\. `(.+?\.py)`", PAGE.read_text(), re.MULTILINE)
    assert len(listed) == 12 and set(listed) | OTHERS.keys() == entered.keys()
    for name, functions in OTHERS.items():
        found = {each for each in entered[name] if not each.startswith("<")}
        assert found <= functions, name
