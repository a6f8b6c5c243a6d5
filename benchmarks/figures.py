"""Draw the figures of docs/performance.md and docs/attacks.md from the results files.

    python benchmarks/figures.py [--results benchmarks/results] [--out docs/figures] [--format svg]

speed_DEVICE: one private step in units of a plain SGD step, by workload and mode. scaling_DEVICE: milliseconds of a
step by batch and by depth. leakage_DEVICE: how near attacks come, by data set and
strategy. A results file that is not there gives no figure.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

ROOT = Path(__file__).resolve().parent.parent
# Okabe and Ito's colours, which can be told apart by all; one family of tools, one hue.
BLUE, SKY, ORANGE, YELLOW, GREEN, GREY = "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#555555"
DRAWN = {  # mode -> label, colour; top to bottom
    "gradveil per-layer": ("gradveil, per layer", BLUE),
    "gradveil flat": ("gradveil, flat", BLUE),
    "gradveil per-layer, captured": ("gradveil, per layer, captured", SKY),
    "gradveil flat, captured": ("gradveil, flat, captured", SKY),
    "sgd, captured": ("plain SGD, captured", GREY),
    "gradveil per-layer, pure PyTorch": ("gradveil, per layer, no compiled kernels", SKY),
    "opacus hooks": ("Opacus, hooks", ORANGE),
    "opacus functorch": ("Opacus, functorch", ORANGE),
    "opacus ew": ("Opacus, expanded weights", ORANGE),
    "opacus ghost": ("Opacus, ghost clipping", ORANGE),
    "jax-privacy": ("JAX-Privacy", GREEN),
}
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "svg.hashsalt": "gradveil",  # the same results give the same file
    "font.family": "sans-serif",
}


def speed(results: dict[str, Any]) -> Figure:
    """One panel for each workload; bars are ratios of medians, whiskers the quartiles of the private step."""
    workloads = results["workloads"]
    present = [m for m in DRAWN if any(m in w["rows"] for w in workloads.values())]
    columns = min(4, len(workloads))
    lines = -(-len(workloads) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(2.2 + 2.5 * columns, 0.7 + lines * (0.75 + 0.21 * len(present))),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for ax, (name, workload) in zip(axes.flat, workloads.items(), strict=False):
        _bars(ax, f"{name}: {workload['what']}\nbatch {workload['batch']}", workload, present)
    for ax in list(axes.flat)[len(workloads) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_yticks(range(len(present)), [DRAWN[m][0] for m in present])
    axes[0, 0].set_ylim(len(present) - 0.5, -0.5)  # first mode on top; the other panels share it
    figure.supxlabel(f"one step, in units of a plain SGD step (dashed line) - {results['machine']}", fontsize=9)
    return figure


def _bars(ax: Axes, title: str, workload: dict[str, Any], present: list[str]) -> None:
    rows = workload["rows"]
    base = rows["sgd"]["median_ms"]
    ends = [1.0]
    for place, mode in enumerate(present):
        row = rows.get(mode)
        if row is None:
            _beside(ax, "not run", 1.0, place, GREY)
            continue
        low, high = (q / base for q in row["quartiles_ms"])
        ratio = row["ratio"]
        ax.barh(place, ratio, height=0.68, color=DRAWN[mode][1])
        spread = [[max(0.0, ratio - low)], [max(0.0, high - ratio)]]
        ax.errorbar(ratio, place, xerr=spread, color="black", capsize=1.5, linewidth=0.8)
        ends.append(max(high, ratio))
        _beside(ax, f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}", max(1.0, high, ratio), place, "black")
    ax.axvline(1.0, color="black", linestyle="--", linewidth=0.9)
    ax.set_xlim(0, 1.28 * max(ends))
    ax.set_title(title, loc="left", fontsize=8)
    ax.tick_params(axis="y", length=0)


def _beside(ax: Axes, text: str, x: float, y: float, colour: str) -> None:
    """To the right of a bar, and of the line at 1."""
    offset = {"xytext": (3, 0), "textcoords": "offset points"}
    ax.annotate(text, (x, y), **offset, va="center", fontsize=8, color=colour)


SCALED = {"sgd": ("plain SGD", GREY, "o"), "gradveil per-layer": ("gradveil, per layer", BLUE, "s")}
SCALED["gradveil flat"] = ("gradveil, flat", YELLOW, "^")


def scaling(results: dict[str, Any]) -> Figure:
    """Doubly logarithmic, with a guide of slope 1 through the largest plain step."""
    series = results["series"]
    columns = min(2, len(series))
    lines = -(-len(series) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.3 * columns, 0.8 + 2.8 * lines), squeeze=False, layout="constrained"
    )
    for ax, found in zip(axes.flat, series.values(), strict=False):
        sizes = [p["at"] for p in found["points"]]
        for mode, (_, colour, marker) in SCALED.items():
            rows = [p["modes"][mode] for p in found["points"]]
            ax.plot(sizes, [r["median_ms"] for r in rows], color=colour, marker=marker, markersize=4.5, linewidth=1.4)
            low, high = zip(*(r["quartiles_ms"] for r in rows), strict=True)
            ax.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
        last = found["points"][-1]["modes"]["sgd"]["median_ms"]
        ax.plot(sizes, [last * s / sizes[-1] for s in sizes], color="black", linestyle=":", linewidth=1)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_ylim(bottom=0.4 * min(p["modes"]["sgd"]["quartiles_ms"][0] for p in found["points"]))
        ax.set_xticks(sizes, [str(s) for s in sizes])
        ax.minorticks_off()
        ax.set_xlabel("examples in the batch" if found["axis"] == "batch" else "layers")
        ax.set_ylabel("milliseconds per step")
        ax.set_title(found["what"], loc="left", fontsize=8.5)
        ax.grid(True, color="#dddddd", linewidth=0.6)
    for ax in list(axes.flat)[len(series) :]:
        ax.set_visible(False)
    handles: list[Line2D] = [
        Line2D([], [], color=colour, marker=marker, markersize=4.5, label=label)
        for label, colour, marker in SCALED.values()
    ]
    handles.append(Line2D([], [], color="black", linestyle=":", label="proportional to the size"))
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8.5)
    figure.supxlabel(results["machine"], fontsize=8.5)
    return figure


ATTACKED = {"cpl": ("cpl, the paper's attack", GREY, "o"), "map": ("map, which knows the defence", ORANGE, "s")}


def leakage(results: dict[str, Any]) -> Figure:
    """One panel for each data set: how near each attack comes, median and its interval; guessing as a dashed line."""
    sets = list(dict.fromkeys(row["dataset"] for row in results["rows"]))
    strategies = list(dict.fromkeys(row["strategy"] for row in results["rows"]))
    figure, axes = plt.subplots(
        1, len(sets), figsize=(1.6 + 2.2 * len(sets), 1.2 + 0.36 * len(strategies)), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for ax, name in zip(axes.flat, sets, strict=True):
        rows = [row for row in results["rows"] if row["dataset"] == name]
        for row in rows:
            _, colour, marker = ATTACKED[row["attack"]]
            found, place = (
                row["result"],
                strategies.index(row["strategy"]) + (0.14 if row["attack"] == "map" else -0.14),
            )
            middle, (low, high) = found["psnr_median"], found["psnr_median_interval"]
            ax.errorbar(
                middle, place, xerr=[[middle - low], [high - middle]], color=colour, marker=marker, markersize=4.5,
                capsize=2, linewidth=0.9,
            )  # fmt: skip
        ax.axvline(rows[0]["result"]["guess_psnr_median"], color="black", linestyle="--", linewidth=0.9)
        ax.set_title(name, loc="left")
        ax.set_xlim(left=0)
        ax.grid(True, axis="x", color="#dddddd", linewidth=0.6)
        ax.tick_params(axis="y", length=0)
    axes[0, 0].set_yticks(range(len(strategies)), strategies)
    axes[0, 0].set_ylim(len(strategies) - 0.5, -0.5)
    handles: list[Line2D] = [
        Line2D([], [], color=colour, marker=marker, markersize=4.5, linestyle="", label=label)
        for label, colour, marker in ATTACKED.values()
    ]
    handles.append(Line2D([], [], color="black", linestyle="--", label="the best guess without any gradient"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=8.5)
    figure.supxlabel(
        f"PSNR of the reconstruction in dB, median of {results['victims']} victims (higher: more leaks)", fontsize=9
    )
    return figure


FIGURES = {"speed": speed, "scaling": scaling, "leakage": leakage}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--format", default="svg", choices=["svg", "png"])
    args = parser.parse_args()
    for kind, draw in FIGURES.items():
        for device in ("cpu", "cuda"):
            source = args.results / f"{kind}_{device}.json"
            if not source.exists():
                print(f"{kind}_{device}: not measured yet")
                continue
            with plt.rc_context(STYLE):
                figure = draw(json.loads(source.read_text()))
                args.out.mkdir(parents=True, exist_ok=True)
                target = args.out / f"{kind}_{device}.{args.format}"
                figure.savefig(target, dpi=130, metadata={"Date": None} if args.format == "svg" else None)
                plt.close(figure)
            print(target.name)


if __name__ == "__main__":
    main()
