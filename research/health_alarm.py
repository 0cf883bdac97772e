"""Timing of the Health alarm: before a run collapses, and silent in runs that do not.

    python -m research.health_alarm --model runs/quickstart/sft/model --output runs/health-alarm [--jobs 2]

Trains every setting below in the synthetic benchmark with the Health callback (which warns and does not
stop), measures the clean accuracy of 512 validation pairs along the way, and prints for each run whether it
fell by more than 0.05 under its peak so far, when, and when the alarm came. Everything but the alarm's
thresholds is ordinary: ``pacmr fit`` with the configs of the quickstart. Long runs are 1,250 updates on
40,000 pairs, in which hard pseudo-labels collapse; short ones are the quickstart's 200 on 6,400.
Runs that are in the output folder already are not trained again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from jsonargparse.typing import PositiveInt
from tqdm import tqdm

from pacmr_lightning.errors import UserError
from pacmr_lightning.files import replacing

from . import command

ROOT = Path(__file__).parents[1]
FALL = 0.05
"""Fall of the clean accuracy under its peak so far before which the alarm should come."""
COLLAPSE = 0.1
"""Fall under its peak at the end from which a run counts as collapsed."""
ACCURACY = "val/rewards/accuracies"
SOFT = ("--model.weighting.outer", "SoftPromptConsistency")
FAST = ("--model.weighting.learning_rate", "5e-3")
POSTERIOR = ("--model.weighting.start_offset", "auto")
CLEAN = ("--data.clean_meta", "EmbeddedWorld", "--data.clean_meta.pairs", "256")


@dataclass
class Setting:
    """One run."""

    name: str
    noise: float
    seed: int
    long: bool
    method: str = "pacmr"
    options: tuple[str, ...] = ()


SETTINGS = [
    Setting("hard", 0.4, 0, True),
    Setting("hard", 0.4, 1, True),
    Setting("hard, VNet 5e-3", 0.4, 0, True, options=FAST),
    Setting("hard", 0.3, 0, True),
    Setting("hard", 0.2, 0, True),
    Setting("soft", 0.4, 0, True, options=SOFT),
    Setting("soft, VNet 5e-3", 0.3, 1, True, options=(*SOFT, *FAST)),
    Setting("MWN", 0.4, 0, True, "mwn", CLEAN),
    Setting("hard", 0.2, 0, False),
    Setting("hard", 0.2, 1, False),
    Setting("hard", 0.3, 0, False),
    Setting("hard", 0.3, 1, False),
    Setting("hard", 0.4, 0, False),
    Setting("hard, start_offset auto", 0.3, 2, False, options=POSTERIOR),
    Setting("soft", 0.4, 2, False, options=SOFT),
    Setting("MWN", 0.3, 2, False, "mwn", CLEAN),
    Setting("fixed weighting", 0.4, 0, False, "fixed"),
]


def folder_of(setting: Setting, output: Path) -> Path:
    """The run's folder."""
    words = setting.name.replace(",", "").split()
    length = "long" if setting.long else "short"
    return output / "-".join([length, *words, f"noise{setting.noise:g}", f"seed{setting.seed}"])


