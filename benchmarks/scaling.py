"""How the cost of a step grows with the batch and with the depth of the network, plain and private.

    python benchmarks/scaling.py --device cpu --seconds 1.5 --out benchmarks/results/scaling_cpu.json
    python benchmarks/scaling.py --device cuda --seconds 1 --out benchmarks/results/scaling_cuda.json

Batches of 1 to 4096 examples in a small network; stacks of 2 to 64 equal layers at a fixed batch. At each size the
modes take turns. The slope is that of the last points in a doubly logarithmic plot: 1 is linear, below 1 is cheaper.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import description, write
from modes import MODES
from speed import timed
from torch import nn
from workloads import Workload

COMPARED = ("sgd", "gradveil per-layer", "gradveil flat")
BATCHES = (1, 4, 16, 64, 256, 1024, 4096)
DEPTHS = (2, 4, 8, 16, 32, 64)
TAIL = 3  # points that the slope is taken from: before them a step costs what its calls cost, whatever their size


def _kept_alive(model: nn.Module) -> nn.Module:
    """Weights that keep the size of activations and gradients through any depth: none becomes a denormal number."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model


def small_cnn() -> nn.Module:
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return _kept_alive(nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(512, 10)))


def small_mlp() -> nn.Module:
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)]
    return _kept_alive(nn.Sequential(*layers))


def linear_stack(depth: int) -> nn.Module:
    layers = [part for _ in range(depth - 1) for part in (nn.Linear(128, 128), nn.ReLU())]
    return _kept_alive(nn.Sequential(*layers, nn.Linear(128, 10)))


def conv_stack(depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for i in range(depth - 1):
        layers += [nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1), nn.ReLU()]
    return _kept_alive(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 16 * 16, 10)))


@dataclass(frozen=True)
class Series:
    what: str
    axis: str
    sizes: tuple[int, ...]
    at: Callable[[int], Workload]


def _by_batch(what: str, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Series:
    return Series(what, "batch", BATCHES, lambda n: Workload(what, what, make, shape, 10, n))


def _by_depth(what: str, make: Callable[[int], nn.Module], shape: tuple[int, ...], batch: int) -> Series:
    return Series(what, "layers", DEPTHS, lambda n: Workload(what, what, lambda: make(n), shape, 10, batch))


SERIES = {
    "batch, CNN": _by_batch("two 3x3 convolutions and a linear layer, 16x16x1", small_cnn, (1, 16, 16)),
    "batch, MLP": _by_batch("MLP 256-256-128-10", small_mlp, (256,)),
    "depth, CNN": _by_depth("3x3 convolutions of 16 channels on 16x16, batch 32", conv_stack, (3, 16, 16), 32),
    "depth, MLP": _by_depth("linear layers of width 128, batch 64", linear_stack, (128,), 64),
}


def point(w: Workload, device: str, seconds: float) -> dict[str, dict[str, Any]]:
    steps = {name: MODES[name].make(w, device) for name in COMPARED}
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["sgd"]) < 5:
        for name, step in steps.items():
            times[name].append(timed(step, device))
    return {
        name: {
            "median_ms": round(1e3 * statistics.median(t), 4),
            "quartiles_ms": [round(1e3 * q, 4) for q in statistics.quantiles(t, n=4)[::2]],
            "n": len(t),
        }
        for name, t in times.items()
    }


def slope(points: list[dict[str, Any]], mode: str) -> float | None:
    """Least-squares slope of log time over log size, over the last points."""
    tail = [(math.log(p["at"]), math.log(p["modes"][mode]["median_ms"])) for p in points[-TAIL:]]
    if len(tail) < 2:
        return None
    x, y = zip(*tail, strict=True)
    return round(statistics.linear_regression(x, y).slope, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1.5, help="per size, at least")
    parser.add_argument("--series", nargs="+", default=list(SERIES), choices=list(SERIES), metavar="SERIES")
    parser.add_argument("--largest", type=int, default=4096, help="leave out larger sizes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", module="torch")
    found: dict[str, Any] = {}
    for name in args.series:
        series = SERIES[name]
        points: list[dict[str, Any]] = []
        for n in (size for size in series.sizes if size <= args.largest):
            points.append({"at": n, "modes": point(series.at(n), args.device, args.seconds)})
            print(name, n, {m: row["median_ms"] for m, row in points[-1]["modes"].items()}, flush=True)
        slopes = {mode: slope(points, mode) for mode in COMPARED}
        found[name] = {"what": series.what, "axis": series.axis, "slopes": slopes, "points": points}
        what = "milliseconds of one step by batch and by number of layers; fixed batch, no sampling"
        write(args.out, {"what": what, **description(args.device, args.threads), "series": found})


if __name__ == "__main__":
    main()
