"""DPO, PACMR-DPO and a second pass in two minutes, on the synthetic benchmark, without a download."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..command_line.parser import run_tool
from ..errors import UserError

PACMR = (sys.executable, "-m", "pacmr_lightning")


def quickstart(
    output: str = "runs/quickstart", pairs: int = 6400, sft_rows: int = 20_000, samples: int = 1440
) -> None:
    """Trains a small model on pairs of which 30% have wrong labels: DPO, PACMR-DPO and a refined policy.

    First an SFT model is trained from scratch. Each method has a beta that suits it at 30% flips. No
    download, no GPU, about two minutes on two cores.

    Args:
        output: folder of the runs, which must not be there.
        pairs: training pairs.
        sft_rows: rows that the SFT model learns from.
        samples: responses whose reward is measured.

    Raises:
        UserError: the folder exists.
    """
    folder = Path(output)
    if folder.exists():
        raise UserError(f"{output} is there already; remove it, or name another folder with --output.")
    sft, dpo, pacmr, refined = (str(folder / name) for name in ("sft", "dpo", "pacmr", "dpo-refined"))
    common = ["fit", "--config", "quickstart/preference", "--model.policy.model", f"{sft}/model"]
    common += ["--data.source.pairs", str(pairs), "--trainer.callbacks.samples", str(samples)]
    common += ["--trainer.default_root_dir"]
    _print_step(1, "An SFT model, trained from scratch on the synthetic benchmark")
    words = ["fit", "--config", "quickstart/sft", "--data.source.rows", str(sft_rows)]
    _run(*words, "--trainer.default_root_dir", sft)
    log = folder / "dpo.log"
    _print_step(
        2, f"PACMR-DPO on {pairs:,} pairs, 30% of them with the wrong label; DPO beside it (log: {log})"
    )
    # Two runs side by side on two cores.
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(log, "wb") as file:
        options = ["--config", "methods/dpo", "--model.objective.beta", "0.5"]
        beside = subprocess.Popen([*PACMR, *common, dpo, *options], stdout=file, stderr=file, env=threads)
    try:
        options = ["--config", "methods/pacmr", "--model.objective.beta", "2"]
        _run(*common, pacmr, *options, "--model.weighting.estimator", "GhostDotProduct", env=threads)
        if status := beside.wait():
            sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
            sys.exit(status)
    finally:
        beside.terminate()
    _print_step(3, "An audit of the DPO run's labels, and a second pass that learns from its result")
    _run("refine", dpo, "--beta", "1", "--scorer", "policy")
    _print_step(4, "All three side by side")
    _run("compare", dpo, pacmr, refined, "--figure", str(folder / "comparison.png"))
    print(f"Which labels look wrong: {refined}/audit/report.html    Curves: tensorboard --logdir {folder}")


def _print_step(step: int, what: str) -> None:
    print(f"\n[{step} of 4] {what}", flush=True)


def _run(*words: str, env: dict[str, str] | None = None) -> None:
    if status := subprocess.run([*PACMR, *words], env=env).returncode:
        sys.exit(status)


def main(arguments: list[str]) -> None:
    """``pacmr quickstart`` and the options of ``quickstart``."""
    run_tool("quickstart", quickstart, arguments)
