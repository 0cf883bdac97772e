"""Weight surface of a trained VNet over (Delta, u)."""

import copy
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from scipy.special import expit

from ..errors import UserError
from ..files import local_path, replacing
from ..rewards import Visits
from ..runs.folder import ANALYSIS

TAILS = (0.005, 0.995)
"""Quantiles of the visits that the grid covers."""


@dataclass
class Surface:
    """Slope a, offset b and weight over D reward sums and U reward margins, in float64."""

    step: int
    method: str
    task: str
    noise_rate: float
    """Noise rate; NaN if unknown."""
    delta: np.ndarray
    """(D,) rising."""
    u: np.ndarray
    """(U,) rising, symmetric around 0."""
    a: np.ndarray
    """(D, U)"""
    b: np.ndarray
    """(D, U)"""
    density: np.ndarray
    """(D, U) share of the visits per unit of Delta and u."""
    visits: Visits
    floor: float = 0.0
    """c, the smallest weight."""

    @property
    def g(self) -> np.ndarray:
        """(D, U) weight c + (1 - c) sigmoid(a u + b)."""
        return self.weight(self.a, self.b)

    def weight(self, a: float | np.ndarray, b: float | np.ndarray) -> np.ndarray:
        """Return the weight at the points of ``u`` for another slope and offset."""
        return self.floor + (1 - self.floor) * expit(a * self.u + b)


def grid(visits: Visits, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (points,) Delta and u over the visits' ``TAILS``; u is symmetric, empty ranges get ±1."""
    low, high = np.quantile(visits.delta.astype(np.float64), TAILS)
    side = np.abs(np.quantile(visits.u.astype(np.float64), TAILS)).max() or 1
    if low == high:
        low, high = low - 1, high + 1
    return np.linspace(low, high, points), np.linspace(-side, side, points)


def density(visits: Visits, delta: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return (D, U) share of N visits per unit of Delta and u around the points of a regular grid."""
    sides = [axis[1] - axis[0] for axis in (delta, u)]
    axes = zip((delta, u), sides, strict=True)
    edges = [np.append(axis - side / 2, axis[-1] + side / 2) for axis, side in axes]
    counts, _, _ = np.histogram2d(visits.delta, visits.u, bins=edges)
    return counts / (len(visits.u) * sides[0] * sides[1])


@torch.no_grad()
def slope_and_offset(
    vnet: torch.nn.Module, delta: np.ndarray, u: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (D, U) a and b of VNet over a grid, in float64 on the CPU."""
    points = torch.meshgrid(torch.from_numpy(delta), torch.from_numpy(u), indexing="ij")
    _, a, b = copy.deepcopy(vnet).cpu().double()(*(axis.double().flatten() for axis in points))
    shape = (len(delta), len(u))
    return a.numpy().reshape(shape), b.numpy().reshape(shape)


def file_of(run_folder: str | Path, step: int) -> Path:
    """Return the surface's path after so many policy updates."""
    return local_path(run_folder) / ANALYSIS / f"surfaces-step-{step:05d}.npz"


def steps_of(run_folder: str | Path) -> list[int]:
    """Return the policy updates with surfaces, rising."""
    files = (local_path(run_folder) / ANALYSIS).glob("surfaces-step-*.npz")
    steps = (file.stem.removeprefix("surfaces-step-") for file in files)
    return sorted(int(step) for step in steps if step.isdecimal())


def save_surface(surface: Surface, run_folder: str | Path) -> None:
    """Save a surface as .npz (fields by name, g, and the visits' columns as ``visits_...``) and as .csv.

    The table has one row per point of the grid: ``delta``, ``u``, ``a``, ``b``, ``g`` and ``density``.
    """
    arrays = {each.name: getattr(surface, each.name) for each in fields(surface)}
    visits = arrays.pop("visits")
    arrays |= {f"visits_{name}": values for name, values in vars(visits).items()}
    with replacing(file_of(run_folder, surface.step)) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, g=surface.g, **arrays)
    axes = np.meshgrid(surface.delta, surface.u, indexing="ij")
    table = np.stack((*axes, surface.a, surface.b, surface.g, surface.density), -1).reshape(-1, 6)
    with replacing(file_of(run_folder, surface.step).with_suffix(".csv")) as temporary:
        np.savetxt(temporary, table, "%.9g", ",", header="delta,u,a,b,g,density", comments="")


def load_surface(run_folder: str | Path, step: int | None = None) -> Surface:
    """Load a run's surface, by default the last; UserError if it has none."""
    steps = steps_of(run_folder)
    if not steps:
        raise UserError(f"There are no surfaces in {run_folder}/{ANALYSIS}; train a VNet with VNetSurfaces.")
    path = file_of(run_folder, steps[-1] if step is None else step)
    names = {each.name for each in fields(Surface)} - {"visits"}
    with np.load(path, allow_pickle=False) as arrays:
        visits = Visits(*(arrays[f"visits_{each.name}"] for each in fields(Visits)))
        values = {name: arrays[name] for name in names}
    # Scalars come back as 0-dim arrays.
    plain = {name: value.item() if value.ndim == 0 else value for name, value in values.items()}
    return Surface(**plain, visits=visits)
