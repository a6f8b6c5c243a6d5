"""A loss that the model computes itself: ``model(**batch).loss``."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from made import Made, follow
from torch import nn
from torch.nn import functional as F

from gradveil.errors import PrivacyViolation, UnsupportedModelError

B, T, D, C = 6, 5, 4, 3


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


def language(loss):
    def forward(m, x, y):
        logits = m.head(torch.tanh(m.body(x)))
        return SimpleNamespace(loss=loss(logits, y), logits=logits)

    return Made(forward, body=nn.Linear(D, 8), head=nn.Linear(8, C)).double()


def tokens(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def channels(logits, y):
    return F.cross_entropy(logits.transpose(1, 2), y, label_smoothing=0.1)


def weighted(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=torch.tensor([1.0, 2.0, 0.5]).double())


def likelihood(logits, y):
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), y.flatten(), ignore_index=-100)


def squared(logits, y):
    return ((logits.sum(-1) - y) ** 2).mean()


def batch(n=B, ignored=True):
    x, y = torch.randn(n, T, D).double(), torch.randint(0, C, (n, T))
    if ignored:
        y[torch.rand(n, T) < 0.4] = -100
        y[:, 0] = 1
    return x, y


def matches(clipper, plain, x, y, tolerance=1e-9):
    """Each example's loss is that of a batch of its own."""
    alone = []
    for i in range(len(x)):
        plain.zero_grad()
        plain(x[i : i + 1], y[i : i + 1]).loss.backward()
        alone.append({n: p.grad.clone() for n, p in plain.named_parameters()})
    clipper.module.zero_grad()
    clipper.start_step()
    clipper.module(x, y).loss.backward()
    for group, bound in zip(clipper.groups, clipper.weighing.bounds, strict=True):
        norms = [float(torch.sqrt(sum(g[n].square().sum() for n in group.parameters))) for g in alone]
        for n, p in clipper.module.named_parameters():
            if n in group.parameters:
                expected = sum(g[n] * min(1.0, bound / norm) for g, norm in zip(alone, norms, strict=True))
                assert float((p.grad - expected).abs().max()) < tolerance


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("loss", [tokens, channels, weighted, likelihood, squared])
def test_a_mean_over_examples_or_tokens(loss, clipping):
    model = language(loss)
    plain = copy.deepcopy(model)
    clipper = follow(model, clipping, bound=0.2, reduction="mean")
    for n in (B, 2, 5, 1):
        matches(clipper, plain, *batch(n, ignored=loss is not squared))


def test_the_value_is_the_models_own():
    model = language(tokens)
    x, y = batch()
    expected = model(x, y).loss.item()
    follow(model, reduction="mean")
    assert model(x, y).loss.item() == pytest.approx(expected, rel=1e-12)


def refused(loss, match, *, reduction="mean", error=UnsupportedModelError, ignored=False):
    model = language(loss)
    follow(model, reduction=reduction)
    found = model(*batch(ignored=ignored))
    found.logits.sum()  # nothing is wrong with the rest
    with pytest.raises(error, match=match):
        found.loss.backward()


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, y: tokens(logits, y) + logits.softmax(-1).mean((0, 1)).square().sum(),  # balances experts, say
        lambda logits, y: tokens(logits, y) ** 2,
        lambda logits, y: (logits[0] - logits[1]).square().mean(),
        lambda logits, y: tokens(logits - logits.mean(0), y),
    ],
)
def test_a_loss_that_mixes_examples_is_refused(loss):
    refused(loss, r"computed inside the model.*(changes when the other examples|how many examples)")


def test_a_sum_that_is_declared_as_a_mean_is_refused():
    refused(lambda logits, y: B * T * tokens(logits, y) * len(y), "how many examples")
    refused(lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), "how many examples")
    refused(tokens, "how many examples", reduction="sum")


def test_a_sum():
    model = language(lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"))
    plain = copy.deepcopy(model)
    matches(follow(model, bound=0.2, reduction="sum"), plain, *batch())


def test_a_first_batch_of_one_example():
    model = language(tokens)
    follow(model, reduction="mean")
    model(*batch(1)).loss.backward()
    model(*batch()).loss.backward()


def test_a_factor_that_changes_is_refused():
    model = language(tokens)
    clipper = follow(model, reduction="mean")
    for _ in range(2):
        (model(*batch()).loss / 4).backward()
        clipper.start_step()
    loss = model(*batch()).loss
    with pytest.raises(PrivacyViolation, match="multiplied by a factor that changes"):
        (loss * loss.detach()).backward()
