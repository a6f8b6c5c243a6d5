"""A captured step is the eager one: the same samples, noise, releases and, to rounding, weights."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gradveil
from gradveil.captured import _per_example
from gradveil.errors import ConfigError

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def begin(device="cuda", *, batch_size=20, clipping="per-layer", strategy="baseline", physical=None, seed=3, lr=0.01):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 10)
    ).to(device)
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(400, 1, 14, 14, generator=generator).to(device)
    y = torch.randint(0, 10, (400,), generator=generator).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    settings = {} if strategy == "non-private" else {"clip": 1.0, "sigma": 1.0, "allow_unproved": True}
    engine = gradveil.PrivacyEngine(strategy=strategy, steps=100, delta=1e-4, seed=seed, clipping=clipping, **settings)
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=TensorDataset(x, y),
        batch_size=batch_size,
        physical_batch_size=physical,
    )
    return engine, model, optimizer, loader


def eagerly(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_captured_step_needs_a_gpu():
    engine, *_ = begin("cpu")
    with pytest.raises(ConfigError, match="CUDA graph"):
        gradveil.capture(engine, F.cross_entropy)


def test_a_captured_step_needs_a_run():
    with pytest.raises(ConfigError, match="make_private"):
        gradveil.capture(gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=3), F.cross_entropy)


def test_a_loss_that_averages_is_refused_or_told_not_to():
    output, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    assert _per_example(F.cross_entropy)(output, target).shape == (4,)
    assert _per_example(nn.CrossEntropyLoss(reduction="none"))(output, target).shape == (4,)
    with pytest.raises(ConfigError, match="reduction='none'"):
        _per_example(nn.CrossEntropyLoss())


@on_gpu
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("strategy", ["baseline", "dyn-s-decay", "dyn-sigma", "dyn-s-l2max", "adaclip", "non-private"])
def test_a_captured_run_is_the_eager_one(strategy, clipping, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    found = []
    for captured in (False, True):
        engine, model, optimizer, loader = begin(strategy=strategy, clipping=clipping)
        if captured:
            step = gradveil.capture(engine, F.cross_entropy)
            for x, y in loader:
                step(x, y)
        else:
            eagerly(model, optimizer, loader)
        found.append((weights(model), [replace(r, digest=None) for r in engine.releases]))
    (eager, releases), (graphed, recorded) = found
    assert float((eager - graphed).abs().max()) < 1e-5
    assert len(recorded) == len(releases)
    if "l2max" not in strategy:  # there the noise follows norms, which agree to rounding
        assert recorded == releases


@on_gpu
def test_batches_beyond_the_graph_and_empty_ones(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    found = []
    for capacity in (None, 8):
        engine, model, optimizer, loader = begin(batch_size=2)
        if capacity is None:
            eagerly(model, optimizer, loader)
        else:
            step = gradveil.capture(engine, F.cross_entropy, capacity=1)
            for x, y in loader:
                step(x, y)
        found.append(weights(model))
    assert float((found[0] - found[1]).abs().max()) < 1e-5


@on_gpu
def test_physical_parts(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    found = []
    for physical in (None, 7):
        engine, model, _, loader = begin(physical=physical)
        step = gradveil.capture(engine, F.cross_entropy)
        for x, y in loader:
            step(x, y)
        assert engine.step == 100
        found.append(weights(model))
    assert float((found[0] - found[1]).abs().max()) < 1e-5


@on_gpu
def test_a_learning_rate_that_changes_is_followed(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    found = []
    for captured in (False, True):
        engine, model, optimizer, loader = begin()
        step = gradveil.capture(engine, F.cross_entropy) if captured else None
        for i, (x, y) in enumerate(loader):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + i // 10)
            if step is not None:
                step(x, y)
            else:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        found.append(weights(model))
    assert float((found[0] - found[1]).abs().max()) < 1e-5


@on_gpu
def test_padding_that_is_not_finite_adds_nothing():
    engine, model, _, loader = begin(seed=None)
    step = gradveil.capture(engine, F.cross_entropy)
    for i, (x, y) in enumerate(loader):
        if i == 10 and len(x):
            x[-1] = float("nan")
        if i > 20:
            break
        loss = step(x, y)
    assert torch.isfinite(weights(model)).all() and torch.isfinite(loss)
    assert engine.not_finite_examples == 1
