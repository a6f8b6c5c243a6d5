"""A ledger of a million steps: its size, and what reading it takes.

    python benchmarks/million_steps.py --out benchmarks/results/million_steps.json

The releases are made by hand (three clipping groups, Poisson sampling, a nonce each) and written by the ledger as the
engine does, with sigma constant or decaying. Each command runs in a process of its own; its wall-clock seconds, its CPU
seconds and its peak memory are measured. The machine's other load shows in the wall-clock time only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import description, write

from gradveil.accounting import ledger as ledgers
from gradveil.accounting.ledger import Ledger
from gradveil.mechanism.records import Release, RunHeader
from gradveil.mechanism.strategies import PrivacyPlan, parameters

GROUPS = 3
STRATEGIES = {"constant sigma": "baseline", "decaying sigma": "dyn-sigma"}
COMMANDS: dict[str, Sequence[str]] = {
    "ledger verify": ("ledger", "verify", "RUN"),
    "statement": ("statement", "RUN"),
    "check": ("check", "RUN", "--max-epsilon", "100"),
    "report": ("report", "RUN"),
    "account": ("account", "RUN"),
}


_MEASURE = """
import resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
seconds, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
print(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss)
"""


def _header(plan: PrivacyPlan) -> RunHeader:
    return RunHeader(
        strategy=plan.strategy.name,
        guarantee=plan.strategy.guarantee,
        groups=tuple(f"layer{g}" for g in range(GROUPS)),
        population=60_000,
        sampling="poisson",
        sample_rate=256 / 60_000,
        expected_batch_size=256.0,
        steps=plan.steps,
        delta=1e-5,
        seeded=False,
        plan=plan.to_plan(),
    )


def made(path: Path, strategy: str, steps: int) -> None:
    """The ledger of a whole run."""
    plan = parameters(strategy, steps=steps, clip=1.0, sigma=6.0)
    header = _header(plan)
    ledger = Ledger(header, path)
    for step in range(steps):
        clip, sigma = plan.clip(step), plan.sigma(step)
        ledger.append(
            Release(
                step=step,
                sampler="poisson",
                sample_rate=header.sample_rate,
                expected_batch_size=256.0,
                clip=(clip,) * GROUPS,
                sensitivity_rule="clip",
                sensitivity=(clip,) * GROUPS,
                sigma=sigma,
                noise_std=(sigma * clip,) * GROUPS,
                scale_is_public=True,
                nonce=os.urandom(16).hex(),
            )
        )
    ledger.end("finished")


def measured(command: Sequence[str]) -> dict[str, Any]:
    """One command in a process of its own, started by a small one: a child's peak begins at its parent's memory."""
    done = subprocess.run([sys.executable, "-c", _MEASURE, *command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    seconds, cpu, peak = map(float, done.stdout.split())
    return {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "peak_mib": round(peak / 1024)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--commands", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--dir", type=Path, help="where the ledgers are written")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results: dict[str, Any] = {"steps": args.steps, "groups": GROUPS, "runs": {}} | description("cpu", 1)
    results["load_average_before"] = [round(load, 2) for load in os.getloadavg()]
    for name, strategy in STRATEGIES.items():
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            path = Path(folder) / ledgers.FILE_NAME
            began = time.process_time()
            made(path, strategy, args.steps)
            row: dict[str, Any] = {"bytes_per_release": round(path.stat().st_size / args.steps, 1)}
            row["append_cpu_us"] = round(1e6 * (time.process_time() - began) / args.steps, 1)
            for command in args.commands:
                words = [folder if word == "RUN" else word for word in COMMANDS[command]]
                row[command] = measured([sys.executable, "-m", "gradveil", *words])
                print(f"{name:16} {command:14} {row[command]}", flush=True)
            print(f"{name:16} {row['bytes_per_release']} bytes a release", flush=True)
            results["runs"][name] = row
    write(args.out, results)


if __name__ == "__main__":
    main()
