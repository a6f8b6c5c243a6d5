"""The engine's clipped sums equal one-example-at-a-time clipping."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import FLOATS, TOKENS, compare
from torch import nn
from torch.nn import functional as F

from gradveil.clipping import Clipper, clipped_sums, make_groups
from gradveil.training.models import paper_cnn, paper_mlp

SLOW_PATHS = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*cannot be vectorised")


@SLOW_PATHS
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("name", FLOATS)
def test_clipped_sums_equal_the_reference(name, clipping):
    make, shape = FLOATS[name]
    model = make().double()
    x, y = torch.randn(7, *shape).double(), torch.randint(0, 3, (7,))
    for reduction in ("mean", "sum"):
        for n in (7, 1, 0):
            compare(copy.deepcopy(model), x[:n], y[:n], clipping=clipping, reduction=reduction)
    compare(copy.deepcopy(model), x, y, clipping=clipping, bound=1e6)  # nothing clipped
    compare(copy.deepcopy(model).float(), x.float(), y, clipping=clipping, tolerance=1e-4)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("name", TOKENS)
def test_token_models_equal_the_reference(name, clipping):
    make, shape = TOKENS[name]
    model = make().double()
    x, y = torch.randint(0, 3 if name == "tied embedding" else 5, (7, *shape)), torch.randint(0, 3, (7,))
    for n in (7, 1, 0):
        compare(copy.deepcopy(model), x[:n], y[:n], clipping=clipping)
    compare(copy.deepcopy(model).float(), x, y, clipping=clipping, tolerance=1e-4)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_the_papers_networks(clipping):
    for model, shape in ((paper_cnn((1, 28, 28), 10), (1, 28, 28)), (paper_mlp(600, 10), (600,))):
        x, y = torch.rand(9, *shape).double(), torch.randint(0, 10, (9,))
        compare(model.double(), x, y, clipping=clipping, bound=0.5)


@st.composite
def networks(draw):
    """A random stack of convolutions and linear layers with random settings, and its input shape."""
    if draw(st.booleans()):
        channels, size = draw(st.integers(1, 3)), draw(st.integers(5, 9))
        shape, layers, c = (channels, size, size), [], channels
        for _ in range(draw(st.integers(1, 2))):
            k = draw(st.integers(1, 3))
            groups = draw(st.sampled_from([g for g in (1, 2, 3) if c % g == 0]))
            out = groups * draw(st.integers(1, 2))
            mode = draw(st.sampled_from(["zeros", "circular", "replicate"]))
            layers += [
                nn.Conv2d(
                    c,
                    out,
                    k,
                    stride=draw(st.integers(1, 2)),
                    padding=draw(st.integers(0, 1)),
                    dilation=draw(st.integers(1, 2)) if size >= 8 else 1,
                    groups=groups,
                    bias=draw(st.booleans()),
                    padding_mode=mode,
                ),
                nn.Tanh(),
            ]
            c = out
            probe = nn.Sequential(*layers)
            try:
                size = probe(torch.zeros(1, *shape)).shape[-1]
            except RuntimeError:
                layers = layers[:-2]
                break
        with torch.no_grad():
            features = nn.Sequential(*layers, nn.Flatten())(torch.zeros(1, *shape)).shape[1]
        layers += [nn.Flatten(), nn.Linear(features, 3, bias=draw(st.booleans()))]
    else:
        positions, width = draw(st.integers(1, 3)), draw(st.integers(1, 6))
        shape = (positions, width) if draw(st.booleans()) else (width,)
        hidden = draw(st.integers(1, 6))
        features = hidden * (positions if len(shape) == 2 else 1)
        layers = [nn.Linear(width, hidden, bias=draw(st.booleans())), nn.Tanh(), nn.Flatten(), nn.Linear(features, 3)]
    return nn.Sequential(*layers), shape


@given(networks(), st.integers(0, 6), st.sampled_from(["per-layer", "flat"]), st.floats(1e-3, 10), st.integers(0, 99))
def test_random_networks(network, n, clipping, bound, seed):
    model, shape = network
    torch.manual_seed(seed)
    x, y = torch.randn(n, *shape).double(), torch.randint(0, 3, (n,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # convolutions on tiny inputs warn about padding
        compare(model.double(), x, y, clipping=clipping, bound=bound)


def test_any_split_into_physical_batches_gives_the_same_sums():
    model = paper_cnn((1, 8, 8), 10).double()
    x, y = torch.rand(11, 1, 8, 8).double(), torch.randint(0, 10, (11,))
    groups = make_groups(model, "per-layer")
    whole = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=[0.3] * 3).sums
    for size in (1, 2, 5, 11):
        clipper = Clipper(model, groups, bounds=[0.3] * 3, loss_reduction="mean")
        for start in range(0, 11, size):
            F.cross_entropy(model(x[start : start + size]), y[start : start + size]).backward()
        for name, p in model.named_parameters():
            assert float((p.grad - whole[name]).abs().max()) < 1e-12
            p.grad = None
        assert clipper.clip_stats.examples == 11
        clipper.detach()


def test_user_given_groups_and_groups_inside_a_layer():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(7, 6).double(), torch.randint(0, 3, (7,))
    compare(copy.deepcopy(model), x, y, clipping={"ends": ["0", "4"], "middle": ["2"]})
    compare(
        copy.deepcopy(model), x, y, clipping={"w": ["0.weight"], "b": ["0.bias", "2.bias"], "rest": ["2.weight", "4"]}
    )


def test_dropout_inside_a_followed_module_is_the_same_forward_and_backward():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

        def forward(self, x):
            return F.dropout(x * self.scale, 0.5)

    model = nn.Sequential(Noisy(), nn.Linear(6, 3)).double()
    x, y = torch.randn(8, 6).double(), torch.randint(0, 3, (8,))
    clipper = Clipper(model, make_groups(model, "per-layer"), bounds=[1e9, 1e9], loss_reduction="sum")
    hidden = {}
    handle = model[0].register_forward_hook(lambda m, i, o: hidden.update(out=o.detach()))
    out = model(x)
    F.cross_entropy(out, y, reduction="sum").backward()
    handle.remove()
    # With no clipping, d loss / d scale = sum_i (dropout mask_i * x_i) * (upstream gradient_i), mask seen in forward.
    mask = hidden["out"] / x
    logits = (hidden["out"] @ model[1].weight.T + model[1].bias).detach().requires_grad_()
    F.cross_entropy(logits, y, reduction="sum").backward()
    upstream = logits.grad @ model[1].weight.detach()
    assert torch.allclose(model[0].scale.grad, (upstream * mask * x).sum(0))
    clipper.detach()
