"""Small audits on digits: a network of a few layers, an auditor, and settings that are decisive in seconds."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from gradveil import audit
from gradveil.training import data


def layers(*sizes: int, seed: int = 0) -> nn.Sequential:
    """Linear layers without biases, tanh between them."""
    torch.manual_seed(seed)
    made: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        made += [nn.Linear(before, after, bias=False), nn.Tanh()]
    return nn.Sequential(*made[:-1])


class UsedTwice(nn.Module):
    """One square layer that every example goes through twice; its first ten outputs are the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            self.shared.weight.copy_(torch.eye(64))  # the gradients of both uses point the same way

    def forward(self, x):
        return self.shared(torch.tanh(self.shared(x.flatten(1))))[:, :10]


def setting(model=None, *, examples=8, sample_rate=1.0, calm=0.1, lr=0.01, physical=None, **engine):
    loaded = data.load("digits")
    return audit.Setting(
        engine={"strategy": "baseline", "clip": 1.0, "sigma": 1.0, "delta": 1e-5} | engine,
        model=layers(64, 16, 10) if model is None else model,
        x=loaded.x_test[:examples],
        y=loaded.y_test[:examples],
        sample_rate=sample_rate,
        calm=calm,
        lr=lr,
        physical_batch_size=physical,
    )
