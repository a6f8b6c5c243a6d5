"""Performance settings, formulas and kernels change no sum beyond rounding, and no guarantee."""

from __future__ import annotations

import itertools

import pytest
import torch
from networks import compare
from torch import nn
from torch.nn import functional as F

from gradveil.clipping import Clipper, make_groups, performance
from gradveil.clipping.performance import Settings
from gradveil.clipping.rules import conv, linear
from gradveil.clipping.uses import workspace
from gradveil.kernels import native

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
    largest = max(clipper.harvest.largest(g) for g in range(len(groups)))
    lost = clipper.harvest.not_finite
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
    wide = {"pixels": 64, "places": 100, "fields": 256, "maps": 256, "taps": 9}
    assert conv.choose_formula(**wide, groups=1) == "gram"
    assert conv.choose_formula(**wide, groups=2) == "direct"
    assert conv.choose_formula(pixels=1024, places=1156, fields=64, maps=64, taps=9, groups=1) == "direct"


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
        monkeypatch.setattr(conv, "_BY_CONVOLUTION", least)
        for groups in (1, 2):
            use = conv.ConvUse(x, g, g, weight=True, bias=True, groups=groups, **shape)
            assert use._by_convolution == (least == 1)
            grads = use.per_example(slice(0, 3))
            assert all(grad[0].isfinite().all() and grad[2].isfinite().all() for grad in grads)
            use.keep(torch.tensor([True, False, True]))
            found.append([grad[[0, 2]] for grad in grads] + use.weighted_sums([torch.ones(3)] * 2))
    for one, other in zip(found[:2], found[2:], strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
