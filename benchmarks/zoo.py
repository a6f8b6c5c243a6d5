"""Networks that nobody here wrote: is the clipped sum right, or the network refused, or is it silently wrong?

    PYTHONPATH=/where/timm/is python benchmarks/zoo.py --out benchmarks/results/zoo.json
    python benchmarks/zoo.py --only torch/ --out /tmp/zoo.json
    python benchmarks/zoo.py --list

Every network is small, has random weights in float64, and trains with dropout 0. Two batches (4 examples, then 3
others, of text in another length) are clipped, per layer and flat, and compared with an oracle: each example alone
through a copy of the model, its gradient clipped and added up. Bounds are below the median norm, so that some examples
are clipped. Each network runs in a process of its own. What may come out:

    right            all gradients agree within 1e-6; 1e-5 where a network computes in float32 inside ("float32": true)
    wrong            they do not; "mixes": an example's gradient depends on the others of the batch
    refused          an error on purpose, with its message
    crashed          any other error, a timeout included
    not runnable     does not run, or not twice alike, without gradveil
    not installed    the library is not here

Batch normalisation is replaced first by gradveil.fix ("fixed": true), unless it is frozen. Where torchvision is
missing, an empty module stands for it while timm and vit-pytorch are imported.
"""

from __future__ import annotations

import argparse
import copy
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from machine import description, version, write
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from zoo_networks import MOST_PARAMETERS, Made, NotRunnable, everything, last_line

import gradveil
from gradveil.clipping import Clipper, make_groups
from gradveil.errors import GradveilError

SIZES, SECONDS, TOLERANCE = (4, 3), 180, 1e-6


# ---- the comparison


class Float32(TorchFunctionMode):
    """Notes whether a model in float64 computes in float32."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen = self.seen or (isinstance(out, Tensor) and out.dtype == torch.float32)
        return out


def tensors_of(out: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of whatever a model gives, with a name."""
    if isinstance(out, Tensor):
        yield name, out
    elif isinstance(out, Mapping):
        for key in out:
            yield from tensors_of(out[key], f"{name}.{key}")
    elif isinstance(out, list | tuple):
        for i, item in enumerate(out):
            yield from tensors_of(item, f"{name}[{i}]")
    elif is_dataclass(out):
        for field in fields(out):
            yield from tensors_of(getattr(out, field.name), f"{name}.{field.name}")


def choose(out: Any, n: int) -> str:
    """The output that goes into the loss: the first with a gradient and the batch first; logits before all."""
    found = [name for name, t in tensors_of(out) if t.is_floating_point() and t.requires_grad and t.shape[:1] == (n,)]
    if not found:
        raise NotRunnable(
            f"no output with a gradient and the batch first: {[(k, v.shape) for k, v in tensors_of(out)]}"
        )
    return next((name for name in found if name.endswith("logits")), found[0])


def losses(out: Any, chosen: str, n: int) -> Tensor:
    """(n,): a fixed random linear functional of tanh of the output."""
    z = dict(tensors_of(out))[chosen].reshape(n, -1)
    weights = torch.randn(z.shape[1], generator=torch.Generator().manual_seed(z.shape[1]), dtype=torch.float64)
    return torch.tanh(z.double()) @ weights


def row(batch: Any, i: int, n: int) -> Any:
    """One example of a batch; what has no batch first is given as it is."""
    if isinstance(batch, Tensor):
        return batch[i : i + 1] if batch.shape[:1] == (n,) else batch
    if isinstance(batch, dict):
        return {k: row(v, i, n) for k, v in batch.items()}
    return type(batch)(row(v, i, n) for v in batch) if isinstance(batch, list | tuple) else batch


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}


