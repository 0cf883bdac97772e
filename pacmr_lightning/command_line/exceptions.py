"""One sentence for errors that a user can fix: bad input, full disk, out of memory, lost process."""

import errno
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from linecache import getline
from traceback import walk_tb
from typing import NoReturn

from ..errors import FAILED, UserError, causes, first_line, is_out_of_memory


def stop(message: str) -> NoReturn:
    """End the program as for bad input: one sentence on stderr, exit status 2."""
    print(f"pacmr: error: {message}", file=sys.stderr)
    sys.exit(2)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, each with the constructor errors whose text it repeats."""
    for cause in causes(error):
        yield cause
        yield from (one for one in FAILED if one is not cause and _words(one) in _words(cause))


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _place(error: BaseException) -> str:
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "") if frames else ""


def sentence(error: BaseException) -> str | None:
    """Return the problem and its fix; None for an error that no user can fix."""
    if user_error := next((one for one in _chain(error) if isinstance(one, UserError)), None):
        return str(user_error)
    of_libraries = (_of_logger, _of_lightning, file_trouble, out_of_memory, _other_model, no_compiler)
    return next(filter(None, (text(error) for text in (*of_libraries, lost_process))), None)


def _of_lightning(error: BaseException) -> str | None:
    """Return the text of an error that Lightning itself raises, as for a flag of its Trainer."""
    last = deque(walk_tb(error.__traceback__), maxlen=1)
    if not last or not _place(error).startswith("lightning."):
        return None
    frame, line = last[0]
    raised = getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")
    return " ".join(str(error).split()) if raised else None


def _of_logger(error: BaseException) -> str | None:
    """Return W&B's or MLflow's text, or Lightning's that it is not installed."""
    for one in _chain(error):
        if isinstance(one, ModuleNotFoundError) and _place(one).startswith("lightning.pytorch.loggers"):
            text = " ".join(str(one).split()).rstrip(".")
            return f'{text}; or install "pacmr-lightning[loggers]".'
        # By name, since they are seldom imported.
        if (package := type(one).__module__.partition(".")[0]) in ("mlflow", "wandb"):
            return f"{package} of trainer.logger failed: {first_line(one)}"
    return None


def out_of_memory(error: BaseException) -> str | None:
    """Return the sentence on too little memory."""
    for one in filter(is_out_of_memory, _chain(error)):
        wanted = re.search(r"[Tt]ried to allocate ([\d.,]+ \w+)", str(one))
        return (
            f"Out of memory{f' ({wanted[1]} requested)' if wanted else ''}; lower micro_batch_size (in SFT "
            "data.batch_size) or max_length, or set gradient_checkpointing to true; docs/memory.md says what "
            "each option saves."
        )
    return None


def file_trouble(error: BaseException) -> str | None:
    """Return the sentence on a file without permission, or a full disk or quota."""
    for one in _chain(error):
        if isinstance(one, PermissionError) and one.filename:
            return f"{one.filename} may not be read or written ({one.strerror}); change its permissions."
        # Rust, in safetensors and tokenizers, raises no OSError.
        of_rust = re.search(r"\(os error (\d+)\)", str(one))
        number = int(of_rust[1]) if of_rust else getattr(one, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            file = getattr(one, "filename", None)
            return (
                f"The disk is full{f' at {file}' if file else ''} ({os.strerror(number)}); free some space "
                "and run the command again (fit with --ckpt_path last): finished parts are kept."
            )
    return None


def lost_process(error: BaseException) -> str | None:
    """Return the sentence on training processes that no longer reach each other."""
    for one in _chain(error):
        text = str(one)
        # gloo raises plain RuntimeErrors, NCCL and torch's store DistErrors.
        of_gloo = isinstance(one, RuntimeError) and re.search(r"\bgloo\b|by peer|Timed out waiting", text)
        # By name: importing torch takes longer than help.
        if of_gloo or any(kind.__name__ == "DistError" for kind in type(one).__mro__):
            reason = re.search(r"[^:]*by peer|Timed out waiting[^.,]*", text)
            return (
                "Another process of this run ended, or did not answer in time "
                f"({reason[0].strip() if reason else type(one).__name__}); read its messages, check the "
                "memory, and resume with the same command and --ckpt_path last."
            )
    return None


def no_compiler(error: BaseException) -> str | None:
    """Return the sentence on a kernel that DeepSpeed could not compile."""
    wanted = re.search(r"Unable to JIT load the (\w+) op|Error building extension '(\w+)'", str(error))
    return wanted and (
        f"DeepSpeed could not compile its {wanted[1] or wanted[2]} for trainer.strategy; use a config of "
        "strategies/, which need no compiler, or install g++ and ninja."
    )


def _other_model(error: BaseException) -> str | None:
    text = str(error)
    if isinstance(error, RuntimeError) and text.startswith("Error(s) in loading state_dict"):
        what = f" ({(text.splitlines()[1:] or [''])[0].strip().rstrip('.')})"
    elif isinstance(error, ValueError) and text.startswith("loaded state dict"):
        what = ""
    else:
        return None
    return f"The checkpoint does not fit the model{what}; use the model and options of its training."
