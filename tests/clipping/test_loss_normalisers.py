"""A loss is a mean, or a sum, over the examples: what it is divided by must not depend on what the examples are."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gradveil.errors import UnsupportedModelError
from loops import start


def train(loss, *, steps=6, **settings):
    """With every batch checked."""
    engine, model, _, loader = start(steps=steps, spot_checks=1.0, **settings)
    for x, y in loader:
        loss(model(x), y).backward()
    return engine


def each(out, y):
    return F.cross_entropy(out, y, reduction="none")


MEANS = {
    "mean": lambda o, y: F.cross_entropy(o, y),
    "mean of each": lambda o, y: each(o, y).mean(),
    "sum over the length": lambda o, y: F.cross_entropy(o, y, reduction="sum") / max(len(y), 1),
    "sum times one over the length": lambda o, y: each(o, y).sum() * (1.0 / max(len(y), 1)),
    "sum over the shape, with a small number": lambda o, y: each(o, y).sum() / (o.shape[0] + 1e-8),
    "sum over a tensor": lambda o, y: each(o, y).sum() / torch.tensor(float(max(len(y), 1))),
    "indexed by places": lambda o, y: -F.log_softmax(o, 1)[torch.arange(len(y)), y].mean(),
    "one-hot": lambda o, y: F.mse_loss(o.softmax(1), F.one_hot(y, 3).float()),
    "over elements": lambda o, y: (o - F.one_hot(y, 3)).square().sum() / max(o.numel(), 1),
    "weights of each example's own": lambda o, y: (each(o, y) * (1 + y)).mean(),
    "viewed": lambda o, y: F.cross_entropy(o.view(len(y), 3), y.view(-1)),
    "times a constant": lambda o, y: 10.0 * F.cross_entropy(o, y),
    "times a constant that may be the batch's size": lambda o, y: 10 * F.cross_entropy(o, y),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_are_fine(name):
    assert len(train(MEANS[name]).releases) == 6


@pytest.mark.parametrize("name", ["mean", "sum over the length", "indexed by places"])
@pytest.mark.parametrize("sampling", ["poisson", "without-replacement"])
def test_means_are_fine_under_any_sampling(name, sampling):
    assert len(train(MEANS[name], sampling=sampling).releases) == 6


def test_a_sum_is_fine_where_it_is_declared():
    assert len(train(lambda o, y: F.cross_entropy(o, y, reduction="sum"), loss_reduction="sum").releases) == 6


def masked(out, y):
    """Labels of 0 do not count: one label changes the weight of all the others."""
    mask = (y > 0).float()
    return (each(out, y) * mask).sum() / mask.sum().clamp(min=1)


def balanced(out, y):
    counts = torch.bincount(y, minlength=3).float().clamp(min=1)
    return (each(out, y) / counts[y]).sum() / 3


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (lambda o, y: F.cross_entropy(o, y, reduction="sum"), {}),
        (lambda o, y: F.cross_entropy(o, y), {"loss_reduction": "sum"}),
        (lambda o, y: F.cross_entropy(o, y) * len(y), {}),
        (masked, {}),
        (lambda o, y: each(o, y).sum() / 7.0, {}),
        (balanced, {}),
    ],
    ids=["sum as mean", "mean as sum", "mean times the length", "labels that count", "a constant", "class counts"],
)
def test_other_normalisers_are_refused(loss, settings):
    with pytest.raises(UnsupportedModelError, match="normaliser is not the number of examples"):
        train(loss, steps=12, **settings)
