"""What a sweep file may say."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentError

from ..command_line.parser import ToolParser
from ..command_line.sentences import short_message
from ..command_line.shipped_configs import resolved
from ..errors import UserError

T = TypeVar("T")


@dataclass
class SweptMethod:
    """A row of the tables."""

    config: str | None = None
    """Name of a file in ``configs/methods``, or a path; None: the file with the method's own name."""
    label: str | None = None
    """What tables and figures call it; None: its name."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of ``pacmr fit`` and their values, after those of the sweep."""
    vary: dict[str, list[Any]] = field(default_factory=dict)
    """Options and the values that each of them takes in turn: every combination is a cell."""
    after: str | None = None
    """A method above this one, whose cell of the same noise rate and seed has to be done first; in options
    and in ``first``, ``{after}`` stands for that cell's folder."""
    first: str | None = None
    """Arguments of a ``pacmr`` command that each cell runs before its ``pacmr fit``; for what it writes,
    ``{folder}`` stands for the cell's own folder."""
    bound: bool = False
    """Whether it uses what no method can know: listed last in tables, and never the best."""


@dataclass
class Preparation:
    """What has to be there before the cells run, such as the model after SFT."""

    output: str
    """File or folder that it makes; where that exists, nothing is done. With ``{seed}`` in it there is one
    for each seed."""
    command: str
    """Arguments of ``pacmr``."""


@dataclass
class Sweep:
    """Methods x noise rates x varied options x seeds.

    Paths are relative to the working directory, as in ``pacmr fit --config``. In the values of options,
    ``{seed}``, ``{noise}`` and ``{folder}`` stand for the cell's.
    """

    base: list[str]
    """Config files that every cell begins with; later ones win, and a method's file comes after them."""
    methods: dict[str, SweptMethod]
    """By name, which is also the method's label in a run's summary."""
    noise_rates: list[float]
    """Shares of labels to flip, in [0, 1)."""
    seeds: list[int]
    """One run each."""
    output: str
    """Folder of the cells; sweeps that name the same one share the cells that they have in common."""
    report: str | None = None
    """Folder of the tables and figures; None: that of the cells."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of ``pacmr fit`` and their values, for every cell."""
    prepare: list[Preparation] = field(default_factory=list)
    """What has to be there first, in this order."""
    anchor: str | None = "dpo"
    """Method that the others are compared with; None: no such comparison."""
    comparisons: dict[str, list[str]] = field(default_factory=dict)
    """Further tables of some methods only, by name."""
    jobs: int = 1
    """Cells that run at once."""
    threads: int = 1
    """CPU threads of each of them."""
    devices: int = 0
    """GPUs of each of them."""

    def preparations(self) -> list[Preparation]:
        """``prepare`` with the seeds put in."""
        return [
            Preparation(*(word.replace("{seed}", str(seed)) for word in (entry.output, entry.command)))
            for entry in self.prepare
            for seed in (self.seeds if "{seed}" in entry.output else self.seeds[:1])
        ]


def read_sweep(path: str, jobs: int | None = None) -> Sweep:
    """The sweep that a YAML file describes.

    Args:
        path: the file.
        jobs: cells that run at once, instead of the file's number.

    Raises:
        UserError: the file cannot be read, or a key or a value in it is wrong.
    """
    return sweep_of(read_yaml(path), path, jobs)


def read_yaml(path: str) -> dict[str, Any]:
    """The keys and values of a sweep file, methods without settings as empty ones."""
    try:
        found = yaml.safe_load(Path(resolved(path)).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The sweep file {path} cannot be read ({error.strerror}); name another.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected keys and values, but got {found!r}.")
    if isinstance(found.get("methods"), dict):
        found["methods"] = {name: settings or {} for name, settings in found["methods"].items()}
    return found


def sweep_of(found: Any, path: str, jobs: int | None) -> Sweep:
    """The sweep that is written in a file; see ``read_sweep``."""
    sweep = parsed(Sweep, found, path)
    sweep.jobs = sweep.jobs if jobs is None else jobs
    _check_values(sweep, path)
    return sweep


def parsed(kind: type[T], found: Any, place: str) -> T:
    """An object of a dataclass from keys and values.

    Raises:
        UserError: a key is unknown, or a value has another type; ``place`` stands before it.
    """
    _check_keys(kind, found, place)
    if isinstance(methods := found.get("methods"), dict):
        for name, settings in methods.items():
            _check_keys(SweptMethod, settings, f"{place}, method {name}")
    parser = ToolParser(exit_on_error=False)
    parser.add_class_arguments(kind, "all")
    try:
        return parser.instantiate(parser.parse_object({"all": found}))["all"]
    except ArgumentError as error:
        raise UserError(f"{place}: {short_message(str(error)).removeprefix('all.')}") from None


def _check_keys(kind: type, found: Any, place: str) -> None:
    """jsonargparse overlooks keys that it does not know in an object."""
    names = [entry.name for entry in fields(kind)]
    if not isinstance(found, dict):
        raise UserError(f"{place}: expected keys and values, but got {found!r}.")
    for name in found:
        if name not in names:
            raise UserError(f"{place}: there is no key {name}; choose one of {', '.join(names)}.")


def _check_values(sweep: Sweep, path: str) -> None:
    for name in ("methods", "noise_rates", "seeds"):
        values = list(getattr(sweep, name))
        if not values or len(set(values)) < len(values):
            raise UserError(f"{path}: {name} is {values}, but it needs at least one, and none twice.")
    for rate in sweep.noise_rates:
        if not 0 <= rate < 1:
            raise UserError(f"{path}: the noise rate {rate} is not in [0, 1); use 0.2 for 20%.")
    for name, least in (("jobs", 1), ("threads", 1), ("devices", 0)):
        if getattr(sweep, name) < least:
            raise UserError(f"{path}: {name} is {getattr(sweep, name)}, but it must be at least {least}.")
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
