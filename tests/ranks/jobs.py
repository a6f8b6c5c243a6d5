"""What the processes of a test do. Each job runs on every rank and returns what the test looks at.

Run by :func:`on_ranks`: processes are started anew, as torchrun would, and speak through gloo.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import gradveil
from gradveil.mechanism import strategies

N, CLASSES = 90, 3
STRATEGIES = strategies.names()


def on_ranks(count: int, job: Callable[..., Any], tmp_path: Path, *arguments: Any) -> list[Any]:
    """The results of a job on each of some ranks."""
    folder = Path(tmp_path) / f"ranks-{count}-{job.__name__}"
    folder.mkdir(parents=True)
    if count == 1:
        return [job(*arguments)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_rank, (count, port, folder, job, arguments), nprocs=count, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _rank(rank: int, count: int, port: int, folder: Path, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count)
    try:
        torch.save(job(*arguments), folder / f"{rank}.pt")
        if job is not left_alone:
            dist.barrier()
        os._exit(0)  # gloo sometimes aborts where a group is taken down while another member leaves it
    except Exception:
        traceback.print_exc()
        raise


# ---- jobs


def dataset(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 1, 5, 5, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(0, CLASSES, (N,), generator=generator))


def network(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    return nn.Sequential(*layers).to(dtype)


class _Watched(TensorDataset):
    """Notes which examples were taken."""

    def __init__(self, inner: TensorDataset) -> None:
        super().__init__(*inner.tensors)
        self.taken: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.taken.append(int(index))
        return super().__getitem__(index)


def trained(strategy: str, *, steps: int = 50, wrap: str = "none", physical: int | None = None, **settings: Any) -> Any:
    """A run: its weights, its releases, and which examples of each step this rank had."""
    model = network(seed=dist.get_rank() if dist.is_initialized() else 0)  # the first rank's are taken
    if dist.is_initialized() and wrap == "before":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    private = {} if strategy == "non-private" else {"clip": 1.0, "sigma": 2.0, "allow_unproved": True}
    engine = gradveil.PrivacyEngine(strategy=strategy, steps=steps, delta=1e-3, seed=5, **private, **settings)
    data = _Watched(dataset())
    model, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=data, batch_size=12, physical_batch_size=physical
    )
    loader._tensors = None
    loader._loader = torch.utils.data.DataLoader(
        data, batch_sampler=loader._batches, collate_fn=_collate_with_empty(data)
    )
    if dist.is_initialized() and wrap == "after":
        model = DistributedDataParallel(model)
    taken: dict[int, list[int]] = {}
    for x, y in loader:
        step = engine.step
        taken.setdefault(step, []).extend(data.taken)
        data.taken.clear()
        optimizer.zero_grad()
        x, y = with_views(x, y, engine.settings.views)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    inner = engine.module
    return {
        "weights": torch.cat([p.detach().flatten() for p in inner.parameters()]),
        "releases": [r.to_dict() | {"digest": None} for r in engine.releases],
        "taken": {step: sorted(indices) for step, indices in taken.items()},
    }


def with_views(x: torch.Tensor, y: torch.Tensor, views: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of each example and its mirror image, where there are two views."""
    return torch.stack([x, x.flip(-1)][:views], dim=1).flatten(0, 1), y.repeat_interleave(views)


def _collate_with_empty(data: TensorDataset) -> Callable[[list[Any]], Any]:
    from torch.utils.data import default_collate

    def collate(examples: list[Any]) -> Any:
        if examples:
            return default_collate(examples)
        x, y = data.tensors
        return [x[:0], y[:0]]

    return collate


def every_strategy() -> dict[str, Any]:
    return {name: trained(name) for name in STRATEGIES}


def every_way() -> dict[str, Any]:
    """Wrapped in DDP before or after, flat, in physical parts, other samplers, several views."""
    return {
        "before": trained("baseline", wrap="before"),
        "after": trained("baseline", wrap="after"),
        "flat": trained("baseline", clipping="flat", wrap="before"),
        "parts": trained("quantile-clip", physical=3),
        "parts, plain": trained("non-private", physical=3),
        "without replacement": trained("baseline", sampling="without-replacement"),
        "with replacement": trained("baseline", sampling="with-replacement"),
        "pure": trained("baseline", steps=20),
        "views": trained("baseline", steps=20, views=2),
        "lattice": trained("baseline", steps=20, noise="lattice"),
        "lattice, whitened": trained("adaclip", steps=20, noise="lattice", wrap="before"),
        "views, parts": trained("dyn-s-l2max", steps=20, clipping="flat", views=2, physical=3),
    }


