"""The ``pacmr`` command. Slow imports are left to the commands."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version

from .command_line.exceptions import sentence, stop
from .command_line.output import only_results
from .command_line.short_forms import EXAMPLE, page
from .waiting import waiting

RUNS = {
    "fit": "Trains: SFT, DPO, PACMR-DPO, as the configs say.",
    "validate": "Metrics of a checkpoint on the validation pairs.",
    "test": "The same pairs and metrics, under the name test/.",
    "predict": "Responses of a checkpoint to evaluation prompts, greedy by default.",
}
TOOLS = {
    "inspect": "Looks at preference data: what is kept, lengths, repeats, contradictions, rows.",
    "augment": "Writes second wordings of the training prompts: back-translations, paraphrases or rules.",
    "clean-meta": "Makes a small set of pairs with clean labels: judges correct a sample of training pairs.",
    "judge": "Judges the responses of one model against those of another: win rate, win-score and intervals.",
    "analyze": "Whether other wordings of prompts change what a policy believes, and which side it takes.",
    "audit": "Names labels that look wrong, by a run, adapter or base model; writes the pairs without them.",
    "refine": "Trains a run's policy once more, with what its audit says of each label; compares both.",
    "correct": "PerpCorrect: corrects a run's labels from a few clean pairs, and trains once more on them.",
    "compare": "Runs side by side: a table, how they learned, and the weight functions of their VNets.",
    "generate": "Writes a model's responses to evaluation prompts, by asking an OpenAI-compatible endpoint.",
    "label": "Makes preference pairs of two responses to each prompt, with labels drawn from a reward.",
    "export": "Makes a folder of a finished run that plain transformers or PEFT loads, with a model card.",
    "quickstart": "DPO, PACMR-DPO and a refined policy on pairs with 30% wrong labels, in two minutes.",
    "configs": "Lists the configs that come with the package, which --config finds by name, or copies one.",
    "memory": "Estimates how much memory a run needs on each device, by strategy; no weights, no GPU.",
    "sweep": "Runs methods x noise rates x options x seeds as a file says; makes their tables and figures.",
}


GROUPS = {
    "start": ("quickstart", "configs", "inspect"),
    "train": ("fit", "refine", "correct", "augment"),
    "audit": ("audit", "clean-meta"),
    "evaluate": ("compare", "validate", "test", "predict", "judge", "generate", "analyze"),
}
"""Commands by what they are for, in the order of use; the others stand under "more"."""

NOISE = (
    # Saving after the update is intended: resuming needs it.
    "Using ModelCheckpoint with manual optimization",
    # A tool is one process; docs/scaling.md has SLURM.
    "The `srun` command is available",
    # Libraries about each other.
    "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    "`is_gradient_checkpointing` is deprecated",
    ".*does not have many workers",
    # Logged values are means over all ranks already.
    ".*sync_dist=True",
    # A call from Python, as in the tests.
    "LightningCLI's args parameter is intended",
    # Called by DeepSpeed.
    "`torch.distributed..*` is deprecated",
)

ALIASES = {"audit-model": "audit", "surfaces": "compare"}

TALK = ("💡 Tip:", "TPU available", "GPU available", "`Trainer(val_check_interval=", "`Trainer.fit` stopped")
"""Beginnings of Lightning's log lines to hide."""
NO_BARS = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_MININTERVAL": "30",
}
"""For a log file: no bars of libraries, and a line of our own every half minute."""

LET_SPEAK = 5
"""Seconds that other ranks wait for rank 0 to report a common error."""


def _prepare_libraries() -> None:
    """Silence library output and use a non-interactive matplotlib backend, before their import."""
    # A notebook sets its own, which another environment's Python lacks.
    os.environ["MPLBACKEND"] = "agg"
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    lightning = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    if not lightning.filters:
        lightning.addFilter(lambda record: not record.getMessage().startswith(TALK))
    if not sys.stderr.isatty():
        for name, value in NO_BARS.items():
            os.environ.setdefault(name, value)


def _let_rank_0_speak() -> None:
    if "lightning.pytorch" not in sys.modules:  # no run has begun, and importing it takes seconds
        return
    from lightning.pytorch.utilities import rank_zero_only

    if rank_zero_only.rank:  # type: ignore[attr-defined]  # Lightning sets it on the function
        time.sleep(LET_SPEAK)


def _help() -> str:
    commands = {**RUNS, **TOOLS}
    more = [name for name in commands if not any(name in group for group in GROUPS.values())]
    groups = [
        "\n".join([f"{title}:", *(f"  {name:<12}{commands[name]}" for name in names)])
        for title, names in {**GROUPS, "more": more}.items()
    ]
    return "\n\n".join(
        [
            "usage: pacmr COMMAND ...",
            "Learning from noisy human preferences. Two commands to begin with:",
            EXAMPLE,
            *groups,
            "pacmr COMMAND --help says more.",
        ]
    )


def _help_of(command: str) -> str:
    from .command_line.help_pages import run_page, tool_page

    if command in TOOLS:
        return tool_page(command)
    return page() if command == "fit" else run_page(command, RUNS[command])


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Disable garbage collection, a fifth of the time of imports."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; bad input ends in one sentence and exit status 2."""
    words = sys.argv[1:] if arguments is None else arguments
    words = [ALIASES.get(word, word) for word in words[:1]] + words[1:]
    _prepare_libraries()
    if words in (["--help"], ["-h"]):
        print(_help())
        sys.exit(0)
    if words == ["--version"]:
        print(f"pacmr-lightning {version('pacmr-lightning')}")
        sys.exit(0)
    if words and not words[0].startswith("-") and words[0] not in (*RUNS, *TOOLS):
        stop(f"There is no command {words[0]}; choose one of {', '.join((*RUNS, *TOOLS))}.")
    tool = words[0].replace("-", "_") if words and words[0] in TOOLS else None
    if words == ["fit"]:
        stop(f"fit needs a model and pairs; for example:\n{EXAMPLE}\npacmr fit --help has more.")
    if words[1:] in (["--help"], ["-h"]):
        print(_help_of(words[0]))
        sys.exit(0)
    try:
        with _no_garbage(), only_results(), waiting("Loading PyTorch and its libraries"):
            module = import_module(f".commands.{tool or 'fit'}", __package__)
        if tool:
            module.main(words[1:])
        else:
            # None, not sys.argv, with which DDP starts its processes again.
            module.PacmrCLI(arguments)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader, such as head, has closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        text = sentence(error)
        if text is None:
            raise
        _let_rank_0_speak()
        stop(text)