def clipped(each: Sequence[dict[str, Tensor]], groups: Any) -> tuple[dict[str, Tensor], list[float]]:
    sums = {name: torch.zeros_like(g) for name, g in each[0].items()}
    bounds = []
    for group in groups:
        norms = [float(torch.sqrt(sum((g[name].double() ** 2).sum() for name in group.parameters))) for g in each]
        bounds.append(0.9 * sorted(norms)[len(norms) // 2] or 1.0)
        for g, norm in zip(each, norms, strict=True):
            for name in group.parameters:
                sums[name] += min(1.0, bounds[-1] / norm if norm else 1.0) * g[name]
    return sums, bounds


def distance(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], least: float = 1e-6) -> tuple[float, str]:
    """The largest difference, relative to each parameter's own largest entry, or to so much of the largest of all."""
    most = max(float(w.abs().max()) for w in wanted.values() if w.numel())
    found = [
        (
            float((got[name] - w).abs().nan_to_num(float("inf")).max())
            / max(float(w.abs().max()), least * most, 1e-30),
            name,
        )
        for name, w in wanted.items()
        if w.numel()
    ]
    return max(found)


def prepare(model: nn.Module) -> tuple[nn.Module, bool]:
    """In float64, training, without dropout and batch normalisation, no parameter at a special value."""
    model = model.double().train()
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.requires_grad:
            p.data += 0.05 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    for module in model.modules():
        for name, value in vars(module).items():
            if ("drop" in name and type(value) is float) or (isinstance(module, nn.Dropout) and name == "p"):
                setattr(module, name, 0.0)
        if type(module).__name__ == "_SpectralNorm" or (
            isinstance(module, _BatchNorm) and not any(p.requires_grad for p in module.parameters())
        ):
            module.eval()
    fixed = any(isinstance(m, _BatchNorm) and m.training for m in model.modules())
    return (gradveil.fix(model) if fixed else model), fixed


def examine(make: Callable[[], Made], ran: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """One network: what is found, for the results file. ``ran`` is called when it has run without gradveil."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    try:
        model, batches = make()
        count = sum(p.numel() for p in model.parameters())
        if count > MOST_PARAMETERS:
            raise NotRunnable(f"{count} parameters")
        model, fixed = prepare(model)
        found |= {"parameters": count} | ({"fixed": True} if fixed else {})
        plain, data, alone, chosen = copy.deepcopy(model), [], [], ""
        for seed, n in enumerate(SIZES):
            args, kwargs = batches(n, seed)
            torch.manual_seed(seed)
            first = plain(*args, **kwargs)
            chosen = chosen or choose(first, n)
            torch.manual_seed(seed + 10)
            if not torch.equal(losses(first, chosen, n), losses(plain(*args, **kwargs), chosen, n)):
                raise NotRunnable("two runs differ: it draws random numbers, or changes as it runs")
            each = []
            for i in range(n):
                own = row((args, kwargs), i, n)
                each.append(
                    gradients(plain, lambda own=own, chosen=chosen: losses(plain(*own[0], **own[1]), chosen, 1))
                )
            data.append((n, args, kwargs))
            alone.append(each)
        n, args, kwargs = data[0]
        with Float32() as inside:
            plain(*args, **kwargs)
        least = 1e-3 if inside.seen else 1e-6  # what float32 leaves of a small entry is rounding
        apart = max(
            distance(gradients(plain, lambda i=i: losses(plain(*args, **kwargs), chosen, n)[i]), alone[0][i], least)[0]
            for i in range(n)
        )
        found |= ({"mixes": True} if apart > 1e-4 else {}) | ({"float32": True} if inside.seen else {})
    except NotRunnable as error:
        return found | {"status": "not runnable", "message": str(error)}
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name in (
            "timm",
            "vit_pytorch",
            "transformers",
            "peft",
        )
        return found | {"status": "not installed" if missing else "not runnable", "message": str(error)}
    except Exception as error:
        return found | {"status": "not runnable", "message": last_line(error)}
    ran()
    tolerance = TOLERANCE * (10 if inside.seen else 1)
    worst = (0.0, "")
    try:
        for clipping in ("per-layer", "flat"):
            groups = make_groups(model, clipping)
            sums, bounds = clipped(alone[0], groups)
            clipper = Clipper(model, groups, bounds=bounds, loss_reduction="mean")
            for which, ((n, args, kwargs), each) in enumerate(zip(data, alone, strict=True)):
                if which:
                    sums = clipped_at(each, groups, bounds)
                got = gradients(model, lambda: losses(model(*args, **kwargs), chosen, n).mean())  # noqa: B023
                off, name = distance(got, sums, least)
                worst = max(worst, (off, f"{clipping}, batch {which + 1}, parameter {name!r}"))
            clipper.detach()
    except GradveilError as error:
        return found | {"status": "refused", "message": f"{type(error).__name__}: {error}"}
    except Exception as error:
        return found | {"status": "crashed", "message": last_line(error)}
    if worst[0] > tolerance:
        return found | {"status": "wrong", "message": f"{worst[0]:.2g} off: {worst[1]}"}
    return found | {"status": "right", "off": worst[0]}


def clipped_at(each: Sequence[dict[str, Tensor]], groups: Any, bounds: Sequence[float]) -> dict[str, Tensor]:
    sums = {name: torch.zeros_like(g) for name, g in each[0].items()}
    for group, bound in zip(groups, bounds, strict=True):
        for g in each:
            norm = float(torch.sqrt(sum((g[name].double() ** 2).sum() for name in group.parameters)))
            for name in group.parameters:
                sums[name] += min(1.0, bound / norm if norm else 1.0) * g[name]
    return sums


def alone_in_a_process(make: Callable[[], Made]) -> dict[str, Any]:
    """Forked: what is imported is there already, and a crash is this network's own."""
    ours, theirs = get_context("fork").Pipe()

    def work() -> None:
        def stop(*_: Any) -> None:
            raise TimeoutError(f"more than {SECONDS} s")

        warnings.simplefilter("ignore")
        signal.signal(signal.SIGALRM, stop)
        signal.alarm(SECONDS)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        theirs.send(examine(make, lambda: theirs.send(None)))

    process = get_context("fork").Process(target=work)
    process.start()
    theirs.close()
    found: dict[str, Any] | None = None
    failed = {"status": "not runnable", "message": f"does not run within {SECONDS} s without gradveil"}
    try:
        while found is None and ours.poll(SECONDS + 30):
            found = ours.recv()
            failed = {"status": "crashed", "message": "does not end"}
    except EOFError:
        failed["message"] = "the process died" if failed["status"] == "crashed" else failed["message"]
    if process.is_alive():
        process.join(1)
        process.kill()
    process.join()
    return found or failed


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the clipped sums of many networks with the oracle.")
    parser.add_argument("--only", default="", help="networks whose names have this in them")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/zoo.json"))
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: make for name, make in everything().items() if args.only in name}
    if args.list:
        print("\n".join(chosen))
        return
    found: dict[str, Any] = {}
    for name, make in chosen.items():
        start = time.perf_counter()
        found[name] = alone_in_a_process(make) | {"seconds": round(time.perf_counter() - start, 1)}
        one = found[name]
        print(f"{one['status']:<14}{name} ({one['seconds']} s) {one.get('message', '')[:300]}", flush=True)
        counts = dict(Counter(one["status"] for one in found.values()))
        versions = {
            package: v for package in ("transformers", "peft", "timm", "vit-pytorch") if (v := version(package))
        }
        results = {"what": "clipped sums of networks nobody here wrote, against one example at a time"}
        results |= description("cpu", 1)
        results["versions"] |= versions
        write(args.out, results | {"counts": counts, "networks": found})
    print(counts)


if __name__ == "__main__":
    main()
