"""The six workloads that speed is measured on, and the paper's own networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.training.models import paper_cnn, paper_mlp


def cnn(channels: int, size: int, classes: int) -> nn.Module:
    """5x5 convolutions of 32 and 64 channels, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (size // 4) ** 2, classes),
    )


class WideBlock(nn.Module):
    """Pre-activation residual block with group norms."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(16, inputs), nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.GroupNorm(16, outputs), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs or stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        z = F.relu(self.norm1(x))
        out = self.conv2(F.relu(self.norm2(self.conv1(z))))
        return out + (x if self.short is None else self.short(z))


def wide_resnet() -> nn.Module:
    """WRN-16-4 with GroupNorm."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    width = 16
    for stage, stride in ((64, 1), (128, 2), (256, 2)):
        layers += [WideBlock(width, stage, stride), WideBlock(stage, stage, 1)]
        width = stage
    tail = [nn.GroupNorm(16, width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*layers, *tail)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attend = nn.LayerNorm(width), Attention(width, 4)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """d = 256, 4 blocks, 65 tokens: 64 patches of 4x4 and a class token.

    ``expand`` looks every example's positions up by itself: the same numbers, in a form that Opacus takes.
    """

    def __init__(self, *, expand: bool = False) -> None:
        super().__init__()
        self.expand = expand
        self.patch = nn.Conv2d(3, 256, 4, 4)
        self.position = nn.Embedding(65, 256)
        self.blocks = nn.Sequential(*(Block(256) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([tokens.new_zeros(len(x), 1, 256), tokens], 1)
        index = torch.arange(65, device=x.device)
        tokens = tokens + self.position(index.repeat(len(x), 1) if self.expand else index)
        return self.head(self.norm(self.blocks(tokens))[:, 0])


@dataclass(frozen=True)
class Workload:
    name: str
    what: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int
    make_for_opacus: Callable[[], nn.Module] | None = None  # the same network, where Opacus needs it written otherwise

    @property
    def images(self) -> bool:
        return len(self.shape) == 3

    def data(self, device: str = "cpu", batches: int = 1) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(self.batch * batches, *self.shape, generator=generator)
        y = torch.randint(0, self.classes, (self.batch * batches,), generator=generator)
        return x.to(device), y.to(device)


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", "CNN 5x5, 28x28x1", lambda: cnn(1, 28, 10), (1, 28, 28), 10, 600),
        Workload("W2", "CNN 5x5, 32x32x3", lambda: cnn(3, 32, 10), (3, 32, 32), 10, 500),
        Workload("W3", "CNN 5x5, 32x32x3, 62 classes", lambda: cnn(3, 32, 62), (3, 32, 32), 62, 22),
        Workload(
            "W4",
            "MLP 600-256-128-10",
            lambda: nn.Sequential(nn.Linear(600, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)),
            (600,),
            10,
            100,
        ),
        Workload("W5", "WRN-16-4, GroupNorm, 32x32x3", wide_resnet, (3, 32, 32), 10, 64),
        Workload(
            "W6",
            "ViT d=256, 4 blocks, 65 tokens",
            VisionTransformer,
            (3, 32, 32),
            10,
            64,
            make_for_opacus=lambda: VisionTransformer(expand=True),
        ),
        Workload("P1", "the paper's CNN, 28x28x1", lambda: paper_cnn((1, 28, 28), 10), (1, 28, 28), 10, 600),
        Workload("P2", "the paper's MLP, 600", lambda: paper_mlp(600, 10), (600,), 10, 100),
    )
}
