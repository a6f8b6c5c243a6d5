"""A user's own loop on small data, for the engine's tests."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradveil
from gradveil.mechanism.release import Releaser

N, CLASSES = 60, 3


def dataset(seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 1, 5, 5, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (N,), generator=generator))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, CLASSES))


def start(*, batch_size=10, optimizer="sgd", model=None, physical=None, lr=0.1, **settings):
    """An engine around a small model: engine, model, optimizer, loader."""
    model = network() if model is None else model
    made = {
        "sgd": lambda p: torch.optim.SGD(p, lr=lr),
        "momentum": lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, lr=lr),
        "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=lr, foreach=True),
    }[optimizer](model.parameters())
    engine = gradveil.PrivacyEngine(
        **{"strategy": "baseline", "clip": 1.0, "sigma": 2.0, "steps": 12, "delta": 1e-3} | settings
    )
    loader = DataLoader(dataset(), batch_size=batch_size, shuffle=True)
    return engine, *engine.make_private(module=model, optimizer=made, data_loader=loader, physical_batch_size=physical)


def run(engine, model, optimizer, loader, after_backward=None):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if after_backward is not None:
            after_backward()
        optimizer.step()


def in_double(loader) -> None:
    """The loader's data in double precision, for models that are."""
    loader._tensors = tuple(t.double() if t.is_floating_point() else t for t in loader._tensors)


@contextmanager
def without_noise():
    """Releases in here are made and recorded as ever, and are the means of clipped gradients."""

    def divide(self, sums, scale, noise):
        for total in sums.values():
            total.div_(self.batch_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Releaser, "add_noise", divide)
        yield


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
