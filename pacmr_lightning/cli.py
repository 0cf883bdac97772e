"""The ``pacmr`` command. Slow imports are left to the commands."""

import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

from .command_line.exceptions import file_trouble, sentence, stop
from .command_line.output import only_results
from .command_line.short_forms import EXAMPLE, page, run_page
from .waiting import waiting

RUNS = {
    "fit": "Trains a policy: DPO, PACMR-DPO and other methods, or SFT.",
    "validate": "Measures a checkpoint on the validation pairs.",
    "test": "Measures the same, logged as test/.",
    "predict": "Writes responses of a checkpoint to evaluation prompts, greedy by default.",
}
TOOLS = {
    "inspect": "Shows statistics of preference data: kept pairs, lengths, duplicates, contradictions, rows.",
    "augment": "Writes augmented training prompts: back-translations, paraphrases or rule-based rewording.",
    "clean-meta": "Writes a small set of pairs with clean labels: judges correct a sample of training pairs.",
    "judge": "Compares responses of two models with a judge: win rate, win-score and intervals.",
    "analyze": "Measures how a policy agrees with itself under augmented prompts.",
    "audit": "Finds suspected label errors with a base model, adapter or run; writes the pairs without them.",
    "refine": "Trains a second pass with soft labels from the audit of a run; compares both.",
    "compare": "Shows the final numbers of runs side by side.",
    "export": "Writes a folder of a finished run for transformers or PEFT, with a model card.",
    "quickstart": "Trains DPO, PACMR-DPO and a refined policy on pairs with 30% wrong labels, in 2 minutes.",
    "configs": "Lists the shipped configs, which --config finds by name.",
    "sweep": "Runs methods x noise rates x options x seeds of a file; writes tables and figures.",
}


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

ALIASES = {"audit-model": "audit"}
TALK = ("💡 Tip:", "TPU available", "GPU available", "`Trainer(val_check_interval=", "`Trainer.fit` stopped")
"""Beginnings of Lightning's log lines to hide."""
NO_BARS = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_MININTERVAL": "30",
}
"""For a log file: no bars of libraries, and a line of tqdm every half minute."""

_with_place = warnings.formatwarning

LET_SPEAK = 5
"""Seconds that other ranks wait for rank 0 to report a common error."""


def _prepare_libraries() -> None:
    """Silence library output, and set matplotlib's backend and torch's allocator, before their import."""
    # A notebook sets a backend that other environments lack.
    os.environ["MPLBACKEND"] = "agg"
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # rows of many lengths would leave gaps on a GPU
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    warnings.formatwarning = _format_warning  # type: ignore[assignment]
    lightning = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    if not lightning.filters:
        lightning.addFilter(lambda record: not record.getMessage().startswith(TALK))
    if not sys.stderr.isatty():
        for name, value in NO_BARS.items():
            os.environ.setdefault(name, value)


def _format_warning(message: Warning | str, category: type[Warning], *place: Any) -> str:
    """Return a warning to users without its place in the code."""
    return f"Warning: {message}\n" if category is UserWarning else _with_place(message, category, *place)


@contextmanager
def _loading() -> Iterator[None]:
    """Show a progress line, and disable garbage collection, which takes a fifth of the import time.

    Later collections skip what the block imported, else the one at the end of the process takes two seconds.
    """
    collects, loaded = gc.isenabled(), "torch" in sys.modules
    gc.disable()
    try:
        with waiting("Loading PyTorch and its libraries"):
            yield
    finally:
        if collects:
            if not loaded or not gc.get_freeze_count():
                gc.freeze()
            gc.enable()


def _let_rank_0_speak() -> None:
    if "lightning.pytorch" not in sys.modules:  # no run has begun, and importing it takes seconds
        return
    from lightning.pytorch.utilities import rank_zero_only

    if rank_zero_only.rank:  # type: ignore[attr-defined]  # Lightning sets it on the function
        time.sleep(LET_SPEAK)


def _help() -> str:
    commands = "\n".join(f"  {name:<12}{told}" for name, told in {**RUNS, **TOOLS}.items())
    return (
        "usage: pacmr COMMAND ...\n\nLearning from noisy preferences. Two commands to start with:\n\n"
        f"{EXAMPLE}\n\n{commands}\n\npacmr COMMAND --help shows the options of a command."
    )


def tool_of(words: list[str]) -> tuple[str, Callable[..., Any], list[str]]:
    """Return a tool's name, its function, which has the name of its file in ``commands``, and arguments."""
    file = words[0].replace("-", "_")
    return words[0], getattr(import_module(f".commands.{file}", __package__), file), words[1:]


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Say in a sentence that TensorBoard's thread cannot write; the main thread ends by the same error."""
    before = threading.excepthook

    def of_thread(failed: threading.ExceptHookArgs) -> None:
        if (said := failed.exc_value and file_trouble(failed.exc_value)) is None:
            before(failed)
        else:
            print(said, file=sys.stderr)

    threading.excepthook = of_thread
    try:
        yield
    finally:
        threading.excepthook = before


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
        near = get_close_matches(words[0], (*RUNS, *TOOLS), n=1)
        advice = f"did you mean {near[0]}? Commands are" if near else "choose one of"
        stop(f"Unknown command {words[0]}; {advice} {', '.join((*RUNS, *TOOLS))}.")
    if not words:
        stop("no command is given; pacmr --help lists them.")
    if words == ["fit"]:
        stop(f"fit needs a model and pairs; for example:\n{EXAMPLE}\npacmr fit --help has more.")
    if words[1:] in (["--help"], ["-h"]) and words[0] in RUNS:
        print(page() if words[0] == "fit" else run_page(words[0], RUNS[words[0]]))
        sys.exit(0)
    try:
        with only_results(), _loading():
            if words[0] in TOOLS:
                from .command_line.parser import run_tool

                name, function, rest = tool_of(words)
                run = partial(run_tool, f"pacmr {name}", function, rest)
            else:
                # None, not sys.argv, since DDP restarts its processes with sys.argv.
                run = partial(import_module(".commands.fit", __package__).PacmrCLI, arguments)
        with _quiet_threads():
            run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # closed by the reader, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        text = sentence(error)
        if text is None:
            raise
        _let_rank_0_speak()
        stop(text)
