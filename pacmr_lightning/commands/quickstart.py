"""Command ``pacmr quickstart``: DPO, PACMR-DPO and a refined policy on the synthetic benchmark."""

import os
import subprocess
import sys

import torch

from ..errors import UserError, check_at_least
from ..files import local_path
from .compare import compare
from .fit import PacmrCLI
from .refine import refine


def quickstart(
    output: str = "runs/quickstart", pairs: int = 6400, sft_rows: int = 20_000, samples: int = 1440
) -> None:
    """Trains DPO, PACMR-DPO and a refined policy on synthetic pairs with 30% wrong labels.

    A small SFT model is trained from scratch first. Each method has a beta tuned at this noise rate. It takes
    about two minutes on two cores, without a download or a GPU.

    Args:
        output: new folder for the runs.
        pairs: number of training pairs.
        sft_rows: number of SFT rows.
        samples: number of sampled responses for the gold reward.

    Raises:
        UserError: the folder exists, or an option is too small.
    """
    check_at_least(64, pairs=pairs)  # an update's
    check_at_least(2, sft_rows=sft_rows, samples=samples)
    folder = local_path(output)
    if folder.exists():
        raise UserError(f"output is {output}, which exists; remove it, or name another folder with --output.")
    sft, dpo, pacmr, refined = (str(folder / name) for name in ("sft", "dpo", "pacmr", "dpo-refined"))
    common = ["fit", "--config", "quickstart/preference", "--model.policy.model", f"{sft}/model"]
    common += ["--data.source.pairs", str(pairs), "--trainer.callbacks.samples", str(samples), "--output"]
    _print_step(1, "An SFT model, trained from scratch on the synthetic benchmark")
    words = ["fit", "--config", "quickstart/sft", "--data.source.rows", str(sft_rows)]
    PacmrCLI([*words, "--trainer.default_root_dir", sft])
    log = folder / "dpo.log"
    _print_step(2, f"PACMR-DPO on {pairs:,} pairs with 30% wrong labels; DPO in parallel (log: {log})")
    with open(log, "wb") as file:
        options = ["--config", "methods/dpo", "--model.objective.beta", "0.5"]
        command = [sys.executable, "-m", "pacmr_lightning", *common, dpo, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        beside = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # for two runs side by side on two cores
        try:
            options = ["--config", "methods/pacmr", "--model.objective.beta", "2"]
            PacmrCLI([*common, pacmr, *options, "--model.weighting.estimator", "GhostDotProduct"])
            if status := beside.wait():
                sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
                sys.exit(status)
        finally:
            torch.set_num_threads(threads)
            beside.terminate()
    _print_step(3, "An audit of the DPO run's labels, and a second pass with soft labels")
    refine(dpo, beta=1.0, scorer="policy", anyway=True)
    _print_step(4, "All three side by side")
    compare([dpo, pacmr, refined])
    print(f"Suspected label errors: {refined}/audit/report.html")
    print(f"Curves, and figures of weights: tensorboard --logdir {folder}")


def _print_step(step: int, what: str) -> None:
    print(f"\n[{step} of 4] {what}", flush=True)
