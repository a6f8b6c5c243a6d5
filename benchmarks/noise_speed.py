"""What noise on a lattice costs: the noise of a step in both kinds, side by side, and the difference in a step's time.

    python benchmarks/noise_speed.py --threads 1 --out benchmarks/results/noise_speed.json

Both kinds of noise go onto gradients of each workload's shapes, taking turns in one process; the fastest of many turns,
since a busy machine can only add to it. The difference is set against a per-layer private step with noise in floating
point: that of results/speed_cpu.json, on two threads, and one that is timed here, likewise the fastest of its turns.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import ROOT, description, write
from modes import private
from workloads import WORKLOADS, Workload

import gradveil
from gradveil.engine.header import LATTICE_FROM
from gradveil.mechanism.noise.streams import NoiseSource, SecretKey

RECORDED = ROOT / "benchmarks" / "results" / "speed_cpu.json"


def fastest(action: Any, seconds: float, least: int) -> float:
    best, turns, end = float("inf"), 0, time.perf_counter() + seconds
    while turns < least or time.perf_counter() < end:
        start = time.perf_counter()
        action(turns)
        best, turns = min(best, time.perf_counter() - start), turns + 1
    return best


def noise(workload: Workload, seconds: float) -> dict[str, float]:
    """Seconds of a step's noise."""
    key, grads = SecretKey(0), [torch.zeros_like(p) for p in workload.make().parameters()]
    stds, found = [2.0] * len(grads), {"float": float("inf"), "lattice": float("inf")}

    def turn(number: int) -> None:
        for kind, add in (("float", NoiseSource.add_to), ("lattice", NoiseSource.add_on_lattice)):
            source = NoiseSource(key, number)
            start = time.perf_counter()
            add(source, grads, stds, divide_by=600.0)
            found[kind] = min(found[kind], time.perf_counter() - start)

    fastest(turn, seconds, 20)
    return found


def measure(name: str, seconds: float) -> dict[str, Any]:
    workload = WORKLOADS[name]
    size = sum(p.numel() for p in workload.make().parameters())
    found = noise(workload, seconds)
    step = private(workload, "cpu", "per-layer")
    whole = fastest(lambda _: step(), seconds, 4)
    more = found["lattice"] - found["float"]
    recorded = json.loads(RECORDED.read_text())["workloads"][name]["rows"]["gradveil per-layer"]["median_ms"]
    return {
        "what": workload.what,
        "batch": workload.batch,
        "parameters": size,
        "ns_per_parameter": {kind: round(1e9 * taken / size, 3) for kind, taken in found.items()},
        "more_per_step_ms": round(1e3 * more, 4),
        "step_ms": {"here": round(1e3 * whole, 3), "speed_cpu.json": recorded},
        "more_percent": {"here": round(100 * more / whole, 2), "speed_cpu.json": round(1e5 * more / recorded, 2)},
        "on_by_default": workload.batch >= LATTICE_FROM,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3", "W4", "W5", "W6"])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    gradveil.PrivacyEngine = partial(gradveil.PrivacyEngine, noise="float")
    rows = {}
    for name in given.workloads:
        rows[name] = measure(name, given.seconds)
        print(name, rows[name], flush=True)
    if given.out is not None:
        write(given.out, {**description("cpu", given.threads), "workloads": rows})


if __name__ == "__main__":
    main()
