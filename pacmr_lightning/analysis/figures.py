"""Figures of a run: weights by label and as detectors of flips; a, b and g over (Delta, u), and g along u."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from mpl_toolkits.mplot3d import Axes3D
from scipy.ndimage import gaussian_filter

from ..modules.metrics import weight_gap
from ..rewards import Visits
from .surface import Surface

BINS = np.linspace(0, 1, 31).tolist()
GROUPS = {"unflipped": "#0072B2", "flipped": "#D55E00", "unknown": "0.5", "all": "#0072B2"}
"""Colour of each group of ``Visits.by_flip`` (Okabe and Ito)."""
SCORES = {"low_weight": "black", "low_u": "#0072B2"}
"""Colour of each score of flips."""
NAMES = {"a": "Slope $a(z)$", "b": "Offset $b(z)$", "g": "Weight $g(z)$"}
LABELS = ("Implicit reward sum $\\Delta(z)$", "Implicit reward margin $u(z)$")
COLORS = "viridis"
SHARES: dict[float, Literal["--", "-"]] = {0.9: "--", 0.5: "-"}
"""Shares of the pairs in the contours, and line styles."""
SMOOTHING = 0.05
"""Standard deviation of the contours' kernel, as a share of the grid's sides."""
OUTLINED = [withStroke(linewidth=2.8, foreground="0.15")]
"""Outline that makes white lines visible on any background."""


def draw_on(axis: Axes, visits: Visits) -> None:
    """Draw densities of the weights by label, with a dashed line at each mean."""
    groups = visits.by_flip(visits.weight)
    means, most = [], max(1.0, float(visits.weight.max()))
    for name, values in groups.items():
        color, mean = GROUPS[name], values.mean(dtype=float)
        label = f"{name} ({len(values):,}), mean {mean:.2f}"
        axis.hist(values, [most * edge for edge in BINS], density=True, color=color, alpha=0.5, label=label)
        means.append((mean, color))
    top = axis.get_ylim()[1]
    for mean, color in means:
        axis.vlines(mean, 0, top, color=color, linestyle="--", linewidth=1.4)
    axis.set(xlabel="Weight $g$", ylabel="Density", xlim=(0, most))
    axis.set_ylim(0, (1.25 + 0.13 * len(groups)) * top)  # room for the legend
    gap = weight_gap(torch.tensor(visits.weight), torch.tensor(visits.flipped))["gap"]
    title = None if gap is None else f"gap {gap:.2f}"
    fonts = {"fontsize": 9, "title_fontsize": 9}
    axis.legend(title=title, frameon=False, loc="upper left", borderaxespad=0.2, alignment="left", **fonts)


def draw_weight_distributions(visits: Visits, step: int) -> Figure:
    """Draw the figure of the weights of pairs visited up to policy update ``step``."""
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axis = figure.add_subplot()
    draw_on(axis, visits)
    axis.set_title(f"Last {len(visits.weight):,} pairs to step {step:,}", fontsize=10)
    return figure


def draw_precision_recall(labels: np.ndarray, scores: dict[str, np.ndarray]) -> Figure:
    """Draw precision over recall of (N,) ``scores`` of the N ``labels``, of which some are true."""
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axis = figure.add_subplot(xlim=(0, 1), ylim=(0, 1.05), xlabel="Recall of flips", ylabel="Precision")
    for name, values in scores.items():
        hits = np.cumsum(labels[np.argsort(-values, kind="stable")])
        precision = hits / np.arange(1, len(hits) + 1)
        axis.plot(hits / hits[-1], precision, color=SCORES[name], label=name.replace("_", " "))
    axis.legend(frameon=False, fontsize=9)
    return figure


def draw_surfaces(surface: Surface) -> Figure:
    """Draw a, b and g in 3-D."""
    figure = Figure(figsize=(10.2, 3.6))
    for place, name in enumerate(NAMES):
        axis = figure.add_subplot(1, len(NAMES), place + 1, projection="3d")
        _surface_on(axis, surface, name, limits([surface], name))
        axis.set_title(NAMES[name], fontsize=11, y=1.0)
    figure.suptitle(_title(surface), fontsize=10, y=0.99)
    figure.subplots_adjust(left=0.045, right=0.985, bottom=0.05, top=0.88, wspace=0.16)
    return figure


def draw_heat_maps(surface: Surface) -> Figure:
    """Draw heat maps of a, b and g with visit density contours and an orange line where g is 1/2."""
    # Constrained layout would draw everything twice more.
    figure = Figure(figsize=(4.2, 8.4))  # a column, as loggers show images in narrow cards
    figure.subplots_adjust(left=0.18, right=0.93, bottom=0.12, top=0.92, hspace=0.22)
    panels = figure.subplots(len(NAMES), 1, sharex=True)
    density, levels = contours(surface)
    for axis, name in zip(panels, NAMES, strict=True):
        low, high = limits([surface], name)
        values, scale = getattr(surface, name).T, {"vmin": low, "vmax": high}
        image = axis.pcolormesh(surface.delta, surface.u, values, cmap=COLORS, rasterized=True, **scale)
        figure.colorbar(image, ax=axis, pad=0.03)
        for level, style in zip(levels, SHARES.values(), strict=True):
            if level < density.max():  # else one cell holds them all
                lines = axis.contour(surface.delta, surface.u, density.T, [level], colors="white")
                lines.set(linewidths=1.4, linestyles=style, path_effects=OUTLINED)
        if name == "g" and surface.g.min() < 0.5 < surface.g.max():
            axis.contour(surface.delta, surface.u, values, [0.5], colors="#D55E00", linewidths=1.6)
        axis.set_title(NAMES[name], fontsize=11)
        axis.set_ylabel(LABELS[1])
    panels[-1].set_xlabel(LABELS[0])
    handles = [Line2D([], [], color="#D55E00", linewidth=1.6, label="$g = 1/2$")]
    for share, dashes in SHARES.items():
        label = f"{share:.0%} of the pairs"
        line = Line2D([], [], color="white", linestyle=dashes, path_effects=OUTLINED, label=label)
        handles.insert(0, line)
    figure.legend(handles=handles, loc="lower center", ncols=2, frameon=False)
    figure.suptitle(_title(surface), fontsize=10)
    return figure


def draw_page(surfaces: Sequence[Surface], headings: Sequence[str]) -> Figure:
    """Draw runs in columns; a, b, g and weight distributions in rows, each row on one scale."""
    columns = len(surfaces)
    width = 0.7 + 3.4 * columns
    heights = (*(1 for _ in NAMES), 0.75)
    figure = Figure(figsize=(width, 3.04 * sum(heights)))
    rows = figure.add_gridspec(len(heights), 1, height_ratios=heights, hspace=0.17)
    rows.update(left=0.7 / width, right=1 - 0.2 / width, top=0.955, bottom=0.05)
    for row, name in enumerate(NAMES):
        scale = limits(surfaces, name)
        cells = rows[row].subgridspec(1, columns, wspace=0.1)
        for place, (surface, heading) in enumerate(zip(surfaces, headings, strict=True)):
            axis = figure.add_subplot(cells[place], projection="3d")
            _surface_on(axis, surface, name, scale)
            axis.set_title(f"{NAMES[name]}, {heading}", fontsize=10, y=1.0)
    cells = rows[len(NAMES)].subgridspec(1, columns, wspace=0.25)
    for place, (surface, heading) in enumerate(zip(surfaces, headings, strict=True)):
        axis = figure.add_subplot(cells[place])
        draw_on(axis, surface.visits)
        axis.set_title(f"Weights, {heading}", fontsize=10)
        if place:
            axis.set_ylabel("")
    titles = list(dict.fromkeys(_title(surface, with_noise=False) for surface in surfaces))
    figure.suptitle("; ".join(titles), fontsize=10, y=0.99)
    return figure


def draw_weight_function(surface: Surface, start: tuple[float, float]) -> Figure:
    """Draw g along u at the median of Delta, its range between Delta's 10% and 90% quantiles, and the visits.

    ``start`` is the slope and offset before VNet learned, drawn as a dashed line.
    """
    visits, g, u = surface.visits, surface.g, surface.u
    quantiles = np.quantile(visits.delta.astype(np.float64), (0.1, 0.5, 0.9))
    low, middle, high = np.clip(np.searchsorted(surface.delta, quantiles), 0, len(g) - 1)
    figure = Figure(figsize=(4.8, 3.6))
    figure.subplots_adjust(left=0.12, right=0.97, bottom=0.15, top=0.9)
    axis = figure.add_subplot(xlim=(u[0], u[-1]), ylim=(0, 1), xlabel=LABELS[1], ylabel="Weight $g$")
    edges = np.linspace(u[0], u[-1], 41)
    groups = visits.by_flip(visits.u)
    counts = {name: np.histogram(values, edges)[0] for name, values in groups.items()}
    tallest = max(1, *(int(count.max()) for count in counts.values()))
    for name, count in counts.items():
        axis.stairs(
            0.25 * count / tallest, edges, fill=True, color=GROUPS[name], alpha=0.5, label=f"u, {name}"
        )
    between = g[low : high + 1]
    axis.fill_between(u, between.min(0), between.max(0), color="0.2", alpha=0.25, label="10 to 90% of Δ")
    axis.plot(u, g[middle], color="black", linewidth=2, label=f"g at the median Δ = {quantiles[1]:.2g}")
    axis.plot(u, surface.weight(*start), color="0.5", linestyle="--", label="g at the start")
    axis.legend(frameon=False, fontsize=8, loc="upper left", borderaxespad=0.2)
    axis.set_title(_title(surface), fontsize=10)
    return figure


def limits(surfaces: Sequence[Surface], name: str) -> tuple[float, float]:
    """Return the value range: [0, 1] for g; for a and b at least 0.1 wide."""
    if name == "g":
        return 0.0, 1.0
    values = np.concatenate([getattr(surface, name).ravel() for surface in surfaces])
    low, high = float(values.min()), float(values.max())
    middle, side = (low + high) / 2, max((high - low) / 2, 0.05)
    return middle - side, middle + side


def _surface_on(axis: Axes3D, surface: Surface, name: str, scale: tuple[float, float]) -> None:
    low, high = scale
    delta, u = np.meshgrid(surface.delta, surface.u, indexing="ij")
    style = {"cmap": COLORS, "vmin": low, "vmax": high, "linewidth": 0, "antialiased": False}
    axis.plot_surface(delta, u, getattr(surface, name), rcount=61, ccount=61, rasterized=True, **style)
    axis.set(xlabel="$\\Delta$", ylabel="$u$", zlabel=f"${name}$", zlim=scale)
    axis.set_xlim(surface.delta[0], surface.delta[-1])
    axis.set_ylim(surface.u[0], surface.u[-1])
    axis.view_init(elev=24, azim=-128)
    axis.tick_params(labelsize=8, pad=0)
    for each in (axis.xaxis, axis.yaxis, axis.zaxis):
        each.labelpad = -2
        each.set_rotate_label(False)
    axis.set(xticks=_inner_ticks(surface.delta), yticks=_inner_ticks(surface.u))
    axis.zaxis.set_major_locator(MaxNLocator(5))


def _inner_ticks(values: np.ndarray) -> np.ndarray:
    """Return ticks away from the ends of rising values, where the labels of two axes would meet."""
    low, high = values[0], values[-1]
    ticks, margin = MaxNLocator(4).tick_values(low, high), (high - low) / 8
    return ticks[(ticks >= low + margin) & (ticks <= high - margin)]


def contours(surface: Surface) -> tuple[np.ndarray, list[float]]:
    """Return the (D, U) smoothed density, and its levels of ``SHARES``."""
    widths = [SMOOTHING * length for length in surface.density.shape]
    smooth = gaussian_filter(surface.density, widths, mode="constant")
    heights = np.sort(smooth, axis=None)[::-1]
    covered = np.cumsum(heights) / heights.sum()
    return smooth, [float(heights[np.searchsorted(covered, share)]) for share in SHARES]


def _title(surface: Surface, with_noise: bool = True) -> str:
    known = with_noise and not np.isnan(surface.noise_rate)
    noise = f"{100 * surface.noise_rate:.3g}% noise" if known else ""
    parts = (surface.task, surface.method, noise, f"step {surface.step:,}")
    return ", ".join(filter(None, parts))
