"""Pictures of weights for loggers: one panel each, readable at 400 pixels, on axes that stay over a run."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from contourpy import contour_generator
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from .distribution_figure import GROUPS, weights_by_flip
from .surface import Surface
from .surface_figure import COLORS, NAMES, OUTLINED, SHARES, axis_label, contours

Range = tuple[float, float]
SIZE, DPI = (4.0, 3.0), 100
"""Inches, and pixels per inch. TensorBoard scales pictures to a height; wider ones leave a narrow window."""
LEFT = 0.17
"""Left end of the axes, as a share of the width."""
BINS = 20
TOP = 0.5
"""Largest share of the pairs in a bin of the distributions' axis; higher bins are cut off."""
HEADROOM = 8
"""Ratio of an axis' length to the values at the first picture, which are small early in a run."""
HALF = "#D55E00"
LINES = {"low_weight": "black", "low_u": "#0072B2"}
"""Colour of each score of flips."""


def widened(known: Range | None, values: np.ndarray, center: float = 0.0, least: float = 0.0) -> Range:
    """Return an axis' range: a power of two around ``center``, doubled where 1% of (N,) values leave it.

    It starts (``known`` is None) at ``HEADROOM`` times the values, and at ``least``, and never shrinks.
    """
    reach = float(np.quantile(np.abs(values.astype(np.float64) - center), 0.99)) if len(values) else 0.0
    if known is None:
        wanted = max(HEADROOM * reach, least) or 1.0
        half = 2.0 ** math.ceil(math.log2(wanted))
    else:
        center, half = (known[0] + known[1]) / 2, (known[1] - known[0]) / 2
        while half < reach:
            half *= 2
    return center - half, center + half


class Frame:
    """Axes, labels and legend of a picture, drawn once: that takes longer than the values.

    ``right`` is where the axes end, as a share of the width, ``bottom`` where they begin, ``legend`` its
    handles, and ``line`` a line that all pictures have.
    """

    def __init__(
        self,
        title: str,
        labels: tuple[str, str],
        x: Range,
        y: Range,
        legend: Sequence[Artist] = (),
        line: Line2D | None = None,
        right: float = 0.96,
        bottom: float = 0.18,
    ):
        figure = Figure(figsize=SIZE, dpi=DPI)
        self.canvas = FigureCanvasAgg(figure)
        self.axis = figure.add_axes((LEFT, bottom, right - LEFT, 0.88 - bottom))
        self.axis.set(xlim=x, ylim=y, xlabel=labels[0], ylabel=labels[1])
        self.axis.set_title(title, fontsize=12)
        for each in (self.axis.xaxis, self.axis.yaxis):
            each.label.set_fontsize(11)
            each.set_major_locator(MaxNLocator(5))
        if legend:
            style: dict[str, Any] = {"frameon": False, "fontsize": 9, "borderaxespad": 0.2}
            self.axis.legend(handles=legend, loc="upper left", ncols=1 + (not title), **style)
        if line:
            self.axis.add_line(line)
        self.canvas.draw()
        self.empty = np.asarray(self.canvas.buffer_rgba())[..., :3].copy()

    def picture(self, artists: Sequence[Artist], under: np.ndarray | None = None) -> np.ndarray:
        """Return the frame, or the image ``under``, with its values as a (height, width, 3) uint8 image."""
        pixels = np.asarray(self.canvas.buffer_rgba())[..., :3]
        pixels[:] = self.empty if under is None else under
        for artist in artists:
            self.axis.add_artist(artist)
            self.axis.draw_artist(artist)
            artist.remove()
        return pixels.copy()


def draw_map(surface: Surface, name: str, scale: Range) -> np.ndarray:
    """Draw a, b or g (``name``) over the surface's grid as an image, with contours of the visits."""
    x, y = ((axis[0], axis[-1]) for axis in (surface.delta, surface.u))
    frame, values = _map_frame(surface.axes, x, y), getattr(surface, name).T
    left, bottom, right, top = map(round, frame.axis.bbox.extents)
    under = np.full_like(frame.empty, 255)
    inside = under[len(under) - top : len(under) - bottom, left:right]
    inside[:] = _colored(values[::-1], scale, *inside.shape[:2])
    for dark_on_white in (frame.empty, _color_bar(name, scale)):
        np.minimum(under, dark_on_white, out=under)
    smooth, levels = contours(surface)
    visits: Any = contour_generator(surface.delta, surface.u, smooth.T)
    artists: list[Artist] = []
    for level, dashes in zip(levels, SHARES.values(), strict=True):
        if level < smooth.max():  # else one cell holds them all
            style: dict[str, Any] = {"linestyles": dashes, "path_effects": OUTLINED}
            artists.append(LineCollection(visits.lines(level), colors="white", linewidths=1.4, **style))
    if name == "g":
        line: Any = contour_generator(surface.delta, surface.u, values)
        artists.append(LineCollection(line.lines(0.5), colors=HALF, linewidths=1.8))
    return frame.picture(artists, under)


