"""How figures look: one style, colours that everybody can tell apart, axes with units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Okabe and Ito's colours; a marker beside each, for print without colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "h")
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "svg.hashsalt": "gradveil",  # the same results give the same file
    "legend.frameon": False,
}


@contextmanager
def panels(
    path: Path, count: int, *, width: float = 3.2, height: float = 2.7, most: int = 3
) -> Iterator[Sequence[Any]]:
    """Axes side by side in one figure, written to ``path`` at the end; the lines of the first are named beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        columns = min(most, count)
        lines = -(-count // columns)
        figure, axes = plt.subplots(
            lines, columns, figsize=(0.6 + width * columns, 0.7 + height * lines), squeeze=False, layout="constrained"
        )
        for ax in list(axes.flat)[count:]:
            ax.set_visible(False)
        yield list(axes.flat)[:count]
        handles, labels = axes.flat[0].get_legend_handles_labels()
        if handles:
            figure.set_figwidth(figure.get_figwidth() + 0.6 + 0.065 * max(map(len, labels)))
            figure.legend(handles, labels, loc="outside right upper", fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def line(ax: Any, place: int, x: Sequence[float], y: Sequence[float], label: str, **style: Any) -> None:
    """The place-th line of a figure: its own colour and marker; dashed where a colour comes again."""
    look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
    look["linestyle"] = "-" if place < len(COLOURS) else "--"
    ax.plot(x, y, label=label, **({"markersize": 4.5, "linewidth": 1.3} | look | style))


def enlarge(ax: Any, points: Sequence[tuple[float, float]], *, height: float = 0.04) -> None:
    """Only those near the highest are in sight: at most ``height`` below it."""
    top = max(y for _, y in points)
    near = [(x, y) for x, y in points if y >= top - height]
    ax.set_ylim(*_widened([y for _, y in near]))
    if ax.get_xscale() != "log":  # of which all stays in sight
        ax.set_xlim(*_widened([x for x, _ in near]))


def _widened(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.1 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin
