"""Modules followed as a whole, under autocast: differentiated as they were computed, and clipped to their bound."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from networks import Attention, BareParameter, Recurrent
from torch import nn

from gradveil.clipping import Clipper, make_groups
from gradveil.clipping.backends import cuda

CUDA = torch.cuda.is_available() and cuda.available()
DEVICE = "cuda" if CUDA else "cpu"
BATCH = 5

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*cannot be vectorised"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # torch's own, of attention under vmap
]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def halves():
    return torch.autocast(DEVICE, dtype=torch.bfloat16)


def loss(out):
    return out.float().square().sum()


def clipped(model, x, bound):
    """One example after the other by ordinary autograd, its forward under autocast."""
    plain = copy.deepcopy(model)
    sums = [torch.zeros_like(p) for p in plain.parameters()]
    norms = []
    for i in range(len(x)):
        plain.zero_grad()
        with halves():
            out = plain(x[i : i + 1])
        loss(out).backward()
        grads = [p.grad for p in plain.parameters()]
        norms.append(torch.stack([g.norm() for g in grads]).norm())
        for total, g in zip(sums, grads, strict=True):
            total += g * (bound / norms[-1]).clamp(max=1.0)
    return sums, torch.stack(norms)


class Doubtful(nn.Module):
    """A small difference of large numbers: in float32 another one than in half precision."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.seen: list[torch.dtype] = []

    def forward(self, x):
        y = (x + 40.0) @ self.weight
        self.seen.append(y.dtype)
        return torch.tanh((y.float() - 40.0 * self.weight.sum(0)) * 0.5)


class DoubtfulInALoop(Doubtful):
    def forward(self, x):
        return super().forward(x) * float(x.detach().abs().max() > -1)


@pytest.mark.parametrize("kind", [Doubtful, DoubtfulInALoop])
@pytest.mark.parametrize("around_backward", [nullcontext, halves])
def test_backward_differentiates_what_the_forward_computed(kind, around_backward):
    model = kind().to(DEVICE)
    x = torch.randn(BATCH, 6, device=DEVICE)
    expected, norms = clipped(model, x, 1e9)
    groups = make_groups(model, "flat")
    clipper = Clipper(model, groups, bounds=[1e9], loss_reduction="sum")
    with halves():
        out = model(x)
    with around_backward():
        loss(out).backward()
    assert set(model.seen) == {torch.bfloat16}
    assert model.weight.grad.dtype == torch.float32
    # Autograd's own product is rounded to a half before the large numbers are taken off; ours is not.
    assert torch.allclose(model.weight.grad, expected[0], rtol=0, atol=0.1 * float(expected[0].abs().max()))
    assert clipper.clip_stats.largest(0) == pytest.approx(float(norms.max()), rel=0.1)


def test_a_forward_without_autocast_is_differentiated_without():
    model = Doubtful().to(DEVICE)
    Clipper(model, make_groups(model, "flat"), bounds=[1e9], loss_reduction="sum")
    out = model(torch.randn(BATCH, 6, device=DEVICE))
    with halves():
        loss(out).backward()
    assert set(model.seen) == {torch.float32}


def _why_no_lstm():
    """A plain LSTM of torch's own, nothing followed: oneDNN has none in bfloat16 for CPUs without AVX-512."""
    try:
        with halves():
            nn.LSTM(6, 5, batch_first=True).to(DEVICE)(torch.zeros(1, 4, 6, device=DEVICE))
    except RuntimeError as error:
        if "primitive" not in str(error):
            raise
        return f"torch itself runs no LSTM under bfloat16 autocast here: {str(error).split('.')[0]}"
    return ""


NO_LSTM = _why_no_lstm()
LSTM = pytest.param("LSTM", marks=pytest.mark.skipif(bool(NO_LSTM), reason=NO_LSTM))
MODELS = {
    "attention and a token": (Attention, (4, 6)),
    "bare parameters": (BareParameter, (6,)),
    "LSTM": (Recurrent, (4, 6)),
    "RNN": (lambda: Recurrent(nn.RNN), (4, 6)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), (4, 6)),
    "attention with dropout": (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), (4, 6)),
}


@pytest.mark.parametrize("name", [LSTM, *sorted(MODELS.keys() - {"LSTM"})])
@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
def test_each_example_keeps_to_its_bound(name, clipping):
    make, shape = MODELS[name]
    model = make().to(DEVICE)
    groups = make_groups(model, clipping)
    clipper = Clipper(model, groups, bounds=[0.01] * len(groups), loss_reduction="sum")
    x = torch.randn(BATCH, *shape, device=DEVICE)
    with halves():
        model(x)  # its first batch, looked at closely
    for i in range(BATCH):
        model.zero_grad()
        clipper.start_step()
        with halves():
            out = model(x[i : i + 1])
        loss(out).backward()
        grads = {n: p.grad.double() for n, p in model.named_parameters()}
        for number, group in enumerate(groups):
            norm = float(torch.stack([grads[n].norm() for n in group.parameters]).norm())
            assert norm <= 0.01 and norm == pytest.approx(clipper.clip_stats.largest(number), rel=1e-5)


@pytest.mark.parametrize("name", ["attention and a token", "bare parameters", LSTM, "RNN", "encoder layer"])
def test_sums_are_those_of_ordinary_autograd(name):
    make, shape = MODELS[name]
    model = make().to(DEVICE)
    x = torch.randn(BATCH, *shape, device=DEVICE)
    _, norms = clipped(model, x, 1e9)
    bound = float(norms.median())
    expected, _ = clipped(model, x, bound)
    Clipper(model, make_groups(model, "flat"), bounds=[bound], loss_reduction="sum")
    with halves():
        out = model(x)
    loss(out).backward()
    scale = float(torch.stack([e.norm() for e in expected]).norm())
    error = torch.stack([(p.grad - e).norm() for p, e in zip(model.parameters(), expected, strict=True)]).norm()
    assert float(error) <= 3e-2 * scale
