"""Microseconds per release written to a ledger.

    python benchmarks/ledger_cost.py --out benchmarks/results/ledger_cost.json

Releases are made beforehand; timed is ``Ledger.append``, which returns when the line is with the operating system.
Rounds of the modes take turns; a round is ``--releases`` appends to a new ledger. The file is in a temporary directory:
give --dir for another disk. Also timed: the same line by opening and closing the file at each append, which is what
keeping it open saves, and reading the ledger back.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import description, write

from gradveil.accounting import ledger as ledgers
from gradveil.accounting.ledger import Ledger
from gradveil.mechanism.records import Release, RunHeader
from gradveil.mechanism.strategies import parameters


def made(groups: int, count: int) -> tuple[RunHeader, list[Release]]:
    """A run whose clip and sigma decay, so that every number has its 17 digits."""
    plan = parameters("dyn-sigma-decay", steps=count, clip=4.0, sigma=6.0)
    header = RunHeader(
        strategy="dyn-sigma-decay",
        guarantee=plan.strategy.guarantee,
        groups=tuple(f"layer{g}" for g in range(groups)),
        population=60_000,
        sampling="poisson",
        sample_rate=256 / 60_000,
        expected_batch_size=256.0,
        steps=count,
        delta=1e-5,
        seeded=False,
        plan=plan.to_plan(),
    )
    releases = []
    for step in range(count):
        clip, sigma = plan.clip(step), plan.sigma(step)
        releases.append(
            Release(
                step=step,
                sampler="poisson",
                sample_rate=header.sample_rate,
                expected_batch_size=256.0,
                clip=(clip,) * groups,
                sensitivity_rule="clip",
                sensitivity=(clip,) * groups,
                sigma=sigma,
                noise_std=(sigma * clip,) * groups,
                scale_is_public=True,
                nonce=os.urandom(16).hex(),
            )
        )
    return header, releases


def per_call(calls: list[Callable[[], Any]]) -> list[float]:
    """Microseconds of each."""
    found = []
    for call in calls:
        began = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - began))
    return found


def opened_each_time(path: Path, line: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.fstat(descriptor)
    os.write(descriptor, line)
    os.close(descriptor)


def kept_open(path: Path, descriptor: int, line: bytes) -> None:
    os.stat(path)
    os.write(descriptor, line)
    os.lseek(descriptor, 0, os.SEEK_CUR)


def one_round(where: Path, groups: int, count: int, synced: int) -> dict[str, list[float]]:
    header, releases = made(groups, count)
    found: dict[str, list[float]] = {}
    plain, memory = Ledger(header, where / "plain"), Ledger(header)
    durable = Ledger(header, where / "durable", durability="fsync")
    found["append"] = per_call([lambda r=r: plain.append(r) for r in releases])
    found["append, durability fsync"] = per_call([lambda r=r: durable.append(r) for r in releases[:synced]])
    found["append, in memory"] = per_call([lambda r=r: memory.append(r) for r in releases])
    began = time.perf_counter()
    line = (where / "plain").read_bytes().splitlines(keepends=True)[-1]
    ledgers.read(where / "plain")
    found["read, per release"] = [1e6 * (time.perf_counter() - began) / count]
    descriptor = os.open(where / "plain", os.O_RDWR | os.O_APPEND)
    path = where / "plain"
    found["system calls, file kept open"] = per_call([lambda: kept_open(path, descriptor, line)] * count)
    found["system calls, file opened each time"] = per_call([lambda: opened_each_time(path, line)] * count)
    os.close(descriptor)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 6, 24])
    parser.add_argument("--releases", type=int, default=2000, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where the ledgers are written")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    results: dict[str, Any] = {"what": "microseconds per call", "groups": {}} | description("cpu", 1)
    results["load_average_before"] = [round(load, 2) for load in os.getloadavg()]
    for groups in args.groups:
        times: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory(dir=args.dir) as where:
                for name, found in one_round(Path(where), groups, args.releases, min(100, args.releases)).items():
                    times.setdefault(name, []).extend(found)
        results["groups"][str(groups)] = rows = {
            name: {
                "median_us": round(statistics.median(t), 2),
                "fastest_decile_us": round(sorted(t)[len(t) // 10], 2),
                "quartiles_us": [round(q, 2) for q in statistics.quantiles(t, n=4)[::2]],
                "n": len(t),
            }
            for name, t in times.items()
        }
        for name, row in rows.items():
            print(f"{groups:3} groups  {name:36} {row['median_us']:8.2f} us")
    write(args.out, results)


if __name__ == "__main__":
    main()
