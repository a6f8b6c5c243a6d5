"""Peak memory of a mode on the CPU, in a process of its own.

    python benchmarks/memory.py W4 "gradveil per-layer"

What is given is the highest resident size during some steps after the first few, above the resident size before the
model and its data were made: weights, gradients, activations, the batch, and what the libraries keep. A small network
takes some steps in the same mode beforehand, so that code which is loaded at first use is not counted. The C library
is told to give freed blocks of 64 KiB and more back at once: what it would keep depends on the order of allocations,
and is several megabytes more or less than what is in use.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from workloads import WORKLOADS, Workload

WHAT = (
    "highest resident size during steps after warm-up, above the resident size before model and data were made; "
    "each mode in a process of its own, freed blocks given back at once"
)
GIVE_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}  # glibc's; read when a process starts
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM_UP, STEPS = 2, 2


def why_not() -> str | None:
    """Why peak memory cannot be measured here; None where it can."""
    try:
        _bytes("VmHWM")
        RESET.write_text("5")
    except (OSError, KeyError) as error:
        return f"the peak of a process cannot be read and reset here ({type(error).__name__}: {error})"
    return None


def _bytes(field: str) -> int:
    """VmRSS: resident now. VmHWM: the most since the start, or since 5 was written to clear_refs."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return 1024 * int(lines[field].split()[0])


def _small() -> nn.Module:
    """The kinds of layers that the workloads have."""
    layers = [nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.LayerNorm(144), nn.Linear(144, 10))


SMALL = Workload("small", "loads code", _small, (3, 8, 8), 10, 16)


def _child(pipe: Connection, workload: str, mode: str, threads: int) -> None:
    from modes import MODES

    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(threads)
        chosen = MODES[mode]
        step = chosen.make(SMALL, "cpu")
        for _ in range(WARM_UP):
            step()
        del step
        gc.collect()
        before = _bytes("VmRSS")
        step = chosen.make(WORKLOADS[workload], "cpu")
        for _ in range(WARM_UP):
            step()
        RESET.write_text("5")
        for _ in range(STEPS):
            step()
        pipe.send(_bytes("VmHWM") - before)
    except Exception as error:  # the timing of the same mode fails in the same way, and says so in the results
        pipe.send(f"{type(error).__name__}: {error}")


def peak_bytes(workload: str, mode: str, threads: int) -> int | str:
    """Bytes, or why there are none."""
    os.environ |= GIVE_BACK  # for the server that forks; this process has read them
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gradveil"])  # imported once; importing starts no thread
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(its, workload, mode, threads))
    process.start()
    its.close()
    try:
        found: int | str = mine.recv()
    except EOFError:
        found = "the process ended before it could tell"
    process.join()
    return found


if __name__ == "__main__":
    reason = why_not()
    print(reason if reason else peak_bytes(sys.argv[1], sys.argv[2], 2))
