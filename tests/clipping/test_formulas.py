"""Performance settings, formulas and kernels change no sum beyond rounding, and no guarantee."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from networks import compare
from torch import nn
from torch.nn import functional as F

from gradveil.clipping import Clipper, make_groups, performance
from gradveil.clipping.backends import layers, native
from gradveil.clipping.per_sample_grads import row_sq_norms, workspace
from gradveil.clipping.performance import Settings
from gradveil.clipping.rules import conv_plan, conv_use, linear

SETTINGS = [
    Settings(),
    Settings(formula="direct"),
    Settings(formula="gram"),
    Settings(kept_elements=0),
    Settings(kept_elements=0, formula="direct", chunk_elements=1),
    Settings(formula="gram", chunk_elements=100),
]


class Tokens(nn.Module):
    """Linear layers on positions, one of them without bias, and layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 18), nn.Linear(18, 7, bias=False)
        self.norm, self.last = nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(self.norm(self.second(torch.tanh(self.first(x)))).mean(1))


def pictures(*, stride=1, padding=1, groups=1, dilation=1):
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1),
        nn.GroupNorm(3, 6),
        nn.Tanh(),
        nn.Conv2d(6, 20, (3, 2), stride=stride, padding=padding, groups=groups, dilation=dilation),
        nn.Tanh(),
        nn.Conv2d(20, 5, 1, bias=False),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


NETWORKS = {
    "tokens": (Tokens, (6, 5)),
    "pictures": (pictures, (4, 9, 8)),
    "strided": (lambda: pictures(stride=(2, 3), padding=(0, 2), dilation=(1, 2)), (4, 9, 8)),
    "grouped": (lambda: pictures(groups=2, stride=2), (4, 9, 8)),
    "convolutions": (  # of which C++ needs nothing from Python
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(6, 20, (3, 2), stride=2, groups=2, bias=False),
            nn.Flatten(),
            nn.Linear(320, 3),
        ),
        (4, 9, 8),
    ),
    "one dimension": (lambda: nn.Sequential(nn.Conv1d(3, 5, 3, 2, 1), nn.Flatten(), nn.Linear(20, 3)), (3, 8)),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2, 1), nn.Flatten(), nn.Linear(196, 3)),
        (3, 4, 4),
    ),
}


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_formula_gives_the_sums_of_the_oracle(name, clipping):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, x, y = make().double(), torch.randn(7, *shape).double(), torch.randint(0, 3, (7,))
    for settings in SETTINGS:
        with performance.use(settings):
            model.zero_grad()
            compare(model, x, y, clipping=clipping, bound=0.3)


def single(model, x, y, clipping, bound=0.05):
    groups = make_groups(model, clipping)
    clipper = Clipper(model, groups, bounds=[bound] * len(groups), loss_reduction="sum")
    model.zero_grad()
    F.cross_entropy(model(x), y, reduction="sum").backward()
    largest = max(clipper.clip_stats.largest(g) for g in range(len(groups)))
    lost = clipper.clip_stats.not_finite
    clipper.detach()
    return [p.grad.clone() for p in model.parameters()], largest, lost


