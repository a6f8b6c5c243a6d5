"""The ways of taking one training step that are measured beside each other: one function each.

A mode is made from a workload and a device and gives a step: a callable that takes one step on a fixed batch. It
returns None, or the seconds it took where it measured them itself, in another process. A mode that does not apply to
a workload, or whose library is not there, raises :class:`LeftOut` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jax_peer import JaxStep, LeftOut
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from workloads import Workload

import gradveil
from gradveil.clipping.backends import layers, native
from gradveil.mechanism.sampling import Ticket

Step = Callable[[], float | None]


def _model_and_data(w: Workload, device: str, channels_last: bool) -> tuple[nn.Module, Tensor, Tensor]:
    model = w.make().to(device)
    x, y = w.data(device)
    if channels_last:
        if not w.images:
            raise LeftOut("no images: there are no channels to put last")
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return model, x, y


def plain(w: Workload, device: str, *, channels_last: bool = False) -> Step:
    model, x, y = _model_and_data(w, device, channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def private(w: Workload, device: str, clipping: str, *, channels_last: bool = False) -> Step:
    """The user's loop on a fixed batch; sampling is left out of both sides."""
    model, x, y = _model_and_data(w, device, channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = _engine(model, optimizer, x, y, clipping)

    def step() -> None:
        _hand_out(engine, w.batch)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _engine(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, clipping: str) -> gradveil.PrivacyEngine:
    engine = gradveil.PrivacyEngine(
        strategy="baseline", clip=1.0, sigma=1.0, steps=10**5, delta=1e-9, clipping=clipping
    )
    engine.make_private(module=model, optimizer=optimizer, data_loader=TensorDataset(x, y), batch_size=len(x))
    return engine


def _hand_out(engine: gradveil.PrivacyEngine, batch: int) -> None:
    """What the private loader does when it gives a batch: the step is then one like any other."""
    ticket = Ticket(engine.step, drawn=batch, size=batch, last=True)
    engine._batches.hand_out(ticket, loop=engine._batches.loop, step=engine.step)


def plain_captured(w: Workload, device: str) -> Step:
    """Plain SGD as one CUDA graph, as PyTorch's manual does it; each batch is copied into the graph's input."""
    model, x, y = _model_and_data(w, device, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = x.clone(), y.clone()

    def work() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def step() -> None:
        inputs.copy_(x)
        targets.copy_(y)
        graph.replay()

    step.keeps = (model, optimizer)  # type: ignore[attr-defined]  # whose memory the graph works on
    return step


def private_captured(w: Workload, device: str, clipping: str) -> Step:
    """gradveil.cuda_graph_step on a fixed batch."""
    model, x, y = _model_and_data(w, device, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = _engine(model, optimizer, x, y, clipping)
    captured = gradveil.cuda_graph_step(engine, F.cross_entropy)

    def step() -> None:
        _hand_out(engine, w.batch)
        captured(x, y)

    for _ in range(5):
        step()  # eager at first, then captured
    return step


@contextmanager
def pure_pytorch() -> Iterator[None]:
    """What GRADVEIL_NATIVE=0 chooses, switched inside a process: no compiled kernel is found."""
    nothing = (None, "PyTorch (chosen by the benchmark)")
    modules: tuple[Any, ...] = (native, layers)
    found = [(module, module._load) for module in modules]
    for module, _ in found:
        module._load = lambda: nothing
    try:
        yield
    finally:
        for module, own in found:
            module._load = own


def private_pure(w: Workload, device: str, clipping: str) -> Step:
    """The same step as ``private`` without compiled kernels, made and taken so."""
    if native.kernels() is None:
        raise LeftOut(f"the other rows are pure PyTorch already: {native.status()}")
    with pure_pytorch():
        inner = private(w, device, clipping)

    def step() -> None:
        with pure_pytorch():
            inner()

    return step


def opacus(w: Workload, device: str, mode: str) -> Step:
    try:
        from opacus import PrivacyEngine
    except ImportError as error:
        raise LeftOut(f"Opacus is not installed ({error})") from error
    model = (w.make_for_opacus or w.make)().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = w.data(device)
    loader = DataLoader(TensorDataset(x, y), batch_size=w.batch)
    criterion: Any = nn.CrossEntropyLoss()
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


def jax(w: Workload, device: str, *, private: bool) -> Step:
    """A step in a process of its own, which takes its turn when told to. ``private`` is JAX-Privacy's clipped_grad."""
    return JaxStep(w, threads=torch.get_num_threads(), private=private)


@dataclass(frozen=True)
class Mode:
    make: Callable[[Workload, str], Step]
    base: str = "sgd"  # the plain step that it is compared with, beside "sgd"
    devices: tuple[str, ...] = ("cpu", "cuda")
    memory: bool = True  # whether its peak memory is measured on the CPU


CPU = ("cpu",)
LAST = "sgd, channels_last"
GRAPH = "sgd, captured"
MODES: dict[str, Mode] = {
    "sgd": Mode(plain),
    "gradveil per-layer": Mode(lambda w, d: private(w, d, "per-layer")),
    "gradveil per-layer, pure PyTorch": Mode(lambda w, d: private_pure(w, d, "per-layer"), devices=CPU),
    "gradveil flat": Mode(lambda w, d: private(w, d, "flat")),
    LAST: Mode(lambda w, d: plain(w, d, channels_last=True), base=LAST, devices=CPU, memory=False),
    "gradveil per-layer, channels_last": Mode(
        lambda w, d: private(w, d, "per-layer", channels_last=True), base=LAST, devices=CPU, memory=False
    ),
    GRAPH: Mode(plain_captured, base=GRAPH, devices=("cuda",)),
    "gradveil per-layer, captured": Mode(
        lambda w, d: private_captured(w, d, "per-layer"), base=GRAPH, devices=("cuda",)
    ),
    "gradveil flat, captured": Mode(lambda w, d: private_captured(w, d, "flat"), base=GRAPH, devices=("cuda",)),
    "opacus hooks": Mode(lambda w, d: opacus(w, d, "hooks")),
    "opacus functorch": Mode(lambda w, d: opacus(w, d, "functorch"), memory=False),
    "opacus ew": Mode(lambda w, d: opacus(w, d, "ew"), memory=False),
    "opacus ghost": Mode(lambda w, d: opacus(w, d, "ghost")),
    "jax sgd": Mode(lambda w, d: jax(w, d, private=False), base="jax sgd", devices=CPU, memory=False),
    "jax-privacy": Mode(lambda w, d: jax(w, d, private=True), base="jax sgd", devices=CPU, memory=False),
}


def default_modes(device: str) -> list[str]:
    return [name for name, mode in MODES.items() if device.partition(":")[0] in mode.devices]
