"""Seconds of one private step of networks outside the eight workloads, beside one plain step, interleaved in one run.

    python benchmarks/any_network.py --seconds 10 --out benchmarks/results/any_network_cpu.json

Networks as people write them: bare parameters (class token, positions, layer scale), packed attention, recurrent layers
and a loop over cells. Steps take turns; medians and quartiles; ratios are of medians. AdamW; no sampling on either
side.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import description, write
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gradveil
from gradveil.mechanism.sampling import Ticket

CLASSES = 10


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.scale = nn.Parameter(1e-6 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.scale * self.down(F.gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


def convnext(dim: int = 64, depth: int = 4) -> nn.Module:
    blocks = [ConvNeXtBlock(dim) for _ in range(depth)]
    return nn.Sequential(
        nn.Conv2d(3, dim, 4, stride=4), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dim, CLASSES)
    )


class ViT(nn.Module):
    """A class token and learned positions, as in the original."""

    def __init__(self, dim: int = 192, depth: int = 4, patch: int = 4, size: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, dim))
        layer = nn.TransformerEncoderLayer(
            dim, 4, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], dim=1) + self.positions
        out: Tensor = self.head(self.norm(self.body(h)[:, 0]))
        return out


class Encoder(nn.Module):
    def __init__(self, dim: int = 192, depth: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).mean(1))
        return out


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
        )
        self.norms = nn.ModuleList([nn.GroupNorm(16, outputs), nn.GroupNorm(16, outputs)])
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 or inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(h + (x if self.short is None else self.short(x)))


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(16, 64), nn.ReLU()]
    width = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(width, outputs, stride), Residual(outputs, outputs, 1)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], inputs: int = 64, size: int = 128) -> None:
        super().__init__()
        self.layer, self.head = kind(inputs, size, batch_first=True), nn.Linear(size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x)[0][:, -1])
        return out


class CellLoop(nn.Module):
    def __init__(self, inputs: int = 64, size: int = 128) -> None:
        super().__init__()
        self.cell, self.head, self.size = nn.LSTMCell(inputs, size), nn.Linear(size, CLASSES), size

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), self.size)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        out: Tensor = self.head(h)
        return out


IMAGE, SEQUENCE = (3, 32, 32), (32, 64)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, float]] = {
    # what, shape of an example, batch, the ratio that is asked for
    "ConvNeXt": (convnext, IMAGE, 64, 1.35),
    "ViT with class token": (ViT, IMAGE, 32, 1.35),
    "nn.TransformerEncoder": (Encoder, (64, 192), 32, 1.35),
    "ResNet-18, GroupNorm": (resnet18, IMAGE, 16, 1.35),
    "nn.LSTM": (lambda: Recurrent(nn.LSTM), SEQUENCE, 64, 2.5),
    "nn.GRU": (lambda: Recurrent(nn.GRU), SEQUENCE, 64, 2.5),
    "LSTMCell loop": (CellLoop, SEQUENCE, 64, 4.0),
}


def plain_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def private_step(model: nn.Module, x: Tensor, y: Tensor, clipping: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=10**5, delta=1e-9, clipping=clipping)
    engine.make_private(module=model, optimizer=optimizer, data_loader=TensorDataset(x, y), batch_size=len(x))

    def step() -> None:
        ticket = Ticket(engine.step, drawn=len(x), size=len(x), last=True)
        engine._batches.hand_out(ticket, loop=engine._batches.loop, step=engine.step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def measured(name: str, seconds: float) -> dict[str, Any]:
    make, shape, batch, asked = NETWORKS[name]
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(batch, *shape), torch.randint(0, CLASSES, (batch,))
    steps = {"plain": plain_step(copy.deepcopy(model), x, y)}
    for clipping in ("per-layer", "flat"):
        steps[clipping] = private_step(copy.deepcopy(model), x, y, clipping)
    for step in steps.values():
        for _ in range(4):  # the first batches are checked
            step()
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 9:
        for mode, step in steps.items():
            start = time.perf_counter()
            step()
            times[mode].append(time.perf_counter() - start)
    base = statistics.median(times["plain"])
    return {
        "batch": batch,
        "asked": asked,
        "parameters": sum(p.numel() for p in model.parameters()),
        "rows": {
            mode: {
                "median_ms": round(1e3 * statistics.median(found), 3),
                "quartiles_ms": [round(1e3 * q, 3) for q in statistics.quantiles(found, n=4)[::2]],
                "ratio": round(statistics.median(found) / base, 3),
                "n": len(found),
            }
            for mode, found in times.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each network")
    parser.add_argument("--only", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    networks = {}
    for name in options.only:
        networks[name] = measured(name, options.seconds)
        print(name, {mode: row["ratio"] for mode, row in networks[name]["rows"].items()}, flush=True)
    write(options.out, {"what": __doc__, **description("cpu", options.threads), "networks": networks})


if __name__ == "__main__":
    main()
