"""jsonargparse's error messages, which list every guess of a union, cut down to one sentence."""

from __future__ import annotations

import errno
import inspect
import os
import re
import sys
from importlib import import_module
from typing import NoReturn

import torch

from .errors import UserError


def short_message(message: str) -> str:
    """The message's first cause as one sentence that names the key, the value and what would be accepted."""
    key = re.match(r'Parser key "([^"]+)"', message)
    name = f"{key[1]}: " if key else ""
    no_class = re.search(r"Expected a dot import path string: (\S+)", message)
    if no_class:
        base = re.search(r"Subtypes: \[(?:list\[)?(?:<class ')?([\w.]+)", message)
        choices = _subclasses(base[1]) if base else []
        named = f"choose one of {', '.join(choices)}, or give an import path"
        hint = f"; {named if choices else '--help lists those that there are'}"
        return f"{name}there is no class {no_class[1]}{hint}."
    wrong_type = re.search(r"Expected an? (.+?)\. Got value: (.*)", message)
    if wrong_type:
        return f"{name}expected {_type_name(wrong_type[1])}, but got {wrong_type[2]}."
    unknown = re.search(r"Option '([^']+)' is not accepted|does not accept option '([^']+)'", message)
    if unknown:
        return f"There is no option {unknown[1] or unknown[2]} here; look for its right name with --help."
    no_import = re.search(r"Problem with given class_path '([^']+)':\s+(.+)", message)
    if no_import and re.search(r"^(No module|module '|cannot import|Import)", no_import[2]):
        reason = no_import[2].rstrip(".")
        return (
            f"{name}{no_import[1]} cannot be imported ({reason}); correct the path, or install what has it."
        )
    given = re.search(r"Given value: .*?([\w.]+\.\w+)", message)
    given_name = given[1] if given else "the class"
    no_subclass = re.search(r"does not correspond to a subclass of (\w+)", message)
    if no_subclass:
        return f"{name}{given_name} is no subclass of {no_subclass[1]}; give one."
    if "Expected an instantiatable class, but is abstract" in message:
        return f"{name}{given_name} leaves an abstract method of its base class out; define it."
    missing = re.search(r"the following arguments are required: (.+)", message)
    if missing:
        return f"The option {missing[1]} is missing; give it in a config or on the command line."
    stray = re.match(r"unrecognized arguments: (.+)", message)
    if stray:
        return f"There is no option {stray[1]}; look for its right name with --help."
    return re.sub(r"\s+", " ", message).strip()


def stop(message: str) -> NoReturn:
    """Ends the program as bad input does: one sentence on stderr, exit status 2."""
    print(f"pacmr: error: {message}", file=sys.stderr)
    sys.exit(2)


def user_error(error: BaseException | None) -> UserError | None:
    """The ``UserError`` among an exception and its causes: jsonargparse wraps what constructors raise."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__
    return error


def misconfigured(error: BaseException) -> UserError | None:
    """What Lightning says of a trainer that cannot be."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    place = "" if last is None else last.tb_frame.f_globals.get("__name__", "")
    of_trainer = isinstance(error, ValueError) and place.startswith("lightning.pytorch.trainer.connectors")
    # By name, since importing it takes longer than most tools.
    if type(error).__name__ == "MisconfigurationException" or of_trainer:
        return UserError(str(error))
    return None


def full_disk(error: BaseException | None) -> UserError | None:
    """What to say where an exception comes from a disk, or a quota, that is full."""
    while error is not None:
        # The Rust in safetensors and tokenizers raises no OSError.
        of_rust = re.search(r"\(os error (\d+)\)", str(error))
        number = int(of_rust[1]) if of_rust else getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            place = f" at {error.filename}" if getattr(error, "filename", None) else ""
            return UserError(
                f"The disk is full{place} ({os.strerror(number)}); free some space and run it again: what "
                "was finished is kept."
            )
        error = error.__cause__ or error.__context__
    return None


def lost_process(error: BaseException | None) -> UserError | None:
    """What to say where processes that train together cannot reach each other any more."""
    while error is not None:
        text = str(error)
        # gloo raises plain RuntimeErrors, NCCL and the store, through which they meet, torch's DistErrors.
        of_gloo = isinstance(error, RuntimeError) and re.search(r"\bgloo\b|by peer|Timed out waiting", text)
        if of_gloo or isinstance(error, torch.distributed.DistError):
            said = re.search(r"[^:]*by peer|Timed out waiting[^.,]*", text)
            reason = f" ({said[0].strip()})" if said else f" ({type(error).__name__})"
            return UserError(
                f"Another process of this run ended, or did not answer in time{reason}; see what it said, or "
                "whether memory ran out, and go on with the same command and --ckpt_path last."
            )
        error = error.__cause__ or error.__context__
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


def _type_name(text: str) -> str:
    literal = re.match(r"typing\.Literal\[(.+)\]", text)
    if literal:
        return f"one of {literal[1]}"
    return re.sub(r"<class '([^']+)'>", r"\1", text)


def _subclasses(path: str) -> list[str]:
    """Names of this package's concrete subclasses of a class given by its import path."""
    module, _, name = path.rpartition(".")
    found, queue = set(), [getattr(import_module(module), name)]
    while queue:
        children = queue.pop().__subclasses__()
        queue += children
        found |= {
            child.__name__
            for child in children
            if child.__module__.startswith("pacmr_lightning") and not inspect.isabstract(child)
        }
    return sorted(found)
