"""Seconds and memory of one private step beside one plain SGD step, interleaved in one run.

    python benchmarks/speed.py --device cpu --seconds 15 --out benchmarks/results/speed_cpu.json
    python benchmarks/speed.py --device cuda --seconds 5 --out benchmarks/results/speed_cuda.json

Each workload runs in every mode of modes.py: plain SGD, gradveil per layer and flat, with and without compiled
kernels, in channels_last, every mode of Opacus, and JAX-Privacy. Steps take turns, so that a busy machine slows all of
them alike; a mode that is many times slower than plain SGD takes fewer turns. A short step is taken six times in its
turn, and all but the first are timed: nobody pays for the caches that the mode before left cold. On a GPU a turn is
several steps in a row, as in training, where the host goes ahead of the device; their mean is one sample. Medians and
quartiles; ratios are of medians. Peak memory is that of some steps above the level before the model was made; on the
CPU see memory.py.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memory
import torch
from jax_peer import JaxStep, LeftOut
from machine import description, write
from modes import MODES, Step, default_modes
from workloads import WORKLOADS, Workload

PATIENCE = 5  # a mode takes every k-th turn if a step of it takes 5 k times a plain one
LEAST = 9  # samples of each mode that takes every turn, 3 of the others
SHORT, TIMED = 0.05, 5  # seconds, and how many of a turn's short steps are timed
ROW = 0.03  # seconds of a turn on a GPU, or 20 steps if that is less
ON_CUDA = (
    "highest allocation during a step after warm-up, above the allocation before model and data were made; not "
    "measured for captured steps, whose pool lives as long as the graph"
)


def timed(step: Step, device: str, times: int = 1) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        own = step()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times if own is None else own


def cuda_peak_bytes(step: Step, before: int) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def cpu_peak_bytes(w: Workload, mode: str) -> int | None:
    found = memory.peak_bytes(w.name, mode, torch.get_num_threads()) if MODES[mode].memory else None
    return found if isinstance(found, int) else None


@dataclass
class Prepared:
    """A mode that is ready for its turn."""

    step: Step
    about: float  # seconds of a step, to plan by
    peak: int | None


def prepare(w: Workload, device: str, modes: list[str], memory_too: bool) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Every mode made and warm, or why not."""
    ready: dict[str, Prepared] = {}
    failed: dict[str, str] = {}
    cuda = device != "cpu"
    if cuda:
        MODES["sgd"].make(memory.SMALL, device)()  # what libraries allocate at first use is nobody's
    for name in modes:
        gc.collect()  # what was left by others is let go now, and not while this mode is looked at
        before = torch.cuda.memory_allocated() if cuda else 0
        try:
            step = MODES[name].make(w, device)
            timed(step, device)  # compiles, allocates, learns
            about = timed(step, device)
            if about < 0.3:
                about = min(about, timed(step, device))
        except LeftOut as reason:
            failed[name] = f"left out: {reason}"
        except Exception as error:  # a peer's mode that does not take this model is a result, not a failure of ours
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}" if str(error) else repr(error)
        else:
            peak = None
            if cuda and "captured" not in name:
                peak = cuda_peak_bytes(step, before)
            elif memory_too and not cuda:
                peak = cpu_peak_bytes(w, name)
            ready[name] = Prepared(step, about, peak)
    return ready, failed


def measure(w: Workload, device: str, seconds: float, modes: list[str], memory_too: bool) -> dict[str, Any]:
    ready, failed = prepare(w, device, modes, memory_too)
    every = {name: max(1, int(r.about / (PATIENCE * ready["sgd"].about))) for name, r in ready.items()}
    times: dict[str, list[float]] = {name: [] for name in ready}
    end, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or any(len(t) < (LEAST if every[n] == 1 else 3) for n, t in times.items()):
        for name, mode in ready.items():
            if turn % every[name] == 0:
                short, cpu = mode.about < SHORT, device == "cpu"
                if short:
                    mode.step()
                in_a_row = 1 if cpu else max(1, min(20, int(ROW / mode.about)))
                times[name] += [timed(mode.step, device, in_a_row) for _ in range(TIMED if short and cpu else 1)]
        turn += 1
    middle = {name: statistics.median(t) for name, t in times.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, t in times.items():
        base = MODES[name].base if MODES[name].base in middle else "sgd"
        rows[name] = {
            "median_ms": round(1e3 * middle[name], 4),
            "quartiles_ms": [round(1e3 * q, 4) for q in statistics.quantiles(t, n=4)[::2]],
            "ratio": round(middle[name] / middle["sgd"], 3),
            "base": base,
            "ratio_to_base": round(middle[name] / middle[base], 3),
            "n": len(t),
            "peak_bytes": ready[name].peak,
        }
        note = getattr(ready[name].step, "note", None)
        if note:
            rows[name]["note"] = note
    found = {"what": w.what, "batch": w.batch, "rows": rows, "failed": failed}
    for mode in ready.values():
        if isinstance(mode.step, JaxStep):
            found["versions"] = mode.step.versions
            mode.step.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=15.0, help="per workload, at least")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="W")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), metavar="MODE", help=f"of: {', '.join(MODES)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory of the CPU")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    modes = args.modes or default_modes(args.device)
    modes = ["sgd", *(m for m in modes if m != "sgd")]  # everything is compared with it
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", module="opacus|torch")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # Opacus's hooks on the first layer
    cuda = args.device != "cpu"
    reason = None if cuda else "left out" if args.no_memory else memory.why_not()
    found: dict[str, Any] = {}
    for name in args.workloads:
        found[name] = measure(WORKLOADS[name], args.device, args.seconds, modes, reason is None)
        ratios = {k: r["ratio"] for k, r in found[name]["rows"].items()}
        print(name, found[name]["rows"]["sgd"]["median_ms"], "ms", ratios, found[name]["failed"], flush=True)
        results = {
            "what": "one step: forward, backward, noise and update; fixed batch, no sampling",
            "memory": ON_CUDA if cuda else memory.WHAT if reason is None else f"not measured: {reason}",
            **description(args.device, args.threads),
        }
        for workload in found.values():
            results["versions"] |= workload.pop("versions", {})
        write(args.out, results | {"workloads": found})


if __name__ == "__main__":
    main()
