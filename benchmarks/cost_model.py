"""What a private step over many processes costs, in bytes, FLOPs and seconds; held against what was measured here.

    python benchmarks/cost_model.py --measured benchmarks/results/ranks_cpu.json --out FILE.json

A step waits for whoever drew most (Poisson sampling), adds up the clipped sums (a ring: 2 (W-1)/W of the gradient's
bytes each way), and draws samples and noise, which are shared out. Nothing else depends on the number W of processes.
The constants of a large machine are assumptions, named in the results; those of this machine are taken from the
measurement with one process, and the prediction for more is compared with what they took.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import write
from scipy import stats


def imbalance(mean: float, processes: int) -> float:
    """How much longer the fullest part of a Poisson batch is than the average: E[max of W draws] / mean."""
    if processes == 1 or mean <= 0:
        return 1.0
    highest = int(mean + 12 * math.sqrt(mean) + 20)
    within = stats.poisson.cdf(range(highest), mean)
    return float(sum(1.0 - p**processes for p in within) / mean)


@dataclass(frozen=True)
class Setting:
    """A language model with ``parameters``, trained on ``batch`` sequences of ``tokens`` each."""

    parameters: float = 1e9
    batch: int = 4096
    tokens: int = 512
    examples: float = 1e9  # in the data set
    private_over_plain: float = 1.35
    flops_per_second: float = 4e14  # of one GPU, as achieved, in bfloat16
    link_inside: float = 400e9  # bytes per second of an all-reduce among the GPUs of one machine
    link_between: float = 45e9  # and between machines, for each GPU
    gpus_per_machine: int = 8
    draws_per_second: float = 1.7e8  # Philox numbers of one core
    normals_per_second: float = 2e10  # of one GPU


def step(s: Setting, processes: int) -> dict[str, float]:
    """Seconds of the parts of one step, and what is sent and computed by each process."""
    mean = s.batch / processes
    flops = 6.0 * s.parameters * s.tokens * s.batch
    compute = flops * s.private_over_plain / (processes * s.flops_per_second)
    sent = 2.0 * (processes - 1) / processes * 4.0 * s.parameters  # sums in float32
    link = s.link_inside if processes <= s.gpus_per_machine else s.link_between
    sums = sent / link
    noise = s.parameters / processes / s.normals_per_second
    sampling = s.examples / processes / s.draws_per_second
    waiting = compute * (imbalance(mean, processes) - 1.0)
    return {
        "processes": processes,
        "flops_per_process": flops * s.private_over_plain / processes,
        "bytes_sent": sent,
        "compute": compute,
        "waiting": waiting,
        "sums": sums,
        "noise": noise,
        "sampling": sampling,
        "step": compute + waiting + sums + noise,  # samples are drawn by the CPU, ahead of the step
        "ledger_bytes": 600.0,
    }


def held_against(measured: dict[str, Any], batch: int) -> list[dict[str, float]]:
    """From the step of one process and the time of a sum: what more processes should take, and what they took."""
    rows = {row["processes"]: row for row in measured["rows"]}
    alone, cores = rows[1]["seconds_per_step"], measured["cores"]
    found = []
    for count, row in rows.items():
        crowded = max(1.0, count / cores)
        predicted = alone * crowded * imbalance(batch, count)
        found.append({"processes": count, "predicted": predicted, "measured": row["seconds_per_step"]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    setting = Setting()
    results: dict[str, Any] = {
        "assumptions": asdict(setting),
        "rows": [step(setting, w) for w in (8, 64, 256, 1024)],
    }
    if args.measured is not None:
        measured = json.loads(args.measured.read_text())
        results["held_against"] = held_against(measured, measured["batch"])
    for row in results["rows"]:
        print({k: float(f"{v:.3g}") for k, v in row.items()})
    print(results.get("held_against"))
    if args.out:
        write(args.out, results)


if __name__ == "__main__":
    main()
