"""Views of one example are averaged before they are clipped: the engine equals one example at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import FLOATS, IMAGES, TOKENS, CalledTwice, compare, seq
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradveil.clipping import Clipper, clipped_sums, make_groups, performance
from gradveil.clipping import clipper as clipping_module
from gradveil.clipping.per_sample_grads import CombinedGrads
from gradveil.clipping.rules.conv_use import ConvGrads
from gradveil.clipping.views import ViewedGrads, of_examples
from gradveil.errors import ConfigError, UnsupportedModelError

SLOW_PATHS = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*cannot be vectorised")


def labels(n, views):
    return torch.randint(0, 3, (n,)).repeat_interleave(views)


@SLOW_PATHS
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("name", FLOATS)
def test_clipped_sums_of_views_equal_the_reference(name, clipping):
    make, shape = FLOATS[name]
    model = make().double()
    for views in (1, 2, 3):
        x, y = torch.randn(4 * views, *shape).double(), labels(4, views)
        for n in (4, 1, 0):
            rows = slice(n * views)
            compare(copy.deepcopy(model), x[rows], y[rows], clipping=clipping, views=views)
        compare(copy.deepcopy(model), x, y, clipping=clipping, reduction="sum", views=views)
        compare(copy.deepcopy(model), x, y, clipping=clipping, bound=1e6, views=views)  # nothing clipped
    compare(copy.deepcopy(model).float(), x.float(), y, clipping=clipping, tolerance=1e-4, views=3)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("name", TOKENS)
def test_views_of_tokens_equal_the_reference(name, clipping):
    make, shape = TOKENS[name]
    model = make().double()
    for views in (1, 2, 3):
        x = torch.randint(0, 3 if name == "tied embedding" else 5, (4 * views, *shape))
        for n in (4, 1, 0):
            compare(copy.deepcopy(model), x[: n * views], labels(n, views), clipping=clipping, views=views)


@st.composite
def convolutions(draw):
    """A convolution, plain or transposed, with random settings, and its input shape."""
    groups, kernel, dilation = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    kind = draw(st.sampled_from([nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d]))
    settings = {"stride": draw(st.integers(1, 3)), "dilation": dilation, "groups": groups, "bias": draw(st.booleans())}
    # Padding may exceed the kernel: then more rows come out than went in.
    settings["padding"] = draw(st.integers(0, 1 if kind is nn.ConvTranspose2d else 4))
    if kind is nn.ConvTranspose2d:
        settings["output_padding"] = draw(st.integers(0, max(settings["stride"], dilation) - 1))
    layer = kind(groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), kernel, **settings)
    return layer, (layer.in_channels, *[draw(st.integers(6, 8)) for _ in layer.kernel_size])


@given(convolutions(), st.integers(2, 3), st.sampled_from(["per-layer", "flat"]), st.integers(0, 99))
def test_views_of_random_convolutions(convolution, views, clipping, seed):
    layer, shape = convolution
    torch.manual_seed(seed)
    x, y = torch.randn(3 * views, *shape), labels(3, views)
    model = seq(layer, nn.Tanh(), nn.Flatten(), nn.Linear(layer(x[:1]).numel(), 3))
    for formula in ("auto", "gram"):
        with performance.use(performance.Settings(formula=formula)):
            compare(copy.deepcopy(model).double(), x.double(), y, clipping=clipping, views=views)
    compare(model, x, y, clipping=clipping, tolerance=1e-4, views=views)  # in C++, where there is a compiler


def small():
    return seq(nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(3, 3), nn.Flatten(), nn.Linear(192, 3)).double()


def _clipped_apart(use, views):
    """A planted fault: every view is clipped by itself."""
    return use


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_views_clipped_apart_would_be_seen(clipping, monkeypatch):
    torch.manual_seed(0)
    model, x, y = small(), torch.randn(8, *IMAGES).double(), labels(4, 2)
    compare(copy.deepcopy(model), x, y, clipping=clipping, views=2)
    groups = make_groups(model, clipping)
    bounds = [0.05] * len(groups)
    together = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=bounds, views=2).sums
    apart = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=bounds).sums
    assert max(float((together[name] - apart[name] / 2).abs().max()) for name in together) > 1e-3
    monkeypatch.setattr(clipping_module, "of_examples", _clipped_apart)
    with pytest.raises(AssertionError):
        compare(copy.deepcopy(model), x, y, clipping=clipping, views=2)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", [small, lambda: small().float(), lambda: seq(nn.Flatten(), CalledTwice()).double()])
def test_a_view_that_is_not_finite_drops_its_example_and_no_other(make, bad, clipping):
    model = make()
    shape = IMAGES if len(model) == 4 else (6,)
    dtype = next(model.parameters()).dtype
    x, y = torch.randn(12, *shape).to(dtype), labels(4, 3)
    x[4].view(-1)[0] = bad  # the second view of the second example
    groups = make_groups(model, clipping)
    bounds = [0.05] * len(groups)
    # A bounded activation makes a finite number of an infinite one: then the example counts where it is finite.
    left = slice(None) if bad == float("inf") else torch.tensor([0, 1, 2, 6, 7, 8, 9, 10, 11])
    reference = clipped_sums(model, F.cross_entropy, x[left], y[left], groups=groups, bounds=bounds, views=3)
    clipper = Clipper(model, groups, bounds=bounds, loss_reduction="mean", views=3)
    F.cross_entropy(model(x), y).backward()
    for name, p in model.named_parameters():
        assert float((p.grad - reference.sums[name]).abs().max()) < (1e-9 if dtype is torch.float64 else 1e-5)
    assert clipper.clip_stats.not_finite == 1
    assert clipper.clip_stats.examples == 4
    clipper.detach()


def test_an_example_stays_within_its_bound_whatever_its_views_are():
    model = small().float()
    groups = make_groups(model, "flat")
    clipper = Clipper(model, groups, bounds=[0.5], loss_reduction="mean", views=4)
    for scale in (1e-3, 1.0, 1e6, 1e18):
        model.zero_grad()
        clipper.start_step()
        F.cross_entropy(model(scale * torch.randn(4, *IMAGES)), labels(1, 4)).backward()
        norm = torch.cat([p.grad.flatten().double() for p in model.parameters()]).norm()
        assert float(norm) <= 0.5


def test_normalised_gradients_of_views():
    model, x, y = small(), torch.randn(8, *IMAGES).double(), labels(4, 2)
    groups = make_groups(model, "per-layer")
    bounds = [0.3] * len(groups)
    reference = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=bounds, gamma=0.01, views=2)
    clipper = Clipper(model, groups, bounds=bounds, loss_reduction="mean", views=2)
    clipper.weighing.gamma = 0.01
    F.cross_entropy(model(x), y).backward()
    for name, p in model.named_parameters():
        assert float((p.grad - reference.sums[name]).abs().max()) < 1e-9
    clipper.detach()


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_any_split_into_physical_batches_gives_the_same_sums(clipping):
    model, x, y = small(), torch.randn(10, *IMAGES).double(), labels(5, 2)
    groups = make_groups(model, clipping)
    bounds = [0.05] * len(groups)
    whole = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=bounds, views=2).sums
    for size in (1, 2, 5):
        clipper = Clipper(model, groups, bounds=bounds, loss_reduction="mean", views=2)
        for start in range(0, 10, 2 * size):
            F.cross_entropy(model(x[start : start + 2 * size]), y[start : start + 2 * size]).backward()
        for name, p in model.named_parameters():
            assert float((p.grad - whole[name]).abs().max()) < 1e-12
            p.grad = None
        assert clipper.clip_stats.examples == 5
        clipper.detach()


def test_a_use_of_no_known_kind_is_added_up_by_rows():
    torch.manual_seed(0)
    fields, maps = torch.randn(6, 2, 5, 5).double(), torch.randn(6, 3, 3, 3).double()
    geometry = {"kernel": (3, 3), "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}

    def of_rows():
        return ConvGrads(fields, maps, maps, weight=True, bias=True, **geometry)

    expected = of_examples(of_rows(), 2)
    assert type(expected) is ConvGrads
    for inner in (of_rows(), CombinedGrads([of_rows()])):
        found = ViewedGrads(inner, 2)
        assert found.examples == 3
        for chunk in (slice(None), slice(1, 2)):
            for a, b in zip(found.per_example(chunk), expected.per_example(chunk), strict=True):
                assert torch.allclose(a, b, rtol=1e-12)
        for a, b in zip(found.sq_norms(), expected.sq_norms(), strict=True):
            assert torch.allclose(a, b, rtol=1e-12)
        keep = torch.tensor([True, False, True])
        found.keep(keep)
        weights = [torch.tensor([0.5, 0.0, 2.0]).double()] * 2
        for a, b in zip(found.weighted_sums(weights), expected.weighted_sums(weights), strict=True):
            assert torch.allclose(a, b, rtol=1e-12)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = small()

    def forward(self, x):
        x = checkpoint(self.layers[:2], x, use_reentrant=False)
        return self.layers[2:](x)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_views_through_a_checkpoint(clipping):
    x, y = torch.randn(8, *IMAGES).double(), labels(4, 2)
    compare(Checkpointed(), x, y, clipping=clipping, views=2)


def test_rows_that_are_no_whole_number_of_examples_are_refused():
    model = small()
    clipper = Clipper(model, make_groups(model, "flat"), bounds=[1.0], loss_reduction="mean", views=2)
    with pytest.raises(ConfigError, match=r"7 rows, and views is 2.*torch\.stack"):
        model(torch.randn(7, *IMAGES).double())
    clipper.detach()


def test_rows_that_mix_are_refused_whether_they_are_views_or_not():
    model = small()
    clipper = Clipper(model, make_groups(model, "flat"), bounds=[1.0], loss_reduction="mean", views=2)
    out = model(torch.randn(4, *IMAGES).double())
    with pytest.raises(UnsupportedModelError, match="mixes examples"):
        F.cross_entropy(out - out.mean(0), labels(2, 2)).backward()
    clipper.detach()
