"""The C++ kernel equals the PyTorch path up to rounding, keeps the bound, and steps aside where it cannot be built."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gradveil.clipping import Clipper, make_groups
from gradveil.clipping.backends import build, native

needs_kernel = pytest.mark.skipif(native.kernels() is None, reason=native.status())


def clipped(model, x, y, bound, kernel, monkeypatch):
    with monkeypatch.context() as patch:
        if not kernel:
            patch.setattr(native, "kernels", lambda: None)
        groups = make_groups(model, "per-layer")
        clipper = Clipper(model, groups, bounds=[bound] * len(groups), loss_reduction="sum")
        model.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        norms = [clipper.clip_stats.largest(g) for g in range(len(groups))]
        counts = clipper.clip_stats.counts_within()
        lost = int(clipper.clip_stats.not_finite or 0)
        clipper.detach()
    return [p.grad.clone() for p in model.parameters()], norms, counts, lost


@needs_kernel
@given(st.data())
def test_the_kernel_equals_the_pytorch_path(data):
    draw = data.draw
    groups = draw(st.integers(1, 3))
    # From five channels in a group on, one kernel element at a time: then padding is left out, not multiplied.
    channels, outputs = groups * draw(st.sampled_from([1, 2, 3, 5, 6, 8, 11])), groups * draw(st.integers(1, 20))
    kernel, stride = (
        (draw(st.integers(1, 4)), draw(st.integers(1, 5))),
        (draw(st.integers(1, 3)), draw(st.integers(1, 2))),
    )
    padding, dilation = (
        (draw(st.integers(0, 4)), draw(st.integers(0, 3))),
        (draw(st.integers(1, 2)), draw(st.integers(1, 3))),
    )
    size, n = (draw(st.integers(1, 12)), draw(st.integers(1, 12))), draw(st.integers(1, 5))
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding, dilation, groups, bias=draw(st.booleans()))
    torch.manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(n, channels, *size)
    try:
        features = layer(x[:1]).flatten(1).shape[1]
    except RuntimeError:
        assume(False)  # a kernel larger than the image
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))
    y, bound = torch.randint(0, 3, (n,)), draw(st.floats(1e-3, 10.0))
    patch = pytest.MonkeyPatch()
    with_kernel = clipped(model, x, y, bound, True, patch)
    without = clipped(model, x, y, bound, False, patch)
    for a, b in zip(with_kernel[0], without[0], strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * n * bound + 1e-6
    assert with_kernel[1] == pytest.approx(without[1], rel=1e-5)
    assert max(with_kernel[1]) <= bound
    assert with_kernel[3] == without[3] == 0


@needs_kernel
@pytest.mark.parametrize("channels", [3, 6])  # all kernel elements together, and one at a time
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_whatever_lies_in_the_padding(channels, stride):
    """Kernel elements that see it at some positions, or at all: unclipped, the sums are the ordinary gradient."""
    for size, kernel, padding, dilation in itertools.product((1, 2, 5), (1, 2, 3, 4), (0, 1, 2, 3, 5), (1, 2)):
        out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        if out < 1:
            continue
        x, g = torch.randn(2, channels, size, 7), torch.randn(2, 17, out, 7)
        shape = {"kernel": (kernel, 3), "stride": (stride, 1), "padding": (padding, 1), "dilation": (dilation, 1)}
        for _ in range(2):
            geometry = native.ConvGeometry(x, g, **shape, groups=1)
            found = native.kernels().conv2d_clip(x, g, geometry, bias=False, bound=1e9).sums[0]
            steps = [shape[name] for name in ("stride", "padding", "dilation")]
            asked = torch.nn.grad.conv2d_weight(x, (17, channels, *shape["kernel"]), g, *steps)
            torch.testing.assert_close(found.view_as(asked), asked, rtol=1e-4, atol=1e-4)
            x, g = x.mT.contiguous(), g.mT.contiguous()  # the same with rows and columns exchanged
            shape = {name: sizes[::-1] for name, sizes in shape.items()}


@needs_kernel
def test_one_dimension_goes_through_the_kernel_too(monkeypatch):
    called = []
    real = native.Kernels.conv2d_clip
    monkeypatch.setattr(native.Kernels, "conv2d_clip", lambda self, *a, **k: (called.append(1), real(self, *a, **k))[1])
    model = nn.Sequential(nn.Conv1d(2, 4, 3, dilation=2, groups=2), nn.Flatten(), nn.Linear(16, 3))
    x, y = torch.randn(6, 2, 8), torch.randint(0, 3, (6,))
    a = clipped(model, x, y, 0.1, True, monkeypatch)
    assert called
    b = clipped(model, x, y, 0.1, False, monkeypatch)
    assert all(torch.allclose(s, t, atol=1e-6) for s, t in zip(a[0], b[0], strict=True))
    assert a[2:] == b[2:]


@needs_kernel
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_kernel_drops_what_is_not_finite(bad, monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(36, 3))
    x, y = torch.randn(5, 1, 5, 5), torch.randint(0, 3, (5,))
    x[3, 0, 2, 2] = bad
    grads, _, _, lost = clipped(model, x, y, 0.1, True, monkeypatch)
    assert lost == 1
    rest = clipped(model, x[[0, 1, 2, 4]], y[[0, 1, 2, 4]], 0.1, True, monkeypatch)[0]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(grads, rest, strict=True))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"GRADVEIL_NATIVE": "0"}, "PyTorch (GRADVEIL_NATIVE=0)"),
        ({"CXX": "no-such-compiler"}, "PyTorch (no C++ compiler found)"),
        ({"CXX": "false"}, "PyTorch (the C++ kernel could not be built"),
    ],
)
def test_without_the_kernel_the_pytorch_path_is_used_and_said_to_be(settings, words, tmp_path, monkeypatch):
    for name, value in ({"XDG_CACHE_HOME": str(tmp_path)} | settings).items():
        monkeypatch.setenv(name, value)
    native._load.cache_clear()
    try:
        assert native.kernels() is None
        assert words in native.status()
    finally:
        monkeypatch.undo()
        native._load.cache_clear()


@needs_kernel
def test_the_kernel_is_compiled_once_and_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = "from gradveil.clipping.backends import native; print(native.status())"
    first = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "gradveil").iterdir() if p.name != ".lock"}
    assert "native C++" in first
    assert sorted(p.suffix for p in made) == [".sha256", ".so"]
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == first
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "gradveil").iterdir() if p.name != ".lock"} == made


@needs_kernel
def test_the_kernel_runs_on_the_threads_of_torch():
    """No second pool: after torch has started its threads, the kernels start none."""
    if not native.kernels().shares_threads or not Path("/proc/self/task").exists():
        pytest.skip("threads of its own, or no way to count them")
    code = (
        "import os, torch; from gradveil.clipping.backends import native; torch.set_num_threads(3)\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "torch.ones(1 << 22).add_(1); before = count()\n"
        "native.kernels().row_squares(torch.ones(64, 1 << 16))\n"
        "native.kernels().add_noise(bytes(32), [(torch.zeros(1 << 20), 1.0, 0)], divide_by=1.0)\n"
        "print(before, count())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found[0] == found[1]
    assert int(found[0]) >= 3


def test_threads_are_given_to_small_gradients_of_many_positions():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert native._workers_for_products(22, 2400, 1024) == 2
        assert native._workers_for_products(22, 2400, 1) == 1
        assert native._workers_for_products(1, 2400, 1024) == 1
    finally:
        torch.set_num_threads(before)


def norms_of_sums(x, g):
    """Of sum_t g_t x_t^T of every example, squared, in float64."""
    return torch.einsum("bto,btd->bod", g.double(), x.double()).square().sum((1, 2))


def gram_margin(x, g):
    """What a sum of terms that cancel is raised by: eight roundings of the sum of their lengths at most."""
    lengths = (x.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
    return 8.0 * torch.finfo(torch.float32).eps * lengths.square()


@needs_kernel
@given(
    st.integers(0, 5),
    st.integers(1, 40),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(["random", "cancel"]),
    st.integers(0, 99),
)
def test_norms_from_pairs_of_positions_are_those_of_the_gradient(examples, positions, inputs, outputs, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, positions, inputs, generator=generator)
    g = torch.randn(examples, positions, outputs, generator=generator)
    if kind == "cancel":  # positions that undo each other, nearly
        x = torch.cat([x, x + 1e-4 * torch.randn(x.shape, generator=generator)], 1)
        g = torch.cat([g, -g], 1)
    squares, sums = native.kernels().gram_squares(x, g, bias=True)
    exact = norms_of_sums(x, g)
    assert (squares >= exact).all()  # never underestimated
    assert (squares - exact <= gram_margin(x, g)).all()
    torch.testing.assert_close(sums, g.sum(1), rtol=1e-4, atol=1e-4)
    alone, nothing = native.kernels().gram_squares(x, g, bias=False)
    assert nothing is None
    assert torch.equal(alone, squares)


@needs_kernel
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("factor", [0, 1])
def test_norms_from_pairs_of_positions_tell_what_is_not_finite(factor, bad):
    factors = [torch.randn(4, 5, 7), torch.randn(4, 5, 3)]
    factors[factor][2, 3, 1] = bad
    squares, _ = native.kernels().gram_squares(*factors, bias=True)
    assert squares.isfinite().tolist() == [True, True, False, True]


@needs_kernel
@pytest.mark.parametrize("vectors", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors_give_the_same(vectors, tmp_path, monkeypatch):
    if native.kernels().vector_bits != 512:
        pytest.skip("this machine has no wider ones to leave out")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, vectors))
    narrow = native.Kernels(native._built(build.compiler(), "torch's threads"))
    assert narrow.vector_bits < 512
    x, g = torch.randn(3, 6, 9, 8), torch.randn(3, 20, 9, 8)
    shape = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    geometry = native.ConvGeometry(x, g, **shape)
    found = [k.conv2d_clip(x, g, geometry, bias=True, bound=1.0) for k in (narrow, native.kernels())]
    for a, b in zip(*([*f.sums, f.norms] for f in found), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    factors = torch.randn(3, 13, 37), torch.randn(3, 13, 21)
    squares, _ = narrow.gram_squares(*factors, bias=True)
    assert (squares >= norms_of_sums(*factors)).all()
    assert (squares - norms_of_sums(*factors) <= gram_margin(*factors)).all()


@needs_kernel
def test_without_the_runtime_of_torch_the_kernel_starts_threads_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = native.Kernels(native._built(build.compiler(), "threads of its own"))
    assert not own.shares_threads
    rows = torch.randn(64, 5000)
    assert torch.equal(own.row_squares(rows), native.kernels().row_squares(rows))
    draws = [torch.zeros(100_000), torch.zeros(100_000)]
    for kernels, draw in zip((own, native.kernels()), draws, strict=True):
        kernels.add_noise(bytes(32), [(draw, 1.0, 0)], divide_by=1.0, threads=2)
    assert torch.equal(*draws)