def _colored(values: np.ndarray, scale: Range, height: int, width: int) -> np.ndarray:
    """Return (R, C) values as a (height, width, 3) uint8 image, each as a rectangle."""
    places = np.clip(256 * (values - scale[0]) / (scale[1] - scale[0]), 0, 255).astype(np.uint8)
    rows, columns = (np.arange(n) * k // n for n, k in zip((height, width), values.shape, strict=True))
    return colormaps[COLORS](np.arange(256), bytes=True)[places, :3][rows][:, columns]


@lru_cache
def _map_frame(axes: tuple[str, str], x: Range, y: Range) -> Frame:
    return Frame(
        "", (_plain(axis_label(axes[0])), _plain(axis_label(axes[1]))), x, y, right=0.83, bottom=0.26
    )


@lru_cache
def _color_bar(name: str, scale: Range) -> np.ndarray:
    """Return title, colour bar and note of a map, apart from its axes, whose ranges change more often."""
    figure = Figure(figsize=SIZE, dpi=DPI)
    canvas = FigureCanvasAgg(figure)
    bar = figure.add_axes((0.85, 0.26, 0.03, 0.62), xticks=(), ylim=scale)
    bar.imshow(np.linspace(1, 0, 256)[:, None], COLORS, extent=(0, 1, *scale), aspect="auto")
    bar.yaxis.tick_right()
    bar.yaxis.set_major_locator(MaxNLocator(5))
    figure.text(0.5, 0.9, _plain(NAMES[name]), ha="center", fontsize=12)
    note = "white: 90% (dashed) and 50% of the pairs" + ("; orange: g = 1/2" if name == "g" else "")
    figure.text(0.5, 0.02, note, ha="center", fontsize=9)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _plain(label: str) -> str:
    """Return a label without formulas, which take most of a frame's time."""
    return label.replace("$", "").replace("\\Delta", "Δ")


def draw_weight_function(surface: Surface, start: tuple[float, float] | None) -> np.ndarray:
    """Draw g along u at the median of Delta, its range between Delta's 10% and 90% quantiles, and the visits.

    ``start`` is the slope and offset before VNet learned, drawn as a dashed line; None for no line.
    """
    visits, g, u = surface.visits, surface.g, surface.u
    frame = _function_frame(surface.axes, (u[0], u[-1]), start)
    low, middle, high = np.quantile(visits.delta.astype(np.float64), (0.1, 0.5, 0.9))
    near = np.clip(np.searchsorted(surface.delta, (low, middle, high)), 0, len(g) - 1)
    band = g[near[0] : near[2] + 1]
    artists: list[Artist] = []
    edges = np.linspace(u[0], u[-1], 2 * BINS + 1)
    groups = weights_by_flip(visits.u, visits.flipped)
    counts = {name: np.histogram(values, edges)[0] for name, values in groups.items()}
    tallest = max(1, *(int(count.max()) for count in counts.values()))
    artists += [_steps(edges, 0.25 * count / tallest, name) for name, count in counts.items()]
    outline = np.concatenate([np.c_[u, band.min(0)], np.c_[u, band.max(0)][::-1]])
    artists.append(PolyCollection([outline], facecolors="0.2", alpha=0.25))
    artists.append(Line2D(u, g[near[1]], color="black", linewidth=2))
    words = f"median {_plain(axis_label(surface.axes[0], short=True))} = {middle:.2g}"
    artists.append(Text(u[-1], 0.3, f"{words} ", ha="right", fontsize=9))
    return frame.picture(artists)


@lru_cache
def _function_frame(axes: tuple[str, str], x: Range, start: tuple[float, float] | None) -> Frame:
    first, second = (_plain(axis_label(name, short=True)) for name in axes)
    legend: list[Artist] = [
        Line2D([], [], color="black", linewidth=2, label=f"g at the median {first}"),
        Patch(color="0.2", alpha=0.25, label=f"10 to 90% of {first}"),
        *(
            Patch(color=GROUPS[name][1], alpha=0.5, label=f"{second}, {name}")
            for name in ("unflipped", "flipped")
        ),
    ]
    line = None
    if start:
        legend.append(Line2D([], [], color="0.5", linestyle="--", label="g at the start"))
        u = np.linspace(*x, 101)
        line = Line2D(u, 1 / (1 + np.exp(-start[0] * u - start[1])), color="0.5", linestyle="--")
    labels = (_plain(axis_label(axes[1])), "Weight g")
    return Frame("Weight function", labels, x, (0, 1), legend=legend, line=line)


def draw_distribution(weight: np.ndarray, flipped: np.ndarray) -> np.ndarray:
    """Draw the distributions of (N,) weights by label (1 flipped, 0 not, -1 unknown), and their means."""
    groups = weights_by_flip(weight, flipped)
    frame = _distribution_frame(tuple(groups))
    edges = np.linspace(0, 1, BINS + 1)
    means = {name: float(values.mean(dtype=float)) for name, values in groups.items()}
    artists: list[Artist] = [
        _steps(edges, np.histogram(values, edges)[0] / len(values), name) for name, values in groups.items()
    ]
    for name, mean in means.items():
        line = [mean, mean], [0, 0.85 * TOP]
        artists.append(Line2D(*line, color=_color(name), linestyle="--", linewidth=1.6))
    words = [f"{name} {mean:.2f}" for name, mean in means.items()]
    if {"unflipped", "flipped"} <= means.keys():
        words.append(f"gap {means['unflipped'] - means['flipped']:.2f}")
    text = f"Mean weight: {', '.join(words)}"
    artists.append(Text(0.5, 1.03 * TOP, text, ha="center", fontsize=9, clip_on=False))
    return frame.picture(artists)


@lru_cache
def _distribution_frame(names: tuple[str, ...]) -> Frame:
    legend = [Patch(color=_color(name), alpha=0.5, label=name) for name in names]
    labels = ("Weight g", f"Share of pairs, to {TOP:.0%}")
    return Frame("", labels, (0, 1), (0, TOP), legend=legend)


def draw_precision_recall(labels: np.ndarray, scores: dict[str, np.ndarray]) -> np.ndarray:
    """Draw precision over recall of (N,) ``scores`` of the N ``labels``, of which some are true."""
    frame = _recall_frame(tuple(scores))
    lines = []
    for name, values in scores.items():
        order = np.argsort(-values, kind="stable")
        found = np.cumsum(labels[order])
        recall, precision = found / found[-1], found / np.arange(1, len(found) + 1)
        lines.append(Line2D(recall, precision, color=LINES[name], linewidth=1.8))
    return frame.picture(lines)


def draw_reward_path(path: Sequence[tuple[float, float]]) -> np.ndarray:
    """Draw gold reward over KL of some updates, in their order, with a ring around the last one."""
    kl, reward = np.array(path).T
    margin = 0.1 * max(float(np.ptp(reward)), 0.1)
    x, y = (0.0, 1.1 * max(float(kl.max()), 1e-6)), (float(reward.min()), float(reward.max()))
    labels = ("KL to the reference (nats)", "Gold reward")
    frame = Frame("Updates of this run; ring: the last", labels, x, (y[0] - margin, y[1] + margin))
    ring: dict[str, Any] = {
        "marker": "o",
        "markersize": 11,
        "markerfacecolor": "none",
        "color": HALF,
        "linewidth": 0,
    }
    looks = Line2D(kl, reward, marker="o", color="#0072B2")
    return frame.picture([looks, Line2D(kl[-1:], reward[-1:], **ring)])


@lru_cache
def _recall_frame(names: tuple[str, ...]) -> Frame:
    legend = [
        Line2D([], [], color=LINES[name], linewidth=1.8, label=name.replace("_", " ")) for name in names
    ]
    return Frame("", ("Recall of flipped labels", "Precision"), (0, 1), (0, 1.05), legend=legend)


def _color(name: str) -> str:
    return GROUPS.get(name, GROUPS["unflipped"])[1]


def _steps(edges: np.ndarray, heights: np.ndarray, name: str) -> PolyCollection:
    """Return the filled outline of bars of (B,) heights between (B + 1,) edges."""
    x, y = np.repeat(edges, 2), np.concatenate([[0.0], np.repeat(heights, 2), [0.0]])
    return PolyCollection([np.c_[x, y]], facecolors=_color(name), alpha=0.5)
