"""Does the Health alarm fire before a run collapses, and is it silent in runs that do not?

    python benchmarks/health_alarm.py --model runs/quickstart/sft/model --output runs/health-alarm [--jobs 2]

Trains every setting below in the embedded world with the Health callback (which warns and does not stop),
looks at the clean accuracy of 512 validation pairs along the way, and says for each run whether the accuracy
fell by more than 0.05 under its peak so far, when, and when the alarm came. Everything but the alarm's
thresholds is ordinary: ``pacmr fit`` with the configs of the quickstart. Long runs are 1,250 updates on
40,000 pairs, in which hard pseudo-labels collapse; short ones are the quickstart's 200 on 6,400.
Runs that are in the output folder already are not trained again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from pacmr_lightning.files import replacing

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
    Setting("fixed prior", 0.4, 0, False, "fixed"),
]


def folder_of(setting: Setting, output: Path) -> Path:
    """The run's folder."""
    words = setting.name.replace(",", "").split()
    length = "long" if setting.long else "short"
    return output / "-".join([length, *words, f"noise{setting.noise:g}", f"seed{setting.seed}"])


def train(setting: Setting, model: str, output: Path) -> None:
    """Trains one setting with one thread, unless its folder has a finished run."""
    folder = folder_of(setting, output)
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
        raise RuntimeError(f"{folder} failed:\n{done.stderr[-2000:]}")


def measure(setting: Setting, folder: Path) -> dict[str, object]:
    """What the clean accuracy did, and when the alarm came."""
    curves = pd.read_csv(folder / "metrics.csv")
    # Rows are numbered by the last update before them; here steps are updates done.
    curves["step"] += 1
    accuracy = curves.dropna(subset=[ACCURACY]).set_index("step")[ACCURACY]
    below = accuracy[accuracy < accuracy.cummax() - FALL]
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    alarm = checkpoint["Health"]["warned"].get("self-confirmation")
    at_alarm = None if alarm is None else accuracy[accuracy.index <= alarm].iloc[-1]
    health = curves.filter(like="health/")

    def most(name: str) -> float | None:
        column = f"health/{name}"
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
        "max_norm_ratio": most("norm_ratio"),
        "max_pseudo_label_drop": most("pseudo_label_drop"),
        "min_effective_sample_size": health["health/effective_sample_size"].min(),
    }


def main() -> None:
    """Trains, measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="runs/quickstart/sft/model", help="the quickstart's SFT model")
    parser.add_argument("--output", type=Path, default=Path("runs/health-alarm"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--only", nargs="+", default=[""], help="runs whose folder's name has one of these")
    options = parser.parse_args()
    settings = [s for s in SETTINGS if any(o in folder_of(s, options.output).name for o in options.only)]
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(train, setting, options.model, options.output) for setting in settings]
        for job in tqdm(jobs, desc="runs", unit="run"):
            job.result()
    table = pd.DataFrame(
        [measure(setting, folder_of(setting, options.output)) for setting in settings]
    ).convert_dtypes()
    with replacing(options.output / "table.csv") as temporary:
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


if __name__ == "__main__":
    main()
