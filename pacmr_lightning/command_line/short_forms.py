"""Short forms of options: ``pacmr fit --model M --data rows.jsonl --method dpo --output runs/mine``."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from textwrap import wrap
from typing import Any

import yaml

from ..errors import UserError
from ..files import is_file_of_rows, local_path
from ..runs.shipped_configs import names, resolved

EXAMPLE = """\
  pacmr fit --model path/to/model --data pairs.jsonl --method dpo --output runs/mine
  pacmr audit path/to/model --data pairs.jsonl"""
BASE = "preference"
METHODS = "methods/"
CONFIG = ("--config", "-c")
CLASSES = {"--model": ("PreferenceModule", "SFTModule"), "--data": ("PreferenceDataModule", "SFTDataModule")}
PAGE = f"""\
usage: pacmr fit [--config NAME_OR_FILE ...] [options]

Train a policy on preference pairs. Four options are enough:

{EXAMPLE.splitlines()[0]}

what to train on
  --model MODEL                     folder or Hub id of the model or adapter to start from: the reference
  --data DATA                       pairs with the columns prompt, chosen, rejected: JSON Lines (also .gz),
                                    Parquet, or the id of a Hub dataset
  --method NAME                     {{methods}}
                                    (default: dpo)
  --output FOLDER                   the run's folder (default: runs/<task>-<method>-noise<percent>-seed<seed>)

what people change (defaults of the config preference)
  --model.learning_rate RATE        peak learning rate (default: by the size of the model)
  --model.objective.beta BETA       temperature of DPO; higher means lower KL to the reference (default: 0.1)
  --model.warmup_ratio RATIO        fraction of the updates with rising learning rate (default: 0.03)
  --model.micro_batch_size PAIRS    pairs in one forward pass (default: auto, as many as fit on a GPU, else 4)
  --model.policy.rank RANK          LoRA rank (default: 16)
  --model.policy.quantization 4bit  keep the frozen base in 4 bits (QLoRA; default: null)
  --data.global_batch_size PAIRS    pairs per update, over all devices (default: 32)
  --data.max_length TOKENS          prompt and longer response; longer pairs are dropped (default: 1024)
  --data.source.validation FILE     validation pairs (default: some of the training prompts); of a Hub dataset
                                    --data.source.validation_split NAME
  --data.augmentations FILE         augmented prompts, from pacmr augment (default: the rows', else by rules)
  --data.noise_rate RATE            flip labels on purpose, to measure a method (default: 0)
  --trainer.max_epochs EPOCHS       (default: 1)
  --trainer.max_steps UPDATES       stop after this many updates (default: -1, no limit)
  --trainer.devices N               GPUs (default: auto, all of them)
  --trainer.strategy NAME           ddp, for one; --config strategies/zero2 for DeepSpeed (default: auto)
  --seed_everything SEED            (default: 42)

configs and runs
  --config NAME_OR_FILE             YAML with any of these; several compose, later ones win. Without one that
                                    names data, preference comes first. pacmr configs lists what is shipped
  --ckpt_path last                  continue the run in the output folder
  --print_config                    print the whole configuration and stop

  --help_all                        all options of modules, data and trainer (LightningCLI)
  --config preference --model.weighting.help VNetWeighting
                                    options of a class, of any option that takes one
SFT instead: pacmr fit --config sft --model MODEL --data rows.jsonl --output runs/sft"""


RUN_PAGE = """\
usage: pacmr {command} --config RUN/config.yaml --ckpt_path last [options]

{told}

  --config FILE                  the run's config.yaml; several compose, later ones win
  --ckpt_path PATH               last, or a file of the run's folder checkpoints
{more}  --trainer.devices N            GPUs (default: auto, all of them)

Any option of pacmr fit can be given as well; --help_all lists all of them."""
PREDICT = """\
  --data.predict_prompts N       prompts to answer; null for all (default: 800)
  --model.max_new_tokens TOKENS  longest response (default: 128)
  --generation.temperature T     0 is greedy (default: 0)
  --generation.output FILE       default: generations.jsonl in the run's folder
"""


def run_page(command: str, told: str) -> str:
    """Return the help of ``pacmr validate``, ``test`` or ``predict``."""
    return RUN_PAGE.format(command=command, told=told, more=PREDICT if command == "predict" else "")


def page() -> str:
    """Return the help of ``pacmr fit`` on one page."""
    lines = wrap(", ".join(_methods()), 66)
    return PAGE.format(methods=("\n" + " " * 36).join(lines))


def expanded(words: list[str]) -> list[str]:
    """Expand the short forms in a run's words, and add the base config if no config names data."""
    given = list(_options(words[1:]))
    if not words or words[0].startswith("-") or any(re.fullmatch(r"-h|--(.+\.)?help.*", w) for w in words):
        return words
    configs = [_read(value) for option, value, _ in given if option in CONFIG]
    classes = [
        n for n, (option, value, _) in enumerate(given) if option in CLASSES and _is_class(option, value)
    ]
    has_data = bool(classes) or any("data" in config for config in configs)
    models = [config.get("model") for config in configs]
    sft = any(str(one.get("class_path")).endswith("SFTModule") for one in models if isinstance(one, dict))
    arguments, methods, short = list[str](), list[str](), list[str]()
    last = max([*classes, *(n for n, (option, *_) in enumerate(given) if option in CONFIG)], default=-1)
    after_configs = after_last = 0
    for place, (option, value, typed) in enumerate(given):
        if option == "--method":
            if value not in (known := _methods()):
                near = get_close_matches(value, known, 1, 0.6)
                hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}."
                raise UserError(f"--method: unknown method {value}; {hint}")
            methods += ["--config", METHODS + value]
        elif (full := _written_out(option, value, sft)) and place < last:
            short += full  # behind what names the class
        else:
            arguments += full or typed
        after_configs = len(arguments) if option in CONFIG else after_configs
        after_last = len(arguments) if place == last else after_last
    base = [] if has_data else ["--config", BASE]
    arguments[after_last:after_last] = short
    return [words[0], *base, *arguments[:after_configs], *methods, *arguments[after_configs:]]


