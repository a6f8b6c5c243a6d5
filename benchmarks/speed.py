"""Seconds and memory of one private step beside one plain SGD step, interleaved in one run.

    python benchmarks/speed.py --device cpu --seconds 20 --out benchmarks/results/speed_cpu.json

Each workload runs plain SGD, gradveil per layer and flat, and every mode of Opacus where it is installed; steps
take turns, so that a busy machine slows all of them alike. Medians and quartiles; ratios are of medians. Peak memory
is that of one step above the resting level (CUDA only).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from workloads import WORKLOADS, Workload

import gradveil
from gradveil.kernels import native

Step = Callable[[], None]


def plain(w: Workload, device: str) -> Step:
    model = w.make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = w.data(device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def private(w: Workload, device: str, clipping: str) -> Step:
    """The user's loop on a fixed batch; sampling is left out of both sides."""
    model = w.make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = w.data(device)
    engine = gradveil.PrivacyEngine(
        strategy="baseline", clip=1.0, sigma=1.0, steps=10**7, delta=1e-9, clipping=clipping
    )
    model, optimizer, _ = engine.make_private(
        module=model, optimizer=optimizer, data_loader=TensorDataset(x, y), batch_size=w.batch
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the batch is fed by hand: only speed is measured here
            optimizer.step()

    return step


def opacus(w: Workload, device: str, mode: str) -> Step:
    from opacus import PrivacyEngine

    model = w.make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = w.data(device)
    loader = DataLoader(TensorDataset(x, y), batch_size=w.batch)
    criterion: Any = torch.nn.CrossEntropyLoss()
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    found = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, grad_sample_mode=mode, criterion=criterion, **settings
    )
    model, optimizer = found[0], found[1]
    criterion = found[2] if mode == "ghost" else criterion

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


MODES: dict[str, Callable[[Workload, str], Step]] = {
    "sgd": plain,
    "gradveil per-layer": lambda w, d: private(w, d, "per-layer"),
    "gradveil flat": lambda w, d: private(w, d, "flat"),
    "opacus hooks": lambda w, d: opacus(w, d, "hooks"),
    "opacus functorch": lambda w, d: opacus(w, d, "functorch"),
    "opacus ew": lambda w, d: opacus(w, d, "ew"),
    "opacus ghost": lambda w, d: opacus(w, d, "ghost"),
}


def timed(step: Step, device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(step: Step, device: str) -> int | None:
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def measure(w: Workload, device: str, seconds: float, modes: list[str]) -> dict[str, Any]:
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    for name in modes:
        try:
            step = MODES[name](w, device)
            for _ in range(3):
                step()
            steps[name] = step
        except Exception as error:  # a peer's mode that does not take this model is a result, not a failure of ours
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}" if str(error) else repr(error)
    times: dict[str, list[float]] = {name: [] for name in steps}
    memory = {name: peak_bytes(step, device) for name, step in steps.items()}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["sgd"]) < 5:
        for name, step in steps.items():
            times[name].append(timed(step, device))
    base = statistics.median(times["sgd"])
    rows = {
        name: {
            "median_ms": round(1e3 * statistics.median(t), 4),
            "quartiles_ms": [round(1e3 * q, 4) for q in statistics.quantiles(t, n=4)[::2]],
            "ratio": round(statistics.median(t) / base, 3),
            "n": len(t),
            "peak_bytes": memory[name],
        }
        for name, t in times.items()
    }
    return {"what": w.what, "batch": w.batch, "rows": rows, "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=20.0, help="per workload")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", module="opacus|torch")
    found = {}
    for name in args.workloads:
        found[name] = measure(WORKLOADS[name], args.device, args.seconds, args.modes)
        ratios = {k: r["ratio"] for k, r in found[name]["rows"].items()}
        print(name, found[name]["rows"]["sgd"]["median_ms"], "ms", ratios, found[name]["failed"], flush=True)
        results = {
            "what": "one step: forward, backward, noise and update; fixed batch, no sampling",
            "machine": torch.cuda.get_device_name() if args.device != "cpu" else f"CPU, {args.threads} threads",
            "clipping": native.status() if args.device == "cpu" else "PyTorch on CUDA, eager",
            "versions": {
                "gradveil": gradveil.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "command": "python " + " ".join(Path(a).name if "/" in a else a for a in sys.argv),
            "workloads": found,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
