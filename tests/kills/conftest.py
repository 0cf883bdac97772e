"""Real runs of the command in processes of their own, which are to end as one to which nothing happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from pacmr_lightning.runs.folder import read_weights

UPDATES, SAVED_EVERY, BATCH = 24, 2, 8
ZERO = "pacmr_lightning.strategies.LoraDeepSpeedStrategy"
STRATEGIES = {"single": "auto", "ddp": "ddp"} | {
    f"zero{stage}": {"class_path": ZERO, "init_args": {"stage": stage}} for stage in (1, 2, 3)
}
RUN_SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
CALLBACKS = {
    "WeightRecorder": {"rows_per_part": 48},
    "RunSummary": {"window": 100},
    "Throughput": {"window_size": 4},
    "VNetSurfaces": {"steps": [12], "every": 8, "points": 7, "window": 50},
    "WeightDistributions": {"every": 8},
    "WeightGap": {"probe_pairs": 40, "every": 8},
    "Health": {},
    "SampleResponses": {"prompts": 2, "every": 8, "max_new_tokens": 4},
    "GoldReward": {"samples": 32, "max_new_tokens": 4},
}


class Runs:
    """A tiny model, and the config of a short run with all that a run may have: two epochs."""

    updates, saved_every = UPDATES, SAVED_EVERY

    def __init__(self, folder: Path, content: dict, forked):
        self.folder = folder
        self._forked = forked
        self._straight: set[str] = set()
        (folder / "config.yaml").write_text(yaml.safe_dump(content))

    def start(self, run, strategy, *options, fsync=0.0, **variables):
        """Starts ``pacmr fit`` in a process group; ``fsync`` in seconds, other variables of slow_disk.py."""
        extra = self.folder / f"{strategy}.yaml"
        trainer = {"strategy": STRATEGIES[strategy], "devices": 1 if strategy == "single" else 2}
        extra.write_text(yaml.safe_dump({"trainer": trainer}))
        words = [str(Path(__file__).with_name("slow_disk.py")), "fit"]
        words += ["--config", str(self.folder / "config.yaml"), "--config", str(extra)]
        words += ["--trainer.default_root_dir", str(run), *options]
        variables = {name: str(value) for name, value in variables.items()}
        variables |= {"OMP_NUM_THREADS": "1", "SECONDS_OF_FSYNC": str(fsync)}
        if strategy == "single":
            return self._forked(RUN_SCRIPT, *words, merge=True, **variables)
        # For each further process Lightning starts the command once more, which a fork has none of.
        return subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, process, status=0):
        output, _ = process.communicate(timeout=1200)
        assert process.returncode == status, output
        assert "Traceback" not in output, output
        return output

    def resume(self, run, strategy):
        self.finish(self.start(run, strategy, "--ckpt_path", "last"))

    def assert_as_straight(self, run, strategy):
        straight = self.folder / f"straight-{strategy}"
        if strategy not in self._straight:
            self.finish(self.start(straight, strategy))
            self._straight.add(strategy)
        assert_same(run, straight, 0 if strategy == "single" else 1e-6)


@pytest.fixture(scope="session")
def runs(tmp_path_factory, tiny_llama, forked, preference_config):
    folder = tmp_path_factory.mktemp("kills")
    outer = {"class_path": "PromptAugmentationConsistency", "init_args": {"tau": 0.5}}
    weighting = {"class_path": "VNetWeighting", "init_args": {"every": 2, "outer": outer}}
    world = {"pairs": BATCH * UPDATES // 2, "validation_pairs": 24}
    content = preference_config(
        tiny_llama(folder / "model"),
        {"class_path": "EmbeddedWorld", "init_args": world},
        {"weighting": weighting, "method": "pacmr", "learning_rate": 0.02},
        {"validation_batch_size": 8, "global_batch_size": BATCH, "meta_batch_size": 8, "noise_rate": 0.3},
        [{"class_path": name, "init_args": args} for name, args in CALLBACKS.items()],
        **{"max_epochs": 2, "devices": 1, "log_every_n_steps": 3, "val_check_interval": 5},
    )
    return Runs(folder, content | {"checkpoint": {"every_n_train_steps": SAVED_EVERY}}, forked)


def assert_same(found, expected, atol):
    """Everything that the two runs have left is the same but for times: bit for bit where ``atol`` is 0."""
    checkpoints = [torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in (found, expected)]
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "weighting", "objective", "metrics"):
        same(checkpoints[0][key], checkpoints[1][key], atol, key)
    assert checkpoints[0]["global_step"] == UPDATES
    assert checkpoints[0]["loops"]["fit_loop"] == checkpoints[1]["loops"]["fit_loop"]

    rows = [read_weights(run).sort_values(["step", "id"], ignore_index=True) for run in (found, expected)]
    assert len(rows[0]) == BATCH * UPDATES and not rows[0].duplicated(["step", "id"]).any()
    pd.testing.assert_frame_equal(*rows, atol=atol, rtol=atol)
    tables = ["noise_mask.parquet", "metrics.csv", "analysis/weight-gap.csv"]
    tables += [f"analysis/{path.name}" for path in expected.glob("analysis/*.parquet")]
    for name in tables:
        pd.testing.assert_frame_equal(table(found / name), table(expected / name), atol=atol, rtol=atol)
    for path in expected.glob("analysis/*.npz"):
        with np.load(path) as b, np.load(found / "analysis" / path.name) as a:
            same(*({key: file[key].tolist() for key in file.files} for file in (a, b)), atol, path.name)

    summaries = [json.loads((run / "summary.json").read_text()) for run in (found, expected)]
    for summary in summaries:
        assert summary.pop("seconds") > 0 and summary.pop("wall_seconds") > 0
    same(*summaries, atol, "summary.json")
    for name in ("responses.jsonl", "samples.jsonl"):
        assert (found / name).read_text() == (expected / name).read_text()
    configs = [(run / "config.yaml").read_text().replace(str(run), "RUN") for run in (found, expected)]
    assert configs[0] == configs[1]
    same(*(shown(run) for run in (found, expected)), atol, "tensorboard")
    assert file_names(found) == file_names(expected)


def same(a, b, atol, where):
    if isinstance(b, dict):
        assert a.keys() == b.keys(), where
        for key in b:
            same(a[key], b[key], atol, f"{where}/{key}")
    elif isinstance(b, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, atol, f"{where}/{i}")
    elif isinstance(b, (torch.Tensor, float)):
        about = {"equal_nan": True, "msg": lambda text: f"{where}: {text}"}
        torch.testing.assert_close(a, b, atol=atol, rtol=atol, **about)
    else:
        assert a == b, where


def table(path):
    frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, engine="pyarrow")
    return frame.drop(columns=[name for name in frame if is_time(name)])


def is_time(name):
    return name.endswith(("/time", "_per_sec"))


def shown(folder):
    """Steps of all that TensorBoard shows, and values of scalars that are no times, by tag."""
    events, found = EventAccumulator(str(folder), {"tensors": 0}).Reload(), {}
    for tag in events.Tags()["tensors"]:
        scalar = events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"
        points = events.Tensors(tag)
        found[tag] = [(e.step, float(make_ndarray(e.tensor_proto)) if scalar else None) for e in points]
    return {tag: points for tag, points in found.items() if not is_time(tag)}


def file_names(run):
    """Of all that is in a run's folder, but for what a kill adds: parts, and an older checkpoint."""
    names = (str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    return sorted(n for n in names if not n.startswith(("weights/", "events.", "checkpoints/step-")))