def _options(words: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield options, their values and both as typed; the value of a flag, or of another word, is empty."""
    place = 0
    while place < len(words):
        option, equals, value = words[place].partition("=")
        typed, following = words[place : place + 1], words[place + 1 : place + 2]
        if _is_option(option) and not equals and following and not _is_option(following[0]):
            value = following[0]
            typed += following
        yield option, value, typed
        place += len(typed)


def _is_option(word: str) -> bool:
    return re.match("-{1,2}[A-Za-z]", word) is not None  # and no negative number


def _written_out(option: str, value: str, sft: bool) -> list[str]:
    """Return the full form of a short form; empty for other options."""
    if option == "--output":
        if not value:
            raise UserError("--output has no value; give the run's folder, such as runs/mine.")
        return ["--trainer.default_root_dir", value]
    if option not in CLASSES or not value or _is_class(option, value):
        return []
    if option == "--model":
        return ["--model.model", value, "--data.tokenizer", value] if sft else ["--model.policy.model", value]
    return _source("--data.source", value, "Completions" if sft else "")


def with_source(words: list[str]) -> list[str]:
    """Return a command's words with ``--data FILE_OR_HUB_ID`` expanded to a source."""
    parts = (_source("--source", v) if o == "--data" and v else typed for o, v, typed in _options(words))
    return [word for part in parts for word in part]


def _source(option: str, value: str, kind: str = "") -> list[str]:
    if is_file_of_rows(value):
        source, name = f"{kind.removesuffix('s')}Files", "train"
    else:
        source, name = f"Hub{kind or 'Preferences'}", "path"
    return [option, source, f"{option}.{name}", value]


def _is_class(option: str, value: str) -> bool:
    """Return True for a value that LightningCLI parses: a class, YAML, or null."""
    if value in ("null", "None") or value.endswith((".yaml", ".yml")) or value.startswith(("{", "-")):
        return True
    if (
        local_path(value).exists()
        or is_file_of_rows(value)
        or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", value)
    ):
        return False
    return "." in value or bool(get_close_matches(value, CLASSES[option], 1, 0.75))


def _read(file: str) -> dict[str, Any]:
    """Return a config's content; empty if the parser has to report an error."""
    try:
        content = yaml.safe_load(local_path(resolved(file)).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _methods() -> list[str]:
    return [name.removeprefix(METHODS) for name in names() if name.startswith(METHODS)]
