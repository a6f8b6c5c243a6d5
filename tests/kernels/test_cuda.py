"""The Triton kernels against sums made one example at a time, on a GPU or in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/kernels/test_cuda.py     # where Triton is installed, without a GPU
"""

import os

import pytest
import torch
from torch.nn import functional as F

from gradveil.clipping.backends import cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),  # of the interpreter
    pytest.mark.skipif(
        not cuda.available() or not (INTERPRETED or torch.cuda.is_available()),
        reason="needs Triton and a GPU, or TRITON_INTERPRET=1",
    ),
]
PRESENT = [None, [True, True, False, True, True]]


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)


def clip(bound, present):
    mask = None if present is None else torch.tensor(present, device=DEVICE)
    return cuda.Clip(torch.tensor([bound], device=DEVICE), torch.zeros(5, dtype=torch.int32, device=DEVICE), mask)


def check(found, grads, made, tolerance=1e-4):
    """Against per-example gradients in float64."""
    norms = torch.stack([g.double().flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
    weights = (float(made.bound) / norms).clamp(max=1.0)
    finite = torch.isfinite(norms)
    weights = torch.where(finite, weights, 0.0)
    if made.present is not None:
        weights = torch.where(made.present, weights, 0.0)
    for total, grad in zip(found.sums, grads, strict=True):
        keep = (weights > 0).view(-1, *[1] * (grad.dim() - 1))
        expected = torch.tensordot(weights, torch.where(keep, grad.double(), 0.0), dims=1)
        assert float((total.double() - expected).abs().max()) <= tolerance * float(expected.abs().max())
    assert torch.allclose(found.norms.double()[finite], norms[finite], rtol=tolerance)
    assert torch.allclose(found.weights.double(), weights, rtol=tolerance)
    lost = ~finite if made.present is None else ~finite & made.present
    assert made.lost.bool().tolist() == lost.tolist()
    clipped = norms[finite] * found.weights.double()[finite]
    assert bool((clipped <= float(made.bound) * (1 + 1e-5)).all())  # the clipper leaves a margin for rounding


@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("count", [1, 2])
def test_rows(present, count):
    grads = [torch.randn(5, 7, 3, device=DEVICE), torch.randn(5, 7, device=DEVICE)][:count]
    grads[0][3, 0, 0] = float("nan")
    made = clip(2.0, present)
    check(cuda.clip_rows(grads, made), grads, made)


@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("positions", [1, 3, 20, 70])
def test_linear(present, weight, bias, positions):
    x, g = torch.randn(5, positions, 40, device=DEVICE), torch.randn(5, positions, 24, device=DEVICE)
    g[4, 0, 0] = float("inf")
    made = clip(20.0, present)
    if positions == 1:
        found = cuda.clip_rank_one(x[:, 0], g[:, 0], made, weight=weight, bias=bias)
    else:
        found = cuda.clip_gram(x, g, made, weight=weight, bias=bias)
    both = [torch.bmm(g.double().mT, x.double()), g.double().sum(1)]
    # The bound on rounding that is added to a Gram sum of squares, 32 eps T for positions that are not alike, halved.
    tolerance = max(1e-4, 16 * torch.finfo(torch.float32).eps * positions * 1.5)
    grads = [grad for grad, wanted in zip(both, (weight, bias), strict=True) if wanted]
    check(found, grads, made, tolerance)
    finite = torch.isfinite(found.norms)
    if weight and positions > 1:  # never underestimated
        exact = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0).sqrt()
        assert bool((found.norms.double()[finite] >= exact[finite] * (1 - 1e-6)).all())


CONVOLUTIONS = [  # channels, outputs, groups, height, width, kernel, stride, padding, dilation
    (3, 6, 1, 9, 8, (3, 3), (1, 1), (1, 1), (1, 1)),
    (4, 6, 2, 9, 7, (3, 2), (2, 1), (2, 0), (1, 2)),
    (2, 40, 1, 12, 12, (5, 5), (1, 1), (2, 2), (1, 1)),
    (8, 4, 4, 6, 6, (1, 1), (2, 2), (0, 0), (1, 1)),
]


@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("at_once", [1, 2, 1 << 20])
@pytest.mark.parametrize("shape", CONVOLUTIONS)
def test_convolution(present, bias, at_once, shape, monkeypatch):
    channels, outputs, groups, height, width, kernel, stride, padding, dilation = shape
    weight = torch.randn(outputs, channels // groups, *kernel, dtype=torch.float64, device=DEVICE)
    monkeypatch.setattr(cuda, "GRADIENT_ELEMENTS", at_once * weight.numel())
    x = torch.randn(5, channels, height, width, device=DEVICE)
    if channels == 4:
        x = x.to(memory_format=torch.channels_last)
    g = torch.randn_like(F.conv2d(x, weight.float(), None, stride, padding, dilation, groups)).contiguous()
    x[2, 0, 0, 0] = float("nan")
    per_example = []
    for i in range(5):
        own = weight.clone().requires_grad_()
        out = F.conv2d(x[i : i + 1].double(), own, None, stride, padding, dilation, groups)
        out.backward(g[i : i + 1].double())
        per_example.append(own.grad)
    made = clip(20.0, present)
    found = cuda.clip_convolution(
        x, g, made, kernel=kernel, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=bias
    )
    check(found, [torch.stack(per_example), g.double().sum((2, 3))][: 2 if bias else 1], made)


def test_moments_of_norms():
    x, g = torch.randn(3, 6, 5, 4, device=DEVICE), torch.randn(3, 6, 5, 4, device=DEVICE)
    _, mean, rstd = torch.native_group_norm(x, None, None, 3, 6, 20, 2, 1e-5)
    scaled, shift = cuda.channel_moments(x, g, mean, rstd)
    normed = ((x.view(3, 2, -1) - mean[..., None]) * rstd[..., None]).view_as(x)
    assert torch.allclose(scaled, (g * normed).sum((2, 3)), atol=1e-4)
    assert torch.allclose(shift, g.sum((2, 3)), atol=1e-5)
    x, g = torch.randn(3, 7, 70, device=DEVICE), torch.randn(3, 7, 70, device=DEVICE)
    normed, mean, rstd = torch.native_layer_norm(x, [70], None, None, 1e-5)
    scaled, shift = cuda.feature_moments(x, g, mean, rstd)
    assert torch.allclose(scaled, (g * normed).sum(1), atol=1e-4)
    assert torch.allclose(shift, g.sum(1), atol=1e-5)


def test_noise_on_all_gradients_in_one_launch():
    grads = [torch.randn(5, 3, device=DEVICE), torch.randn(2000, device=DEVICE)]
    noise, std = torch.randn(2015, device=DEVICE), torch.tensor(2.0, device=DEVICE)
    expected = [(grads[0] + 2 * noise[:15].view(5, 3)) / 7, (grads[1] + 2 * noise[15:]) / 7]
    cuda.add_noise(cuda.noise_table(grads).to(DEVICE), noise, std, divide_by=7.0)
    for grad, wanted in zip(grads, expected, strict=True):
        assert torch.allclose(grad, wanted)


def test_losses_and_lost_examples_are_counted_without_padding():
    losses = torch.tensor([1.0, 2.0, float("nan"), 4.0], device=DEVICE)
    present = torch.tensor([True, True, False, True], device=DEVICE)
    flags = torch.tensor([1, 0, 1, 1], dtype=torch.int32, device=DEVICE)
    lost = torch.tensor(5, device=DEVICE)
    assert float(cuda.sum_up(losses, present, flags, lost)) == 7.0
    assert int(lost) == 8 and int(flags.sum()) == 0
