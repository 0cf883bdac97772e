"""The weight that a trained VNet gives over a grid of Delta and u, or of two other features."""

from __future__ import annotations

import copy
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from scipy.special import expit

from ..errors import UserError
from ..files import replacing
from ..runs.folder import ANALYSIS
from ..weighting.features import PAPER
from ..weighting.vnet import VNet

TAILS = (0.005, 0.995)
"""Quantiles of the visits between which the grid lies."""
_COLUMNS = ("u", "delta", "weight", "flipped")
"""Of visits, as files have them."""


@dataclass
class Visits:
    """Pairs that were visited lately, each (N,)."""

    u: np.ndarray
    """Implicit reward difference before the update."""
    delta: np.ndarray
    """Implicit reward sum before the update."""
    weight: np.ndarray
    """Weight g, before any division by the mean."""
    flipped: np.ndarray
    """1 flipped, 0 not flipped, -1 unknown."""
    features: dict[str, np.ndarray] = field(default_factory=dict)
    """What a VNet of other features than (Delta, u) weighed them by; files do not keep it."""


@dataclass
class Surface:
    """Slope, offset and weight over D reward sums and U reward differences, in float64.

    Where ``axes`` names two other features, ``delta`` and ``u``, of the visits too, are their values; a is 0
    and b the logit of the weight.
    """

    step: int
    """Policy updates behind it."""
    method: str
    """Label of the run."""
    task: str
    """Label of the data; empty where unknown."""
    noise_rate: float
    """Share of labels that were flipped on purpose; NaN where unknown."""
    delta: np.ndarray
    """(D,) rising."""
    u: np.ndarray
    """(U,) rising, symmetric around 0: exchanging the two responses mirrors it and leaves Delta."""
    a: np.ndarray
    """(D, U)"""
    b: np.ndarray
    """(D, U)"""
    density: np.ndarray
    """(D, U) share of the visits per unit of Delta and u; its sum times a cell's area is the share inside."""
    visits: Visits
    """The pairs that the grid covers."""
    axes: tuple[str, str] = PAPER
    """What is along the first axis and along the second."""
    held: str = ""
    """What VNet's other features are held at, their medians over the visits; empty where it has none."""

    @property
    def g(self) -> np.ndarray:
        """(D, U) weight sigmoid(a u + b)."""
        return expit(self.a * self.u + self.b)

    @property
    def rises(self) -> np.ndarray:
        """(D, U) whether g is larger at the next greater u than at the next smaller one.

        Judged by a u + b, since g itself rounds to 0 or 1 far out.
        """
        h = np.pad(self.a * self.u + self.b, ((0, 0), (1, 1)), mode="edge")
        return h[:, 2:] > h[:, :-2]

    def monotone_share(self, with_data: bool = False) -> float:
        """Share of the grid on which g rises with u; ``with_data``: of its cells that hold a visit.

        NaN where no cell holds one.
        """
        rises = self.rises[self.density > 0] if with_data else self.rises
        return float(rises.mean()) if rises.size else float("nan")


def grid(visits: Visits, points: int, axes: Sequence[str] = PAPER) -> tuple[np.ndarray, np.ndarray]:
    """(points,) values of Delta and of u that cover the visits but for their outer half percents.

    Those of u are symmetric around 0. A range of no length, as before the first update, becomes 1 to either
    side.
    """
    found = []
    for name, values in zip(axes, (visits.delta, visits.u), strict=True):
        low, high = np.quantile(values.astype(np.float64), TAILS)
        if name == "u":
            high = max(abs(low), abs(high))
            low = -high
        if low == high:
            low, high = low - 1, high + 1
        found.append(np.linspace(low, high, points))
    return found[0], found[1]


def density(visits: Visits, delta: np.ndarray, u: np.ndarray) -> np.ndarray:
    """(D, U) share of N visits per unit of Delta and u in the cells around the points of a regular grid."""
    sides = [axis[1] - axis[0] for axis in (delta, u)]
    axes = zip((delta, u), sides, strict=True)
    edges = [np.append(axis - side / 2, axis[-1] + side / 2) for axis, side in axes]
    counts, _, _ = np.histogram2d(visits.delta, visits.u, bins=edges)
    return counts / (len(visits.u) * sides[0] * sides[1])


@torch.no_grad()
def slope_and_offset(
    vnet: VNet,
    delta: np.ndarray,
    u: np.ndarray,
    axes: Sequence[str] = PAPER,
    held: Mapping[str, float] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(D, U) a and b of VNet over a grid of (D,) reward sums and (U,) differences, in float64 on the CPU.

    Args:
        vnet: of any features.
        delta: values along the first axis.
        u: values along the second axis.
        axes: what they are values of. Where it is not Delta and u, a is 0 and b the logit of the weight.
        held: values of VNet's other features.
    """
    points = torch.meshgrid(torch.from_numpy(delta), torch.from_numpy(u), indexing="ij")
    values = {name: axis.double().flatten() for name, axis in zip(axes, points, strict=True)}
    values |= {name: torch.full_like(values[axes[0]], value) for name, value in (held or {}).items()}
    order = getattr(vnet, "features", PAPER)
    _, a, b = copy.deepcopy(vnet).cpu().double()(*(values[name] for name in order))
    if tuple(axes) != PAPER:
        b = a * values["u"] + b if "u" in values else b
        a = torch.zeros_like(b)
    shape = (len(delta), len(u))
    return a.numpy().reshape(shape), b.numpy().reshape(shape)


def file_of(run_folder: str | Path, step: int) -> Path:
    """Where a run keeps the surface after so many policy updates."""
    return Path(run_folder) / ANALYSIS / f"surfaces-step-{step:05d}.npz"


def steps_of(run_folder: str | Path) -> list[int]:
    """Policy updates of which a run has surfaces, rising."""
    files = (Path(run_folder) / ANALYSIS).glob("surfaces-step-*.npz")
    steps = (file.stem.removeprefix("surfaces-step-") for file in files)
    return sorted(int(step) for step in steps if step.isdecimal())


def save(surface: Surface, run_folder: str | Path) -> None:
    """Writes the surface as .npz: its fields by name, g, and the visits' columns as ``visits_...``."""
    arrays = {each.name: getattr(surface, each.name) for each in fields(surface)}
    visits = arrays.pop("visits")
    arrays |= {f"visits_{name}": getattr(visits, name) for name in _COLUMNS}
    with replacing(file_of(run_folder, surface.step)) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, g=surface.g, **arrays)


def load(run_folder: str | Path, step: int | None = None) -> Surface:
    """Reads a surface that a run has kept; of its last step by default.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    steps = steps_of(run_folder)
    if not steps:
        raise UserError(
            f"There are no surfaces in {Path(run_folder) / ANALYSIS}; train with the callback VNetSurfaces "
            "in trainer.callbacks and a weighting that has a and b, such as VNetWeighting."
        )
    if step is not None and step not in steps:
        raise UserError(
            f"The run {run_folder} has no surfaces of step {step}; choose one of "
            f"{', '.join(map(str, steps))}, or last."
        )
    path = file_of(run_folder, steps[-1] if step is None else step)
    names = {each.name for each in fields(Surface)} - {"visits"}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            visits = Visits(*(arrays[f"visits_{name}"] for name in _COLUMNS))
            found = {name: arrays[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile):
        raise UserError(f"{path} cannot be read as surfaces; train again, or name another step.") from None
    # Labels and numbers come back as arrays of no dimension.
    plain = {name: value.item() if value.ndim == 0 else value for name, value in found.items()}
    return Surface(**plain | {"axes": tuple(found["axes"].tolist())}, visits=visits)
