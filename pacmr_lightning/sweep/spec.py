"""Dataclasses of a sweep file."""

import re
import shlex
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentError, get_loader

from ..errors import UserError, check_at_least, check_rates
from ..evaluation import reward_model  # noqa: F401 - for its judge's short name
from ..evaluation.judging import PairJudge, check_prices
from ..files import expanded
from ..runs.option_parser import OptionParser, short_message
from ..runs.shipped_configs import resolved

T = TypeVar("T")


@dataclass
class SweptMethod:
    """A method of a sweep, one row of its tables."""

    config: str | None = None
    """Name of a file in ``configs/methods``, or a path; None: the file with the method's own name."""
    label: str | None = None
    """Name in tables and figures; None: the method's name."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of ``pacmr fit`` and their values, after those of the sweep."""
    vary: dict[str, list[Any]] = field(default_factory=dict)
    """Options and their values; every combination is a cell."""
    after: str | None = None
    """A method above this one, whose cell of the same noise rate and seed must be done first. In options and
    ``first``, ``{after}`` stands for that cell's folder."""
    first: str | None = None
    """Arguments of a ``pacmr`` command to run before each ``pacmr fit``; ``{folder}`` is the cell's."""
    bound: bool = False
    """True for an upper bound, which uses the true labels: last in tables, never marked best."""


@dataclass
class Preparation:
    """A requirement of the cells, such as the model after SFT."""

    output: str
    """File or folder that it makes; skipped if it exists. With ``{seed}`` in it, one per seed; ``{output}``
    stands for the sweep's."""
    command: str
    """Arguments of ``pacmr``, with the same placeholders."""


@dataclass
class Evaluation:
    """Responses of all cells to the same prompts, judged against the anchor's in both orders."""

    judge: PairJudge
    """Judge, as in ``pacmr judge``."""
    predict: dict[str, Any] = field(default_factory=dict)
    """Options of ``pacmr predict`` and their values, after those of the cell's run."""
    seed: int = 42
    """Seed of the bootstrap behind the intervals."""
    prompt_price: float | None = None
    """Price of a million tokens of prompts, in any currency; with ``completion_price``."""
    completion_price: float | None = None
    """Price of a million tokens of answers."""


@dataclass
class Sweep:
    """Methods x noise rates x varied options x seeds.

    Paths are relative to the working directory. In values of options, ``{seed}``, ``{noise}`` and
    ``{folder}`` stand for the cell's.
    """

    base: list[str]
    """Config files of every cell; later ones win, and a method's file comes last."""
    methods: dict[str, SweptMethod]
    """By name, which is the method's label in a run's summary."""
    noise_rates: list[float]
    """Noise rates, in [0, 1)."""
    seeds: list[int]
    output: str
    """Folder of the cells; sweeps with the same folder share common cells."""
    report: str | None = None
    """Folder of tables and figures; None: that of the cells."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of ``pacmr fit`` and their values, for every cell."""
    prepare: list[Preparation] = field(default_factory=list)
    """Requirements, in order."""
    afterwards: list[Preparation] = field(default_factory=list)
    """Commands once all cells are done, as in ``prepare``."""
    evaluate: Evaluation | None = None
    """Predictions and win rates; None: only what training measures."""
    anchor: str | None = "dpo"
    """Method that others are compared with; None for no comparison."""
    comparisons: dict[str, list[str]] = field(default_factory=dict)
    """Further tables of some methods, by name, with a row for each varied value."""
    jobs: int = 1
    """Parallel cells."""
    threads: int = 1
    """CPU threads per cell."""
    devices: int = 0
    """GPUs per cell; with 0 cells see none, but a job of SLURM's what it asked for."""

    def preparations(self) -> list[Preparation]:
        """Return ``prepare`` with the seeds filled in."""
        return [
            Preparation(*filled([entry.output, entry.command], known, f"The command of {entry.output}"))
            for entry in self.prepare
            for known in (
                {"output": self.output, **one}
                for one in ([{"seed": seed} for seed in self.seeds] if "{seed}" in entry.output else [{}])
            )
        ]


MAPPINGS = ("options", "vary", "comparisons")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")


def filled(value: Any, known: Mapping[str, Any], place: str) -> Any:
    """Return a value of ``place`` with its placeholders filled in, also those inside of dicts and lists.

    ``{{word}}`` becomes ``{word}``; braces around anything but one word stay.

    Raises:
        UserError: a placeholder is not among the ``known`` ones.
    """

    def word(match: re.Match[str]) -> str:
        doubled, name = match.groups()
        if doubled:
            return f"{{{doubled}}}"
        if name not in known:
            names = ", ".join(f"{{{one}}}" for one in known) or "none"
            raise UserError(
                f"{place} has the placeholder {{{name}}}, but it may have {names}; write {{{{{name}}}}} for "
                f"the text {{{name}}}."
            )
        return str(known[name])

    if isinstance(value, dict):
        return {key: filled(item, known, place) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, known, place) for item in value]
    return _PLACEHOLDER.sub(word, value) if isinstance(value, str) else value


def command_words(command: str) -> list[str]:
    """Return the words of a ``pacmr`` command; UserError for an open quote."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UserError(f"The command {command!r} cannot be read ({error}); close its quotes.") from None


def read_sweep(path: str, jobs: int | None = None) -> Sweep:
    """Read a sweep from a YAML file; ``jobs`` replaces the file's number."""
    return sweep_of(read_yaml(path), path, jobs)


