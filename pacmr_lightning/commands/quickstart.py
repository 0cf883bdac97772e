"""The whole road in two minutes, in a world that needs no download: DPO, PACMR-DPO and a second pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..command_line.parser import run_tool
from ..errors import UserError


def quickstart(
    output: str = "runs/quickstart", pairs: int = 6400, sft_rows: int = 20_000, samples: int = 1440
) -> None:
    """Trains a small model on pairs of which 30% have wrong labels: DPO, PACMR-DPO and a refined policy.

    First an SFT model is trained from scratch. DPO and PACMR-DPO then learn from the same pairs side by side,
    each with a beta that suits it at 30% flips, since one beta for both would compare how far they go and not
    which is better. No download, no GPU, about two minutes on two cores.

    Args:
        output: folder of the runs, which must not be there.
        pairs: training pairs.
        sft_rows: rows that the SFT model learns from.
        samples: responses whose reward is measured.

    Raises:
        UserError: the folder is there already.
    """
    folder = Path(output)
    if folder.exists():
        raise UserError(f"{output} is there already; remove it, or name another folder with --output.")
    dpo, pacmr, refined = (str(folder / name) for name in ("dpo", "pacmr", "dpo-refined"))
    common = ["fit", "--config", "quickstart/preference", "--model.policy.model", str(folder / "sft/model")]
    common += ["--data.source.pairs", str(pairs), "--trainer.callbacks.samples", str(samples)]
    _say(1, "an SFT model, from scratch, in a small world where the truth is known")
    _run("fit", "--config", "quickstart/sft", "--data.source.rows", str(sft_rows), root=str(folder / "sft"))
    log = folder / "dpo.log"
    _say(2, f"PACMR-DPO on {pairs:,} pairs, 30% of them with the wrong label; DPO beside it (log: {log})")
    with open(log, "wb") as file:
        words = _command(*common, "--config", "methods/dpo", "--model.objective.beta", "0.5", root=dpo)
        beside = subprocess.Popen(words, stdout=file, stderr=file, env=_one_thread())
    try:
        options = ["--model.objective.beta", "2", "--model.weighting.estimator", "GhostDotProduct"]
        _run(*common, "--config", "methods/pacmr", *options, root=pacmr, one_thread=True)
        if status := beside.wait():
            sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
            sys.exit(status)
    finally:
        beside.terminate()
    _say(3, "an audit of the DPO run's labels, and a second pass that learns from what it says")
    _run("refine", dpo, "--beta", "1")
    _say(4, "all three side by side")
    _run("compare", dpo, pacmr, refined, "--figure", str(folder / "comparison.png"))
    print(f"Which labels look wrong: {refined}/audit/report.html    Curves: tensorboard --logdir {folder}")


def _say(step: int, what: str) -> None:
    """In the order of what the parts print themselves."""
    print(f"\n[{step} of 4] {what[0].upper()}{what[1:]}", flush=True)


def _command(*words: str, root: str | None = None) -> list[str]:
    place = [] if root is None else ["--trainer.default_root_dir", root]
    return [sys.executable, "-m", "pacmr_lightning", *words, *place]


def _one_thread() -> dict[str, str]:
    """Two runs side by side on two cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _run(*words: str, root: str | None = None, one_thread: bool = False) -> None:
    """One command of ``pacmr``, whose failure ends this one."""
    done = subprocess.run(_command(*words, root=root), env=_one_thread() if one_thread else None)
    if done.returncode:
        sys.exit(done.returncode)


def main(arguments: list[str]) -> None:
    """``pacmr quickstart`` and the options of ``quickstart``."""
    run_tool("quickstart", quickstart, arguments)