class _Wide(nn.Module):
    """Parameters with enough coordinates for a test of their noise, and no gradient of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 40_000, bias=False), nn.Linear(1, 30_000, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.0 * (self.first(x).sum(1, keepdim=True) + self.second(x).sum(1, keepdim=True))


def noise_alone() -> dict[str, Any]:
    """What a step releases of a batch without gradients: its noise; and what this rank added to it."""
    torch.manual_seed(0)
    model = _Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = gradveil.PrivacyEngine(clip=2.0, sigma=3.0, steps=2, delta=1e-3, seed=11)
    data = TensorDataset(torch.ones(40, 1), torch.zeros(40, 1))
    model, _, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=data, batch_size=10)
    added: list[list[torch.Tensor]] = []
    add_up = engine.ranks.add_up

    def noting(tensors: Any) -> None:
        added.append([t.clone().flatten() for t in tensors])
        add_up(tensors)

    engine.ranks.add_up = noting  # type: ignore[method-assign]
    released = []
    for x, y in loader:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        released.append(torch.cat([p.grad.flatten() for p in model.parameters()]) * 10.0)
    return {"released": released, "added": [torch.cat(parts) * 10.0 for parts in added]}


def without_a_seed() -> dict[str, Any]:
    """Ranks that were given no seed agree on a key."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=2.0, steps=5, delta=1e-3)
    model, _, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=dataset(), batch_size=12)
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"weights": torch.cat([p.detach().flatten() for p in model.parameters()]), "sizes": sizes}


def refused() -> dict[str, str]:
    """Ranks that do not agree are told so, all of them."""
    rank = dist.get_rank()
    found = {}
    for what, settings in {
        "seed": {"seed": rank},
        "sigma": {"sigma": 2.0 + rank},
        "strategy": {"strategy": ("baseline", "normalised")[rank]},
    }.items():
        model = network()
        engine = gradveil.PrivacyEngine(**{"clip": 1.0, "sigma": 2.0, "steps": 3, "delta": 1e-3, "seed": 1} | settings)
        try:
            engine.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=dataset(),
                batch_size=12,
            )
            found[what] = "taken"
        except gradveil.errors.ConfigError as error:
            found[what] = str(error)
    return found


def resumed(run_dir: str, begin: bool, seed: int | None) -> dict[str, Any]:
    """20 steps of 40 with a checkpoint at 12, or the rest from there."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"clip": 1.0, "sigma": 2.0, "steps": 40, "delta": 1e-3, "seed": seed}
    engine = gradveil.PrivacyEngine(**settings, run_dir=run_dir, resume=not begin)
    model, _, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=dataset(), batch_size=12)
    kept = Path(run_dir) / "kept.pt"
    if not begin:
        state = torch.load(kept, weights_only=False)
        model.load_state_dict(state["model"])
        engine.load_state_dict(state["engine"])
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if begin and engine.step == 12 and engine.ranks.is_first:
            torch.save({"model": model.state_dict(), "engine": engine.state_dict()}, kept)
        if begin and engine.step == 20:
            break
    engine.commit()
    if not begin:
        engine.close()
    return {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "releases": len(engine.releases),
        "has_file": engine.ledger.path is not None,
    }


def left_alone() -> str:
    """The second rank ends in the middle of the run; what the first one is told."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=2.0, steps=40, delta=1e-3, seed=1)
    model, _, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=dataset(), batch_size=12)
    try:
        for x, y in loader:
            if engine.step == 7 and not engine.ranks.is_first:
                return "ended"
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    except gradveil.errors.RankLost as error:
        return str(error)
    return "finished"


# ---- models that are cut over ranks


class _Sequence(nn.Module):
    """A small language model: a tied embedding, a norm, attention-free mixing; and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.mix, self.conv = nn.Linear(6, 6), nn.Conv1d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.mix(self.norm(self.embed(x))))
        return self.head(self.conv(h.mT).mT).mean(1)


def sharded(
    way: str, strategy: str, clipping: str, tie: bool, physical: int | None = None, views: int = 1, noise: str = "auto"
) -> Any:
    """``way``: alone, ddp or fsdp. The whole weights at the end."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model: nn.Module = _Sequence()
    if tie:
        model.head.weight = model.embed.weight
    if way == "ddp":
        model = DistributedDataParallel(model)
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model.mix, model.conv, model.norm):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 11, (80, 5), generator=generator)
    y = torch.randint(0, 11, (80,), generator=generator)
    settings = {"clip": 0.5, "sigma": 1.0, "steps": 20, "delta": 1e-3, "seed": 5, "allow_unproved": True}
    engine = gradveil.PrivacyEngine(strategy=strategy, clipping=clipping, views=views, noise=noise, **settings)
    model, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=TensorDataset(x, y),
        batch_size=6,
        physical_batch_size=physical,
    )
    for batch in loader:
        inputs, targets = with_views(*batch, views)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    weights = [gradveil.clipping.sharding.full_tensor(p.detach()).flatten() for p in engine.module.parameters()]
    return {"weights": torch.cat(weights), "releases": [r.to_dict() | {"digest": None} for r in engine.releases]}


WAYS = [
    ("baseline", "per-layer", False, None),
    ("baseline", "flat", False, None),
    ("baseline", "per-layer", True, None),
    ("baseline", "flat", True, 2),
    ("quantile-clip", "per-layer", False, 2),
    ("normalised", "per-layer", False, None),
    ("dyn-s-l2max", "per-layer", False, None),
    ("baseline", "per-layer", False, None, 2),
    ("baseline", "flat", True, 2, 2),
    ("baseline", "per-layer", True, None, 1, "lattice"),
]


def every_sharding(way: str) -> list[Any]:
    return [sharded(way, *settings) for settings in WAYS]
