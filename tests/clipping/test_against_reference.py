"""The engine's clipped sums equal one-example-at-a-time clipping."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gradveil.clipping import Clipper, clipped_sums, make_groups
from gradveil.models import paper_cnn, paper_mlp


class Attention(nn.Module):
    """Owns a bare parameter beside its children, so that it is followed as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.embed = nn.Linear(6, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        z = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], dim=1)
        a, _ = self.attend(z, z, z, need_weights=False)
        return self.head(self.norm(z + a)[:, 0])


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        _, (h, _) = self.lstm(x)
        return self.head(h[0])


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.embed((x[..., 0].abs() * 4).long().clamp(max=10)).mean(1))


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.head = nn.Linear(144, 3)

    def forward(self, x):
        return self.head(input=self.conv(input=x).flatten(1))


def _frozen_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    return model


IMAGES = (2, 8, 8)
MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (6,)),
    "sequence": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Flatten(), nn.Linear(40, 3)), (5, 6)),
    "two sequence dimensions": (lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten(), nn.Linear(12, 3)), (2, 3, 4)),
    "conv stride, padding": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        IMAGES,
    ),
    "conv groups, dilation, same": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, (3, 2), groups=2, dilation=2, padding="same"), nn.Flatten(), nn.Linear(256, 3)
        ),
        IMAGES,
    ),
    "conv circular": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular", bias=False), nn.Flatten(), nn.Linear(256, 3)
        ),
        IMAGES,
    ),
    "conv reflect": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="reflect"), nn.Flatten(), nn.Linear(320, 3)
        ),
        IMAGES,
    ),
    "group norm, prelu": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.PReLU(), nn.Flatten(), nn.Linear(144, 3)),
        IMAGES,
    ),
    "layer norm without bias": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, bias=False), nn.Linear(8, 3)),
        (6,),
    ),
    "conv1d, transposed": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.ConvTranspose1d(3, 2, 2), nn.Flatten(), nn.Linear(14, 3)),
        (2, 8),
    ),
    "attention": (Attention, (5, 6)),
    "called twice": (CalledTwice, (6,)),
    "tied": (Tied, (6,)),
    "recurrent": (Recurrent, (5, 6)),
    "tokens": (Tokens, (5, 6)),
    "keyword calls": (Keywords, IMAGES),
    "frozen weight, live bias": (_frozen_weight, (6,)),
    "parametrised": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3)),
        (6,),
    ),
}


def compare(model, x, y, *, clipping="per-layer", reduction="mean", bound=0.05, tolerance=1e-9):
    """Clip with the engine and with the oracle; the largest difference of sums and of the largest norm."""
    groups = make_groups(model, clipping)
    bounds = [bound * (1 + 0.1 * i) for i in range(len(groups))]
    reference = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=bounds)
    clipper = Clipper(model, groups, bounds=bounds, loss_reduction=reduction)
    F.cross_entropy(model(x), y, reduction=reduction).backward()
    scale = max([1e-30, *(float(v.abs().max()) for v in reference.sums.values())])
    for name, p in model.named_parameters():
        if p.requires_grad:
            got = torch.zeros_like(p) if p.grad is None else p.grad
            assert torch.isfinite(got).all()
            assert float((got - reference.sums[name]).abs().max()) <= tolerance * max(1.0, scale), name
    if len(x):
        expected = torch.minimum(reference.norms, torch.tensor(bounds, dtype=torch.float64)).amax(0)
        got = torch.tensor([clipper.harvest.largest(g) for g in range(len(groups))], dtype=torch.float64)
        assert torch.allclose(got, expected, rtol=10 * tolerance, atol=0)
        within = (reference.norms <= torch.tensor(bounds, dtype=torch.float64)).sum(0).tolist()
        assert [clipper.harvest.count_within(g) for g in range(len(groups))] == within
    clipper.detach()


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*cannot be vectorised")
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums_equal_the_reference(name, clipping):
    make, shape = MODELS[name]
    model = make().double()
    x, y = torch.randn(7, *shape).double(), torch.randint(0, 3, (7,))
    for reduction in ("mean", "sum"):
        for n in (7, 1, 0):
            compare(copy.deepcopy(model), x[:n], y[:n], clipping=clipping, reduction=reduction)
    compare(copy.deepcopy(model), x, y, clipping=clipping, bound=1e6)  # nothing clipped
    compare(copy.deepcopy(model).float(), x.float(), y, clipping=clipping, tolerance=1e-4)


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
        assert clipper.harvest.examples == 11
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
