"""An audit's figures, as PNG in base64 for its report."""

from __future__ import annotations

import base64
import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .findings import Findings
from .flip_curve import share_against
from .scorers import SCORES

RIGHT, WRONG, DARK = "#0072B2", "#D55E00", "0.25"
_LABELS = {
    "weight": "Weight",
    "cross_fit_u": "Cross-fitted implicit reward difference $u$ (nats)",
    "first_visit_u": "Implicit reward difference $u$ before the pair was learned from (nats)",
    "probe_u": "Log-odds of the label by a linear probe (nats)",
    "unpulled_u": "Implicit reward difference $u$, own pull taken off (nats)",
}


def distribution(findings: Findings) -> str:
    """The scores' histogram with the threshold; right and wrong labels apart where flips are known."""
    pairs, column = findings.pairs, SCORES[findings.scorer]
    score = pairs[column].to_numpy()
    figure, axis = _figure()
    edges = np.histogram_bin_edges(score, bins=min(60, max(10, len(score) // 20))).tolist()
    known = pairs["flipped"].notna().to_numpy()
    if known.any():
        flipped = pairs["flipped"].fillna(False).to_numpy(dtype=bool)
        for mask, color, name in (
            (known & ~flipped, RIGHT, "right labels"),
            (known & flipped, WRONG, "wrong labels"),
        ):
            label = f"{name} ({mask.sum():,})"
            axis.hist(score[mask], edges, color=color, alpha=0.35)
            axis.hist(score[mask], edges, color=color, histtype="step", linewidth=1.4, label=label)
    else:
        axis.hist(score, edges, color=RIGHT, alpha=0.6, label=f"all labels ({len(score):,})")
    if findings.cut is not None:
        axis.axvline(findings.cut, color=DARK, linestyle="--", linewidth=1.4, label="threshold")
    axis.set(xlabel=_LABELS[column], ylabel="Pairs", xlim=(edges[0], edges[-1]))
    axis.legend(frameon=False)
    return _encoded(figure)


def against(findings: Findings) -> str:
    """How often labels are against the policy as it gets surer, and the curve whose end is the share."""
    share = findings.share
    figure, axis = _figure()
    tenths = share.tenths
    size = np.linspace(0, tenths["size"].max() * 1.05, 200)
    fitted = share_against(share.rate, share.slope, size)
    axis.errorbar(
        tenths["size"],
        100 * tenths["against"],
        100 * tenths["stderr"].fillna(0),
        fmt="o",
        label="tenths of the pairs, ± 1 standard error",
        color=RIGHT,
        ecolor=RIGHT,
        elinewidth=1.2,
        capsize=2.5,
        markersize=5,
    )
    axis.plot(size, 100 * fitted, color=DARK, linewidth=1.4, label="fit")
    if share.identified:
        axis.axhline(100 * share.rate, color=WRONG, linestyle="--", linewidth=1.4, label="expected share")
        axis.axhspan(100 * share.low, 100 * share.high, color=WRONG, alpha=0.15, linewidth=0)
    axis.set(xlabel="$|u|$ (nats)", ylabel="Labelled against the policy (%)", xlim=(0, size[-1]))
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, loc="upper right")
    axis.grid(alpha=0.3)
    return _encoded(figure)


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.4, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _encoded(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return base64.b64encode(buffer.getvalue()).decode()
