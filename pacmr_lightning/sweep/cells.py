"""Cells of a sweep: each is one ``pacmr fit`` in its own folder."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError
from ..runs.folder import CONFIG, GENERATIONS
from ..runs.shipped_configs import did_you_mean, resolved
from .spec import Sweep, SweptMethod, command_words, filled


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    method: str
    noise: float
    seed: int
    variation: dict[str, Any]
    """Values of the method's varied options."""
    folder: Path
    """``<method>-noise<percent>[-<option><value>]-seed<k>`` in the sweep's folder."""
    configs: list[str]
    options: list[str]
    after: Path | None
    """Folder of the cell to run first."""
    first: list[str]
    """Arguments of a ``pacmr`` command to run first, if any."""
    predict: list[str]
    """Options of ``pacmr predict`` for the cell's responses, if the sweep evaluates them."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name

    @property
    def variant(self) -> str:
        """Key of the method with its varied values, which cells of all noise rates and seeds share."""
        return json.dumps([self.method, self.variation])

    @property
    def arguments(self) -> list[str]:
        """Arguments of ``pacmr``."""
        configs = [word for path in self.configs for word in ("--config", path)]
        return ["fit", *configs, *self.options, "--trainer.default_root_dir", str(self.folder)]

    @property
    def responses(self) -> Path:
        """File of the cell's responses."""
        return self.folder / GENERATIONS

    @property
    def prediction(self) -> list[str]:
        """Arguments of ``pacmr`` for the responses."""
        return ["predict", "--config", str(self.folder / CONFIG), "--ckpt_path", "last", *self.predict]

    def __str__(self) -> str:
        varied = "".join(f", {option} = {value}" for option, value in self.variation.items())
        return f"({self.method}, noise rate {self.noise}{varied}, seed {self.seed})"


def cells(sweep: Sweep) -> list[Cell]:
    """Return all cells, seed by seed, so that a stopped sweep has whole seeds.

    Raises UserError if two cells are the same run, share a folder, or write two audits to one.
    """
    grid = [
        _cell(sweep, name, method, noise, seed, dict(zip(method.vary, values, strict=True)))
        for seed, noise in product(sweep.seeds, sweep.noise_rates)
        for name, method in sweep.methods.items()
        for values in product(*method.vary.values())
    ]
    taken: dict[str | Path, Cell] = {}
    for cell in grid:
        if (same := taken.setdefault(json.dumps([cell.configs, cell.options]), cell)) is not cell:
            raise UserError(
                f"The cells {same.name} and {cell.name} would be the same run; say in options what a seed "
                'and a noise rate change, such as data.noise_rate: "{noise}".'
            )
        if (other := taken.setdefault(cell.folder, cell)) is not cell:
            raise UserError(
                f"The cell {other} and the cell {cell} would share the folder {cell.folder}, which has _ for "
                "signs such as /; change more than signs in one of them."
            )
        if cell.first[:1] == ["audit"]:
            words = dict(pairwise(part for word in cell.first for part in re.split("(?<=--output)=", word)))
            place = Path(words.get("--output", f"{cell.after or words.get('audit')}/audit"))
            if (other := taken.setdefault(place, cell)).first != cell.first:
                raise UserError(
                    f"The cells {other.name} and {cell.name} would write different audits to {place}; add "
                    "--output {folder}/audit to first, and name {folder}/audit/pairs.parquet in options."
                )
    return grid


def _cell(
    sweep: Sweep, name: str, method: SweptMethod, noise: float, seed: int, variation: dict[str, Any]
) -> Cell:
    after = _folder(sweep, method.after, noise, seed, {}) if method.after else None
    folder = _folder(sweep, name, noise, seed, variation)

    known = {"seed": seed, "noise": f"{noise:.15g}", "folder": folder} | ({"after": after} if after else {})

    def text(value: Any, option: str) -> str:
        value = filled(value, known, f"{option} of the method {name}")
        return value if isinstance(value, str) else json.dumps(value)

    def words(options: list[tuple[str, Any]]) -> list[str]:
        return [word for option, value in options for word in (f"--{option}", text(value, option))]

    # The last of several values wins.
    given = [("model.method", name), *sweep.options.items(), *method.options.items(), *variation.items()]
    output = ("generation.output", str(folder / GENERATIONS))
    answers = [*sweep.evaluate.predict.items(), output] if sweep.evaluate else []
    config = method.config or name
    file = config if config.endswith((".yaml", ".yml")) else f"configs/methods/{config}.yaml"
    configs, options = [resolved(path) for path in (*sweep.base, file)], words(given)
    first = [text(word, "first") for word in command_words(method.first or "")]
    return Cell(name, noise, seed, variation, folder, configs, options, after, first, words(answers))


def _folder(sweep: Sweep, name: str, noise: float, seed: int, variation: dict[str, Any]) -> Path:
    words = [name, f"noise{100 * noise:g}", *(f"{short_name(o)}{v}" for o, v in variation.items())]
    return Path(sweep.output) / re.sub(r"[^\w.+-]+", "_", "-".join([*words, f"seed{seed}"]))


def anchor_cells(sweep: Sweep, found: Sequence[Cell]) -> dict[str, Cell]:
    """Return by a cell's name the anchor's cell of its noise rate, seed and values of the anchor's ``vary``.

    The anchor's own cells are left out, and cells that have no such cell.
    """
    if sweep.anchor is None:
        return {}
    shared = sweep.methods[sweep.anchor].vary

    def key(cell: Cell) -> str:
        return json.dumps([cell.noise, cell.seed, [cell.variation.get(option) for option in shared]])

    anchors = {key(cell): cell for cell in found if cell.method == sweep.anchor}
    others = [cell for cell in found if cell.method != sweep.anchor]
    return {cell.name: anchors[key(cell)] for cell in others if key(cell) in anchors}


def short_name(option: str) -> str:
    """Return the last part, such as ``tau`` of ``model.weighting.outer.tau``."""
    return option.rpartition(".")[2]


def config_contents(cell: Cell) -> dict[str, Any]:
    """Return the contents of the cell's config files by path."""
    contents = {}
    for path in cell.configs:
        try:
            contents[path] = _yaml(Path(path).resolve(), Path(path).stat().st_mtime_ns)
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            raise UserError(
                f"The config {path} of the method {cell.method} cannot be read ({reason}); correct its name "
                f"in the sweep file{did_you_mean(path)}."
            ) from None
    return contents


@lru_cache
def _yaml(path: Path, changed: int) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))
