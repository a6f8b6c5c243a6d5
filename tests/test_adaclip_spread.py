"""AdaClip's estimate of the spread: noise and the size of a layer decide where it goes, not the data."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch

from gradveil.clipping import Group
from gradveil.mechanism.clip_bounds import AdaClip
from gradveil.mechanism.strategies import parameters

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def spread(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("adaclip_spread")


@pytest.mark.parametrize("batch", [64, 600])
@pytest.mark.parametrize("share", [0.2, 0.6, 1.6, 5.0])
def test_layers_above_a_size_that_batch_and_sigma_set_grow_and_others_shrink(spread, batch, share):
    """The threshold is 2.07 (B / sigma)^2 coordinates."""
    sigma = 6.0
    size = max(50, round(share / spread.RECTIFIED * (batch / sigma) ** 2))
    expected = spread.predicted(size, batch, sigma)
    found = spread.measured(size, batch, sigma, steps=60, seed=2)
    assert (expected > 1) == (found > 1) == (share > 1)
    if expected < 1:
        assert found == pytest.approx(expected, abs=0.015)


def test_what_is_clipped_says_nothing_of_how_long_it_was():
    """Examples ten times as long give the same releases, and the same spread: it cannot be found from below."""

    def followed(length: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(4)
        rule = AdaClip(
            parameters("adaclip", steps=20, sigma=1.0), [Group("g", ("w",))], parameters={"w": torch.zeros(40)}
        )
        for _ in range(20):
            mean, scale = rule.whitening["w"]
            examples = length * torch.randn(30, 40, generator=generator)
            whitened = (examples - mean) / scale
            clipped = whitened / whitened.norm(dim=1, keepdim=True).clamp(min=1.0)
            assert bool((whitened.norm(dim=1) > 1).all())
            noised = mean + scale * (clipped.sum(0) + torch.randn(40, generator=generator)) / 30
            rule.learn((), {"w": noised}, 1.0, 30.0)
        return rule.spread["w"]

    near, far = followed(1e4), followed(1e5)
    assert torch.allclose(near, far, rtol=1e-3)


@pytest.mark.parametrize("size", [288, 5_000])
def test_the_spread_of_examples_by_the_batch_size_grows_in_every_layer(spread, size):
    """Times B, the rectified noise is B times as large too: the squared spread goes up whatever the layer's size."""
    batch, sigma, generator = 600, 6.0, torch.Generator().manual_seed(6)
    squares = torch.ones(size, dtype=torch.float64)
    for _ in range(30):
        scale = (squares.sqrt() * squares.sqrt().sum()).sqrt()
        directions = torch.randn(size, generator=generator, dtype=torch.float64) * math.sqrt(batch / size)
        noised = scale * (directions + sigma * torch.randn(size, generator=generator, dtype=torch.float64)) / batch
        found = batch * (noised.square() - (scale * sigma / batch) ** 2)
        squares = spread.BETA2 * squares + (1 - spread.BETA2) * found.clamp(min=1e-300)
    assert float(squares.mean()) > 5.0
