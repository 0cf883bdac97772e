"""What the command says of errors that a user can mend."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn, TypeVar

import torch

from ..errors import UserError, is_out_of_memory

E = TypeVar("E", bound=BaseException)


def stop(message: str) -> NoReturn:
    """Ends the program as bad input does: one sentence on stderr, exit status 2."""
    print(f"pacmr: error: {message}", file=sys.stderr)
    sys.exit(2)


def user_error(error: BaseException | None) -> UserError | None:
    """The ``UserError`` among an exception and its causes: jsonargparse wraps what constructors raise."""
    return _among(error, UserError)


def _among(error: BaseException | None, kind: type[E]) -> E | None:
    """The first of a kind among an exception and its causes."""
    return next((one for one in _all(error) if isinstance(one, kind)), None)


def _all(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and its causes.

    Of what the types of a union have raised, jsonargparse makes the first the cause, and the others stay in
    its frame.
    """
    if error is None:
        return
    yield error
    frame, causes = _frame(error), [error.__cause__]
    if frame is not None and frame.f_code.co_name == "raise_union_unexpected_value":
        causes = frame.f_locals["exceptions"]
    for cause in causes:
        yield from _all(cause)


def _came_of(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, its cause or else what was handled when it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _frame(error: BaseException) -> FrameType | None:
    """In which it was raised."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return None if last is None else last.tb_frame


def _place(error: BaseException) -> str:
    """The module that has raised it."""
    frame = _frame(error)
    return "" if frame is None else frame.f_globals.get("__name__", "")


def misconfigured(error: BaseException) -> UserError | None:
    """What Lightning says of a trainer that cannot be."""
    of_trainer = isinstance(error, ValueError) and _place(error).startswith(
        ("lightning.pytorch.trainer.connectors", "lightning.fabric.plugins.environments")
    )
    # By name, since importing it takes longer than most tools.
    if type(error).__name__ == "MisconfigurationException" or of_trainer:
        return UserError(str(error))
    return None


def of_logger(error: BaseException) -> UserError | None:
    """What W&B or MLflow has against logging to it; or that it is not installed, as Lightning says."""
    missing = _among(error, ModuleNotFoundError)
    if missing is not None and _place(missing).startswith("lightning.pytorch.loggers"):
        said = " ".join(str(missing).split()).rstrip(".")
        return UserError(f'{said}; or install "pacmr-lightning[loggers]".')
    for one in _all(error):
        # By name, since hardly anybody has imported them.
        if (package := type(one).__module__.partition(".")[0]) in ("mlflow", "wandb"):
            said = (str(one).strip() or type(one).__name__).splitlines()[0]
            return UserError(f"{package} of trainer.logger says: {said}")
    return None


def out_of_memory(error: BaseException) -> UserError | None:
    """What to try where a device, or the machine, has too little memory."""
    for one in _all(error):
        if is_out_of_memory(one):
            wanted = re.search(r"[Tt]ried to allocate ([\d.,]+ \w+)", str(one))
            return UserError(
                f"Out of memory{f' ({wanted[1]} more were wanted)' if wanted else ''}; take fewer pairs at a "
                "time (model.micro_batch_size, or data.batch_size in SFT), shorter ones (max_length), or "
                "recompute activations (gradient_checkpointing); docs/memory.md has what each option saves."
            )
    return None


def full_disk(error: BaseException) -> UserError | None:
    """What to say where an exception comes from a disk, or a quota, that is full."""
    for one in _came_of(error):
        # The Rust in safetensors and tokenizers raises no OSError.
        of_rust = re.search(r"\(os error (\d+)\)", str(one))
        number = int(of_rust[1]) if of_rust else getattr(one, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            file = getattr(one, "filename", None)
            place = f" at {file}" if file else ""
            return UserError(
                f"The disk is full{place} ({os.strerror(number)}); free some space and run it again: what "
                "was finished is kept."
            )
    return None


def lost_process(error: BaseException) -> UserError | None:
    """What to say where processes that train together cannot reach each other any more."""
    for one in _came_of(error):
        text = str(one)
        # gloo raises plain RuntimeErrors, NCCL and the store, through which they meet, torch's DistErrors.
        of_gloo = isinstance(one, RuntimeError) and re.search(r"\bgloo\b|by peer|Timed out waiting", text)
        if of_gloo or isinstance(one, torch.distributed.DistError):
            said = re.search(r"[^:]*by peer|Timed out waiting[^.,]*", text)
            reason = f" ({said[0].strip()})" if said else f" ({type(one).__name__})"
            return UserError(
                f"Another process of this run ended, or did not answer in time{reason}; see what it said, or "
                "whether memory ran out, and go on with the same command and --ckpt_path last."
            )
    return None


def no_compiler(error: BaseException) -> UserError | None:
    """What to say where DeepSpeed wanted to build one of its kernels, and could not."""
    wanted = re.search(r"Unable to JIT load the (\w+) op|Error building extension '(\w+)'", str(error))
    if wanted is None:
        return None
    return UserError(
        f"DeepSpeed could not compile its {wanted[1] or wanted[2]}, which trainer.strategy asks for; use a "
        "file of configs/strategies, none of which needs a compiler, or install g++ and ninja."
    )


def other_model(error: BaseException) -> UserError | None:
    """What to say where torch finds that a checkpoint's tensors do not fit the model or the optimizer."""
    text = str(error)
    if isinstance(error, RuntimeError) and text.startswith("Error(s) in loading state_dict"):
        first = (text.splitlines()[1:] or [""])[0].strip().rstrip(".")
        what = f" ({first})"
    elif isinstance(error, ValueError) and text.startswith("loaded state dict"):
        what = ""
    else:
        return None
    return UserError(
        f"The checkpoint does not fit the model{what}; use the model and options that it was made with."
    )
