"""Throughput of one private run over 1, 2 and 4 processes, each with one thread.

    python benchmarks/ranks.py --workload W5 --steps 12 --out benchmarks/results/ranks_cpu.json

The batch grows with the processes (weak scaling): each has the workload's batch size on average, drawn by Poisson
sampling, so that a step waits for whoever drew most. Numbers of processes take turns, ``--rounds`` times. Ideal is the
throughput of one process times their number, as far as there are cores.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import description, write
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from workloads import WORKLOADS

import gradveil

BATCHES_OF_DATA = 20


def worker(rank: int, count: int, port: int, name: str, steps: int, found: Any) -> None:
    torch.set_num_threads(1)
    if count > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=count)
    load = WORKLOADS[name]
    torch.manual_seed(0)
    model = load.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = load.data(batches=BATCHES_OF_DATA)
    settings = {"clip": 1.0, "sigma": 1.0, "steps": steps + 2, "delta": 1e-5, "seed": 1}
    engine = gradveil.PrivacyEngine(**settings)  # type: ignore[arg-type]
    model, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=TensorDataset(x, y), batch_size=load.batch * count
    )
    started, examples, reducing = 0.0, 0, 0.0
    add_up = engine.ranks.add_up

    def timed(tensors: Any) -> None:
        nonlocal reducing
        before = time.perf_counter()
        add_up(tensors)
        reducing += time.perf_counter() - before

    engine.ranks.add_up = timed  # type: ignore[method-assign]
    for inputs, targets in loader:
        if engine.step == 2:  # after two steps to warm up
            started, examples, reducing = time.perf_counter(), 0, 0.0
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        examples += len(inputs)
    found[rank] = (time.perf_counter() - started, examples, reducing)
    if count > 1:
        dist.destroy_process_group()


def measure(count: int, name: str, steps: int) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mp.Manager() as manager:
        found = manager.dict()
        mp.start_processes(worker, (count, port, name, steps, found), nprocs=count, start_method="spawn")
        results = dict(found)
    seconds = max(r[0] for r in results.values())
    return {
        "examples_per_second": sum(r[1] for r in results.values()) / seconds,
        "seconds_per_step": seconds / steps,
        "seconds_in_sums": statistics.fmean(r[2] for r in results.values()) / steps,  # and in waiting for the slowest
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="W5", choices=WORKLOADS)
    parser.add_argument("--counts", default="1,2,4")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    counts = [int(c) for c in args.counts.split(",")]
    taken: dict[int, list[dict[str, float]]] = {c: [] for c in counts}
    for _ in range(args.rounds):
        for count in counts:
            taken[count].append(measure(count, args.workload, args.steps))
            print(count, taken[count][-1], flush=True)
    rows = []
    alone = statistics.median(r["examples_per_second"] for r in taken[counts[0]])
    cores = os.cpu_count() or 1
    for count, found in taken.items():
        middle = {k: statistics.median(r[k] for r in found) for k in found[0]}
        ideal = alone * min(count, cores) / counts[0]
        rows.append({"processes": count, **middle, "share_of_ideal": middle["examples_per_second"] / ideal})
        print(rows[-1])
    if args.out:
        settings = {"workload": args.workload, "steps": args.steps, "rounds": args.rounds, "cores": cores}
        settings["batch"] = WORKLOADS[args.workload].batch
        write(args.out, {"machine": description("cpu", 1), **settings, "rows": rows, "all": taken})


if __name__ == "__main__":
    main()