@pytest.mark.parametrize("clipping", ["per-layer", "flat", "split"])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_and_settings_agree_in_float32(name, bad, clipping, monkeypatch):
    """Also where an example is not finite, and where weight and bias are clipped apart."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(9, *shape), torch.randint(0, 3, (9,))
    if clipping == "split":
        names = [n for n, _ in model.named_parameters()]
        clipping = {"a": [n for n in names if "weight" in n], "b": [n for n in names if "bias" in n]}
    if bad is not None:
        x[4].view(-1)[3] = bad
    rest = [i for i in range(9) if bad is None or i != 4]
    found = []
    for settings, kernel in itertools.product(SETTINGS, [True, False]):
        with performance.use(settings), monkeypatch.context() as patch:
            if not kernel:
                patch.setattr(native, "kernels", lambda: None)
            sums, largest, lost = single(model, x, y, clipping)
            assert lost == 9 - len(rest)
            assert largest <= 0.05
            found.append(sums)
    # An infinite input may leave later layers finite, and per layer those count: then the reference has it too.
    there = rest if bad is None or bad != bad or clipping == "flat" else list(range(9))
    reference = single(model.double(), x[there].double(), y[there], clipping)[0]
    for sums in found:
        for a, b in zip(sums, reference, strict=True):
            assert float((a - b).abs().max()) <= 1e-4 * float(b.abs().max()) + 1e-7


def test_the_choice_of_formula_follows_cost():
    assert linear.choose_formula(1, 10, 10) == "rank-one"
    assert linear.choose_formula(65, 256, 768) == "gram"
    assert linear.choose_formula(512, 64, 64) == "direct"
    wide = {"pixels": 64, "places": 100, "fields": 256, "maps": 256, "taps": 9, "settings": Settings()}
    assert conv_plan.choose_formula(**wide, groups=1) == "gram"
    assert conv_plan.choose_formula(**wide, groups=2) == "direct"
    narrow = wide | {"pixels": 1024, "places": 1156, "fields": 64, "maps": 64}
    assert conv_plan.choose_formula(**narrow, groups=1) == "direct"


def test_kept_gradients_use_the_same_memory_again_and_stay_within_the_setting():
    workspace.clear()
    first = workspace.take(10, 100)
    address = first.data_ptr()
    workspace.give_back(first)
    again = workspace.take(9, 100)
    assert again.data_ptr() == address and again.shape == (9, 100)
    with performance.use(Settings(kept_elements=10)):
        workspace.give_back(again)
    assert workspace.take(10, 100).data_ptr() != address
    workspace.clear()


def test_settings_are_put_back():
    before = performance.settings()
    with performance.use(Settings(kept_elements=1)):
        assert performance.settings().kept_elements == 1
    assert performance.settings() is before


@pytest.mark.parametrize("channels", [(4, 6), (32, 64)])
def test_large_convolutions_go_by_pytorchs_own(channels, monkeypatch):
    """On the CPU without compiled kernels; the same gradients as by patches, and one that is lost stays alone."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(3, c, *size, generator=generator) for c, size in zip(channels, [(7, 6), (4, 3)], strict=True))
    g[1, 0, 0, 0] = float("nan")
    shape = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1)}
    found = []
    for least in (1, 10**9):
        monkeypatch.setattr(conv_plan, "_BY_CONVOLUTION", least)
        conv_plan.plan_for.cache_clear()
        for groups in (1, 2):
            use = conv_use.ConvGrads(x, g, g, weight=True, bias=True, groups=groups, **shape)
            assert use._plan.way == ("convolution" if least == 1 else "patches")
            grads = use.per_example(slice(0, 3))
            assert all(grad[0].isfinite().all() and grad[2].isfinite().all() for grad in grads)
            use.keep(torch.tensor([True, False, True]))
            found.append([grad[[0, 2]] for grad in grads] + use.weighted_sums([torch.ones(3)] * 2))
    conv_plan.plan_for.cache_clear()
    for one, other in zip(found[:2], found[2:], strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@given(st.data())
def test_patches_of_one_row_of_the_kernel_do_for_all_its_rows(data):
    """On the CPU without compiled kernels: every gradient is that of autograd, whatever lies in the padding."""
    draw, integers = data.draw, st.integers
    groups, examples = draw(integers(1, 3)), draw(integers(0, 4))
    kernel = (draw(integers(2, 4)), draw(integers(1, 4)))
    channels, outputs = groups * -(-48 // kernel[1]), groups * draw(integers(1, 3))
    layer = nn.Conv2d(
        channels,
        outputs,
        kernel,
        (1, draw(integers(1, 3))),
        (draw(integers(0, 5)), draw(integers(0, 3))),
        (draw(integers(1, 3)), draw(integers(1, 2))),
        groups,
    ).double()
    generator = torch.Generator().manual_seed(draw(integers(0, 99)))
    size = (draw(integers(1, 9)), draw(integers(1, 9)))
    x = torch.randn(examples, channels, *size, generator=generator, dtype=torch.float64)
    try:
        shape = layer(torch.zeros(1, channels, *size, dtype=torch.float64)).shape[1:]
    except RuntimeError:
        assume(False)  # a kernel larger than the image
    g = torch.randn(examples, *shape, generator=generator, dtype=torch.float64)
    geometry = {"kernel": kernel, "stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    use = conv_use.ConvGrads(x, g, g, weight=True, bias=True, groups=groups, **geometry)
    assert use._plan.way == "rows"
    expected = [torch.zeros(examples, *p.shape, dtype=torch.float64) for p in layer.parameters()]
    for i in range(examples):
        of_example = torch.autograd.grad((layer(x[i : i + 1]) * g[i : i + 1]).sum(), list(layer.parameters()))
        for whole, part in zip(expected, of_example, strict=True):
            whole[i] = part
    for found, exact in zip(use.per_example(slice(None)), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)
    if examples:  # an empty batch has one row of zeros
        with torch.no_grad(), performance.use(Settings(chunk_elements=2 * use.elements_per_example)):
            weights = torch.rand(examples, generator=generator, dtype=torch.float64)
            for square, exact in zip(use.sq_norms(), expected, strict=True):
                torch.testing.assert_close(square, exact.flatten(1).square().sum(1), rtol=1e-9, atol=1e-9)
            for total, exact in zip(use.weighted_sums([weights] * 2), expected, strict=True):
                torch.testing.assert_close(total, torch.tensordot(weights, exact, 1), rtol=1e-9, atol=1e-9)


def test_patches_of_a_row_use_the_same_memory_in_every_step(monkeypatch):
    for module in (native, layers):
        monkeypatch.setattr(module, "_load", lambda: (None, "left out by the test"))
    workspace.clear()
    model = nn.Sequential(nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 3))
    x, y, sizes = torch.randn(5, 16, 6, 6), torch.randint(0, 3, (5,)), []
    for _ in range(3):
        single(model, x, y, "per-layer")
        sizes.append(sorted(buffer.data_ptr() for buffer in workspace._free))
    assert sizes[0] and sizes[0] == sizes[1] == sizes[2]
    workspace.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 5000])
def test_norms_of_long_rows_are_added_up_in_blocks(length, dtype, monkeypatch):
    monkeypatch.setattr(native, "kernels", lambda: None)
    rows = torch.randn(4, length, dtype=dtype) + 3.0
    by_parts = torch.stack([rows, 2 * rows]).movedim(0, 1)  # in memory part by part
    with torch.no_grad():
        exact = rows.double().square().sum(1)
        torch.testing.assert_close(row_sq_norms(rows).double(), exact, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(row_sq_norms(by_parts).double(), 5 * exact, rtol=1e-6, atol=0.0)
        ones = torch.ones(1, 10**7, dtype=dtype)
        assert float(row_sq_norms(ones)) == pytest.approx(1e7, rel=1e-6)
