"""Cases in which other libraries were seen to give wrong sums or to crash. Each is a test of its own here."""

from __future__ import annotations

import gc

import pytest
import torch
from networks import FLOATS, IMAGES, CalledTwice, Keywords, Tied, compare
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gradveil
from gradveil.clipping import Clipper, make_groups


def data(shape, n=7):
    return torch.randn(n, *shape).double(), torch.randint(0, 3, (n,))


def both(model, shape):
    x, y = data(shape)
    for clipping in ("per-layer", "flat"):
        model.zero_grad()
        compare(model, x, y, clipping=clipping)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_convolutions_with_a_padding_mode(mode):
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)
    both(nn.Sequential(layer, nn.Flatten(), nn.Linear(192, 3)).double(), IMAGES)


def test_grouped_convolutions():
    both(nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(96, 3)).double(), (4, 6, 6))


def test_a_layer_norm_without_bias():
    both(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, bias=False), nn.Linear(8, 3)).double(), (6,))


def test_modules_called_with_keywords():
    both(Keywords().double(), IMAGES)


def test_a_module_called_twice():
    both(CalledTwice().double(), (6,))


def test_tied_weights():
    both(Tied().double(), (6,))


@pytest.mark.parametrize("name", ["mlp", "conv stride, padding", "group norm, prelu", "layer norm", "positions"])
def test_an_empty_batch(name):
    make, shape = FLOATS[name]
    model = make().double()
    x, y = data(shape, 0)
    for clipping in ("per-layer", "flat"):
        compare(model, x, y, clipping=clipping)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_a_clip_schedule_changes_the_clip_and_the_noise_together(clipping):
    """A peer shrinks the noise and leaves the clip: its real multiplier falls far below the accounted one."""
    engine = gradveil.PrivacyEngine(
        strategy="dyn-s-decay", clip=1.0, clip_end=1 / 16, sigma=1.0, steps=5, delta=1e-3, clipping=clipping
    )
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = torch.randn(40, 6) * 100, torch.randint(0, 3, (40,))
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=TensorDataset(x, y), batch_size=40
    )
    clipper, clipped = engine._clipper, []
    release = clipper.on_end

    def look_and_release():
        clipped.append(clipper.clip_stats.largest_of_all())
        release()

    clipper.on_end = look_and_release
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
    for largest, release in zip(clipped, engine.releases, strict=True):
        assert largest <= release.clip[0]
        assert release.noise_std[0] == release.clip[0] * 1.0
    assert clipped[-1] == pytest.approx(clipped[0] / 16, rel=1e-4)


def test_the_normaliser_does_not_depend_on_the_drawn_batch():
    """The mean is over the public expected batch size: the same sums give the same update for any number drawn."""
    updates = []
    for copies in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        engine = gradveil.PrivacyEngine(strategy="baseline", clip=1e-3, sigma=1e-6, steps=1, delta=1e-3)
        x, y = torch.ones(20, 4), torch.zeros(20, dtype=torch.long)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, _ = engine.make_private(
            module=model, optimizer=optimizer, data_loader=TensorDataset(x, y), batch_size=10
        )
        with pytest.warns(UserWarning, match="loader"):
            F.cross_entropy(model(x[: 5 * copies]), y[: 5 * copies]).backward()
        updates.append(model.weight.grad.clone())
    assert torch.allclose(updates[1], 2 * updates[0], rtol=1e-2)


def test_two_thousand_steps_leave_no_memory_behind():
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    for clipping in ("per-layer", "flat"):
        groups = make_groups(model, clipping)
        clipper = Clipper(model, groups, bounds=[1.0] * len(groups), loss_reduction="mean")
        x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))

        def count():
            gc.collect()
            return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

        for step in range(1000):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clipper.start_step()
            if step == 20:
                before = count()
        assert count() <= before + 5
        clipper.detach()
