"""The pictures behind ``--plot``. Colours of Okabe and Ito, which the colour-blind can tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradveil.accounting import BudgetView, Calibrated, Curve
from gradveil.accounting._rounding import at_most
from gradveil.errors import ConfigError

_FORMATS = (".png", ".pdf", ".svg")
_BLACK, _GREY = "#000000", "#777777"
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_PAPER = {"BaseC": "#E69F00", "AdvC": "#009E73", "OptC": "#CC79A7", "zCDP": "#777777", "MA": "#D55E00"}
_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v")


def check_file(path: Path) -> Path:
    """``path`` if a picture can be written there; otherwise refused, before anything is computed."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot {path}: a picture ends in {', '.join(_FORMATS)}. Give such a name.")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: the directory {path.parent} does not exist. Make it first.")
    return path


def _figure(columns: int) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.6,
            "legend.frameon": False,
        }
    )
    return plt.subplots(1, columns, figsize=(5.2 * columns + 1.4, 4.6), layout="constrained")


def _plain_ticks(axis: Any) -> None:
    """0.06, 0.1, 1, 10 instead of powers of ten."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(minor_thresholds=(1.5, 0.6)))


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names at the right end of their curves, moved apart where they would overlap."""
    import math

    low, high = axes.get_ylim()
    span, last = math.log(high / low), -math.inf
    for _, y, text, colour in sorted(ends, key=lambda end: end[1]):
        place = max(math.log(y / low) / span, last + 0.05)
        last = place
        axes.annotate(
            text, (1.0, place), xycoords="axes fraction", xytext=(5, 0), textcoords="offset points",
            color=colour, va="center", fontsize=9,
        )  # fmt: skip


def epsilon_by_step(path: Path, *, proved: Sequence[Curve], paper: dict[str, Any], delta: float, title: str) -> None:
    """epsilon after each step: proved in thick lines, as published in thin ones."""
    import numpy as np

    figure, axes = _figure(1)
    ends = []
    for i, curve in enumerate(c for c in proved if c.reason is None and c.steps.size):
        colour = _BLACK if curve.neighbours == "add-remove" else _COLOURS[0]
        name = f"proved, {curve.neighbours}, {curve.accountant}"
        shown = curve.epsilon > 0
        if not shown.any():
            continue
        solid = curve.accountant == "PLD"
        look = {"linestyle": "-", "linewidth": 2.4} if solid else {"linestyle": (0, (4, 1.5)), "linewidth": 1.8}
        axes.plot(curve.steps[shown], curve.epsilon[shown], color=colour, zorder=5 + i, **look)
        ends.append(
            (
                curve.steps[-1],
                float(curve.epsilon[-1]),
                f"{name}  {at_most(float(curve.epsilon[-1]), digits=3)}",
                colour,
            )
        )
    for i, (method, values) in enumerate(paper.items()):
        shown = np.isfinite(values) & (values > 0)
        if not shown.any():
            continue
        steps = np.arange(1, values.size + 1)
        colour = _PAPER.get(method, _GREY)
        axes.plot(steps[shown], values[shown], color=colour, linestyle=_STYLES[i % 5], linewidth=1.3)
        if shown[-1]:
            ends.append((steps[-1], float(values[-1]), f"{method}, as published  {values[-1]:.3g}", colour))
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    if ends:
        axes.set_ylim(bottom=max(axes.get_ylim()[0], max(y for _, y, _, _ in ends) * 1e-5))
        axes.set_xlim(0, max(x for x, _, _, _ in ends))
        _label_ends(axes, ends)
    axes.set_xlabel("steps taken")
    axes.set_ylabel(f"epsilon at delta = {delta:g}")
    if not ends:
        title += "\nnothing to draw: no step was released with noise"
    elif all(c.reason is not None for c in proved):
        title += "\nproved: infinite. What is shown is as published, not a guarantee"
    axes.set_title(title, fontsize=10, loc="left")
    _save(figure, path)


def budget_curves(path: Path, view: BudgetView, found: Calibrated, rate: float) -> None:
    """What a target epsilon buys: sigma, and the noise of one step, over the number of steps."""
    figure, (left, right) = _figure(2)
    for i, q in enumerate(view.sigma):
        look = {"color": _COLOURS[i % 6], "linestyle": _STYLES[i % 5], "marker": _MARKERS[i % 5], "markersize": 4}
        left.plot(view.steps, view.sigma[q], label=f"q = {q:g}", **look)
        right.plot(view.steps, view.noise(q), **look)
    if found.schedule.is_constant:
        star = {"color": _BLACK, "marker": "*", "markersize": 13, "linestyle": "none", "zorder": 9}
        left.plot([found.steps], [found.sigma], label=f"calibrated: sigma = {found.sigma:.3g}", **star)
        right.plot([found.steps], [found.sigma / rate], **star)
    for axes, name in (
        (left, "sigma that meets the target"),
        (right, "noise std of one step on the mean gradient\n(per coordinate, in units of C/N: sigma / q)"),
    ):
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plain_ticks(axes.xaxis)
        _plain_ticks(axes.yaxis)
        axes.set_xlabel("number of steps T")
        axes.set_ylabel(name)
    left.legend(fontsize=9, loc="upper left")
    target = view.target
    kind = f"proved, {found.neighbours}" if target.is_proved else "as published, not a guarantee"
    figure.suptitle(
        f"epsilon = {target.epsilon:.4g} at delta = {target.delta:g} by {found.accountant} ({kind})", fontsize=10
    )
    _save(figure, path)