def read_yaml(path: str, of: Sequence[str] = ()) -> dict[str, Any]:
    """Return the contents of a sweep file, with empty settings as ``{}`` and ``~`` as home folders.

    A file that is ``like`` another has its keys too, except those that it gives itself. Of ``prepare`` and
    ``afterwards`` it replaces the entries with the same output, and adds others. ``of`` are the files that
    are like this one.
    """
    try:
        contents = expanded(get_loader("yaml")(Path(resolved(path)).read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"The sweep file {path} cannot be read ({error.strerror}); name another.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split()).replace(' in "<unicode string>"', "")
        raise UserError(f"{path} is not a sweep file: {reason}.") from None
    given = _mapping(contents, path)
    if isinstance(given.get("methods"), dict):
        methods = given["methods"].items()
        given["methods"] = {str(name): _mapping(it or {}, f"{path}, method {name}") for name, it in methods}
    for name in ("prepare", "afterwards"):
        given[name] = [_mapping(entry, f"{path}, {name}") for entry in given.get(name) or ()]
    if other := given.pop("like", None):
        if not isinstance(other, str):
            raise UserError(f"{path}: like is {other!r}, but it must be one sweep file.")
        if other in (*of, path):
            raise UserError(
                f"{other} is like itself ({' - '.join([*of, path, other])}); name another sweep file."
            )
        base = read_yaml(other, (*of, path))
        for name in ("prepare", "afterwards"):
            entries = {entry.get("output"): entry for entry in [*base[name], *given[name]]}
            given[name] = [*entries.values()]
        given = base | given
    return given


def _mapping(settings: Any, place: str) -> dict[str, Any]:
    """Return keys and values, with ``{}`` for collections that are left empty."""
    if not isinstance(settings, dict):
        raise UserError(f"{place}: expected keys and values, but got {settings!r}.")
    return {key: {} if value is None and key in MAPPINGS else value for key, value in settings.items()}


def sweep_of(found: Any, path: str, jobs: int | None) -> Sweep:
    """Return the checked sweep of a file's contents."""
    sweep = parsed(Sweep, found, path)
    # As they are: jsonargparse makes objects of its own of class paths.
    sweep.options = found.get("options", {})
    for name, settings in found["methods"].items():
        sweep.methods[name].options, sweep.methods[name].vary = (
            settings.get(k, {}) for k in ("options", "vary")
        )
    if sweep.evaluate:
        sweep.evaluate.predict = found["evaluate"].get("predict") or {}
    sweep.jobs = sweep.jobs if jobs is None else jobs
    _check_values(sweep, path)
    return sweep


def parsed(kind: type[T], found: Any, place: str) -> T:
    """Return a dataclass from keys and values; errors begin with ``place``."""
    parser = OptionParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    try:
        return kind(**vars(parser.instantiate(parser.parse_object(deepcopy(found)))))
    except ArgumentError as error:
        raise UserError(f"{place}: {short_message(error)}") from None


def _check_values(sweep: Sweep, path: str) -> None:
    for name in ("methods", "noise_rates", "seeds"):
        values = list(getattr(sweep, name))
        if not values or len(set(values)) < len(values):
            raise UserError(f"{path}: {name} is {values}, but it needs at least one, and none twice.")
    for seed in sweep.seeds:
        check_at_least(0, **{f"{path}: one of seeds": seed})
    for rate in sweep.noise_rates:
        check_rates(**{f"{path}: one of noise_rates": rate})
    for name, least in (("jobs", 1), ("threads", 1), ("devices", 0)):
        check_at_least(least, **{f"{path}: {name}": getattr(sweep, name)})
    options = [sweep.options, *(m.options | m.vary for m in sweep.methods.values())]
    if odd := [option for one in options for option in one if not isinstance(option, str)]:
        raise UserError(f"{path}: the option {odd[0]!r} is no text; name it as pacmr fit does.")
    filled([sweep.output, sweep.report], {}, f"{path}: output or report")
    if any("trainer.default_root_dir" in one for one in options):
        raise UserError(f"{path}: trainer.default_root_dir is the cell's own folder; take it out of options.")
    if evaluate := sweep.evaluate:
        if sweep.anchor is None:
            raise UserError(f"{path}: evaluate compares with the anchor, but anchor is null; name a method.")
        if "generation.output" in evaluate.predict:
            raise UserError(
                f"{path}: generation.output is the cell's own file; take it out of evaluate.predict."
            )
        check_prices(evaluate.prompt_price, evaluate.completion_price, f"{path}: ")
        check_at_least(0, **{f"{path}: the seed of evaluate": evaluate.seed})
    labels = [method.label or name for name, method in sweep.methods.items()]
    if len(set(labels)) < len(labels):
        raise UserError(
            f"{path}: the labels of the methods are {', '.join(labels)}, but none may occur twice."
        )
    named = {"anchor": [sweep.anchor] if sweep.anchor else [], **sweep.comparisons}
    for place, methods in named.items():
        for one in methods:
            if one not in sweep.methods:
                raise UserError(
                    f"{path}: {place} names {one}, which is none of the methods "
                    f"({', '.join(sweep.methods)}); correct it, or set anchor to null."
                )
    above: list[str] = []
    for name, method in sweep.methods.items():
        for option, values in method.vary.items():
            if not values:
                raise UserError(f"{path}: method {name} varies {option} over no values; give some.")
        if method.after and (method.after not in above or sweep.methods[method.after].vary):
            raise UserError(
                f"{path}: method {name} comes after {method.after}, which is no method above it with one "
                "cell a seed; move it up, or take its vary away."
            )
        above.append(name)
