"""Linear layers in half precision: multiplied as halves, added up in float32, clipped to their bound exactly.

On a GPU this is the path of autocast; here its products are made in float32 of the same halves.
"""

import pytest
import torch
from torch import nn

from gradveil.clipping import cuda_dispatch as on_cuda
from gradveil.clipping.backends import cuda, layers
from gradveil.clipping.rules import linear
from gradveil.clipping.rules.embedding import EmbeddingGrads
from gradveil.clipping.rules.linear import LinearGrads, TransposedLinearGrads
from gradveil.clipping.tied_weights import TiedGrads

CUDA = torch.cuda.is_available() and cuda.available()
DEVICE = "cuda" if CUDA else "cpu"
EXAMPLES, POSITIONS, INPUTS, OUTPUTS = 5, 7, 16, 21  # not a multiple of eight: padded


@pytest.fixture(autouse=True)
def _halves_everywhere(monkeypatch):
    monkeypatch.setattr(linear, "stays_half", lambda g: g.dtype == torch.bfloat16)
    torch.manual_seed(0)


def factors(scale=1.0):
    x = torch.randn(EXAMPLES, POSITIONS, INPUTS, device=DEVICE)
    return x, (scale * torch.randn(EXAMPLES, POSITIONS, OUTPUTS, device=DEVICE)).bfloat16()


def gradients(x, g):
    """Of the halves, in float64."""
    return [torch.bmm(g.double().mT, x.bfloat16().double()), g.double().sum(1)]


def weigh(bound):
    def weights(rows, squares):
        found = (bound / torch.stack(squares).sum(0).sqrt()).clamp(max=1.0)
        return [found] * len(squares), None

    return weights


@pytest.mark.parametrize("kind", [LinearGrads, TransposedLinearGrads])
@pytest.mark.parametrize("bias", [True, False])
def test_norms_and_sums_are_those_of_the_halves(kind, bias):
    x, g = factors()
    use = kind(x, g, weight=True, bias=bias)
    assert use.half and use.x.dtype == torch.bfloat16
    expected = gradients(x, g)[: 1 + bias]
    if kind is TransposedLinearGrads:
        expected[0] = expected[0].mT
    for got, exact in zip(use.per_example(slice(None)), expected, strict=True):
        assert got.dtype == torch.float32 and torch.allclose(got.double(), exact, rtol=1e-5, atol=1e-4)
    squares = [e.flatten(1).square().sum(1) for e in expected]
    for got, exact in zip(use.sq_norms(), squares, strict=True):
        assert torch.allclose(got.double(), exact, rtol=1e-5)
    weights = (9.0 / torch.stack(squares).sum(0).sqrt()).clamp(max=1.0)
    assert bool((weights < 1).any())
    for found in (use.clipped_sums(weigh(9.0)), use.weighted_sums([weights.float()] * (1 + bias))):
        for got, exact in zip(found, expected, strict=True):
            assert torch.allclose(got.double(), torch.tensordot(weights, exact, dims=1), rtol=1e-4, atol=1e-4)


def test_an_example_whose_gradient_cancels_keeps_to_its_bound():
    """Its factors are a thousand times its gradient: rounding them once more, scaled, would go far beyond the bound."""
    x = torch.randn(2, 1, INPUTS, device=DEVICE).bfloat16().float().repeat(1, 2, 1)
    g = torch.randn(2, 1, OUTPUTS, device=DEVICE).bfloat16().repeat(1, 2, 1)
    g[:, 1] = -g[:, 1]
    x[:, 1, 0] *= 1 + 2.0**-7
    use = LinearGrads(x, 1000 * g, weight=True, bias=False)
    norm = gradients(x, 1000 * g)[0][:1].norm()
    alone = LinearGrads(x[:1], 1000 * g[:1], weight=True, bias=False).clipped_sums(weigh(float(norm) / 3))
    assert float(alone[0].norm()) == pytest.approx(float(norm) / 3, rel=1e-5)
    assert use.clipped_sums(weigh(1.0))[0].norm() <= 2.0 * (1 + 1e-5)


@pytest.mark.skipif(not CUDA, reason="needs a GPU and Triton")
@pytest.mark.parametrize("kind", [LinearGrads, TransposedLinearGrads])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("present", [None, [True, True, False, True, True]])
def test_kernels_clip_halves(kind, bias, present):
    x, g = factors()
    g[3, 0, 0] = float("nan")
    mask = None if present is None else torch.tensor(present, device=DEVICE)
    clip = cuda.Clip(torch.tensor([9.0], device=DEVICE), torch.zeros(5, dtype=torch.int32, device=DEVICE), mask)
    found = on_cuda.clipped(kind(x, g, weight=True, bias=bias), clip)
    expected = gradients(x, g)[: 1 + bias]
    if kind is TransposedLinearGrads:
        expected[0] = expected[0].mT
    _check(found, expected, present, clip)