def train(setting: Setting, model: str, folder: Path) -> None:
    """Train one setting with one thread, unless its folder has a finished run."""
    if (folder / "checkpoints" / "last.ckpt").exists():
        return
    configs = ["quickstart/preference", f"methods/{setting.method}"]
    callbacks = '[{"class_path": "pacmr_lightning.callbacks.health.Health"}]'
    options = {
        "model.policy.model": model,
        "model.learning_rate": "1e-4" if setting.long else "5e-4",
        "data.source.pairs": 40000 if setting.long else 6400,
        "data.source.validation_pairs": 512,
        "data.reference": "cached",
        "data.noise_rate": setting.noise,
        "data.noise_seed": setting.seed,
        "data.seed": setting.seed,
        "seed_everything": setting.seed,
        "trainer.callbacks": callbacks,
        "trainer.val_check_interval": 25,
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": folder,
    }
    command = [sys.executable, "-m", "pacmr_lightning", "fit"]
    for config in configs:
        command += ["--config", str(ROOT / "configs" / f"{config}.yaml")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    if setting.method != "fixed":
        command += ["--model.weighting.estimator", "GhostDotProduct"]
    # What a killed run has left would be refused.
    command += ["--ckpt_path", "last"] if (folder / "config.yaml").exists() else []
    done = subprocess.run(
        [*command, *setting.options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise UserError(f"{folder} failed: {done.stderr.strip()[-2000:]}")


def measure(setting: Setting, folder: Path) -> dict[str, object]:
    """Return the course of the clean accuracy, and the update of the alarm."""
    curves = pd.read_csv(folder / "metrics.csv")
    # Rows are numbered by the last update before them; here steps are updates done.
    curves["step"] += 1
    accuracy = curves.dropna(subset=[ACCURACY]).set_index("step")[ACCURACY]
    below = accuracy[accuracy < accuracy.cummax() - FALL]
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    alarm = checkpoint["Health"]["warned"].get("self-confirmation")
    at_alarm = None if alarm is None else accuracy[accuracy.index <= alarm].iloc[-1]
    health = curves.filter(like="warnings/")

    def most(name: str) -> float | None:
        column = f"warnings/{name}"
        return health[column].max() if column in health else None

    return {
        "setting": setting.name,
        "updates": int(curves["step"].max()),
        "noise": setting.noise,
        "seed": setting.seed,
        "peak": accuracy.max(),
        "final": accuracy.iloc[-1],
        "collapsed": bool(accuracy.max() - accuracy.iloc[-1] > COLLAPSE),
        "fell_at": None if below.empty else int(below.index[0]),
        "alarm": alarm,
        "accuracy_at_alarm": at_alarm,
        "max_slope_ratio": most("slope_ratio"),
        "min_effective_sample_size": health["warnings/effective_sample_size"].min(),
    }


def health_alarm(
    model: str = "runs/quickstart/sft/model",
    output: str = "runs/health-alarm",
    jobs: PositiveInt = 2,
    only: Sequence[str] = ("",),
) -> None:
    """Train every setting, and print when its accuracy fell and when the alarm came.

    Args:
        model: the quickstart's SFT model.
        output: folder of the runs and of ``table.csv``.
        jobs: runs at a time, one thread each.
        only: runs whose folder's name has one of these.
    """
    folders = {folder_of(setting, Path(output)): setting for setting in SETTINGS}
    folders = {folder: its for folder, its in folders.items() if any(word in folder.name for word in only)}
    if not folders:
        raise UserError(f"only is {' '.join(only)}, but no run's folder has one of these in its name.")
    with ThreadPoolExecutor(jobs) as pool:
        runs = [pool.submit(train, setting, model, folder) for folder, setting in folders.items()]
        for done in tqdm(runs, desc="runs", unit="run"):
            done.result()
    table = pd.DataFrame([measure(setting, folder) for folder, setting in folders.items()]).convert_dtypes()
    with replacing(Path(output) / "table.csv") as temporary:
        table.to_csv(temporary, index=False)
    print(table.round(3).to_string(index=False, na_rep="-"))
    collapsed = table[table["collapsed"]]
    in_time = collapsed["alarm"].notna() & (collapsed["alarm"] <= collapsed["fell_at"])
    sound = table[~table["collapsed"]]
    print(
        f"Collapsed (more than {COLLAPSE} under the peak at the end): {len(collapsed)}, of which the alarm "
        f"came before a fall of {FALL} in {int(in_time.sum())}. Others: {len(sound)}, of which it was silent "
        f"in {int(sound['alarm'].isna().sum())}."
    )


main = command("health_alarm", health_alarm)

if __name__ == "__main__":
    main()