def _check(found, expected, present, clip):
    norms = torch.stack([e.flatten(1).square().sum(1) for e in expected]).sum(0).sqrt()
    weights = (9.0 / norms).clamp(max=1.0).nan_to_num(0.0)
    if present is not None:
        weights = weights * torch.tensor(present, device=DEVICE)
    assert clip.lost.tolist() == [0, 0, 0, 1, 0]
    assert torch.allclose(found.weights.double(), weights, rtol=1e-4)
    for got, exact in zip(found.sums, expected, strict=True):
        total = torch.tensordot(weights, exact.nan_to_num(0.0), dims=1)
        assert got.shape == total.shape and torch.allclose(got.double(), total, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not CUDA, reason="needs a GPU and Triton")
@pytest.mark.parametrize("present", [None, [True, True, False, True, True]])
def test_kernels_clip_tied_halves(present):
    x, g = factors()
    g[3, 0, 0] = float("nan")
    tokens = torch.randint(0, OUTPUTS, (EXAMPLES, 9), device=DEVICE)
    rows = torch.randn(EXAMPLES, 9, INPUTS, device=DEVICE)
    mask = None if present is None else torch.tensor(present, device=DEVICE)
    clip = cuda.Clip(torch.tensor([9.0], device=DEVICE), torch.zeros(5, dtype=torch.int32, device=DEVICE), mask)
    uses = [LinearGrads(x, g, weight=True, bias=False), EmbeddingGrads(tokens, rows, (OUTPUTS, INPUTS))]
    found = on_cuda.clipped(TiedGrads(uses, [[0], [0]], [torch.empty(OUTPUTS, INPUTS)]), clip)
    exact = gradients(x, g)[0]
    exact.scatter_add_(1, tokens.unsqueeze(2).expand_as(rows), rows.double())
    _check(found, [exact], present, clip)


@pytest.mark.skipif(not CUDA, reason="needs a GPU and Triton")
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_autocast_steps_equal_those_without_kernels(clipping, monkeypatch):
    """A tied language model: with the kernels, and by way of PyTorch, of the same halves."""
    from gradveil.clipping.clipper import Clipper
    from gradveil.clipping.groups import make_groups

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(OUTPUTS, INPUTS)
            self.inner = nn.Linear(INPUTS, INPUTS)
            self.out = nn.Linear(INPUTS, OUTPUTS, bias=False)
            self.out.weight = self.table.weight

        def forward(self, tokens):
            return self.out(torch.tanh(self.inner(self.table(tokens))))

    tokens = torch.randint(0, OUTPUTS, (EXAMPLES, POSITIONS), device=DEVICE)
    found = []
    for kernels in (True, False):
        monkeypatch.setattr(cuda, "available", lambda kernels=kernels: kernels)
        torch.manual_seed(1)
        model = Tied().to(DEVICE)
        groups = make_groups(model, clipping)
        clipper = Clipper(model, groups, bounds=[0.05] * len(groups), loss_reduction="sum")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), tokens, reduction="sum").backward()
        found.append([p.grad.clone() for p in model.parameters()])
        clipper.detach()
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(not CUDA or layers.layers() is None, reason="needs a GPU, Triton and a C++ compiler")
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_under_autocast_the_nodes_in_cpp_do_what_those_in_python_do(clipping, monkeypatch):
    """Recorded in the first pass, replayed in the next ones; on the way a normalisation, which is in float32."""
    transformers = pytest.importorskip("transformers.pytorch_utils")
    from gradveil.clipping.clipper import Clipper
    from gradveil.clipping.groups import make_groups

    asked = []
    collect = Clipper.collect_elsewhere
    monkeypatch.setattr(Clipper, "collect_elsewhere", lambda self, *args: asked.append(args[1]) or collect(self, *args))
    batches = torch.randn(3, EXAMPLES, POSITIONS, INPUTS, device=DEVICE)
    found = []
    for in_cpp, load in ((True, layers._load), (False, lambda: (None, "Python"))):
        monkeypatch.setattr(layers, "_load", load)
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(INPUTS, 24), nn.LayerNorm(24), transformers.Conv1D(32, 24), nn.Tanh(), nn.Linear(32, OUTPUTS)
        ).to(DEVICE)
        groups = make_groups(model, clipping)
        clipper = Clipper(model, groups, bounds=[0.5] * len(groups), loss_reduction="sum")
        for x in batches:
            asked.clear()
            model.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = model(x)
            assert out.dtype == torch.bfloat16
            out.float().square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters()])
            clipper.start_step()
        # The last layer's 21 outputs are padded to 24 rows, which is not recorded.
        if in_cpp and clipping == "per-layer":
            assert asked == [3]
        clipper.detach()
    for here, there in zip(found[:3], found[3:], strict=True):
        for a, b in zip(here, there, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
