"""Each kind of layer in random shapes and settings, batches of 0, 1 and more, lengths down to 1."""

from __future__ import annotations

import warnings

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from networks import compare
from torch import nn

batches = st.sampled_from([0, 1, 2, 5])
clippings = st.sampled_from(["per-layer", "flat"])
bounds = st.floats(1e-3, 10.0)
flags = st.booleans()
small = st.integers(1, 4)
few = settings(max_examples=40)


class Headed(nn.Module):
    """A layer, a squashing, and a linear head on everything that comes out."""

    def __init__(self, layer: nn.Module, example: torch.Tensor) -> None:
        super().__init__()
        self.layer = layer.double()
        with torch.no_grad():
            features = self.layer(example).flatten(1).shape[1]
        self.head = nn.Linear(features, 3).double()

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x)).flatten(1))


def check(layer, shape, n, clipping, bound, tokens=0):
    torch.manual_seed(0)
    draw = (lambda k: torch.randint(0, tokens, (k, *shape))) if tokens else (lambda k: torch.randn(k, *shape).double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of uneven "same" padding and of tiny inputs
        try:
            model = Headed(layer, draw(1))
        except (RuntimeError, ValueError):
            assume(False)  # settings that torch itself refuses for this shape
        compare(model, draw(n), torch.randint(0, 3, (n,)), clipping=clipping, bound=bound)


@few
@given(st.lists(small, max_size=3), small, small, flags, batches, clippings, bounds)
def test_linear(middle, inputs, outputs, bias, n, clipping, bound):
    check(nn.Linear(inputs, outputs, bias=bias), (*middle, inputs), n, clipping, bound)


@few
@given(st.data(), st.sampled_from([1, 2, 3]), flags, batches, clippings, bounds)
def test_convolutions(data, dims, transposed, n, clipping, bound):
    groups = data.draw(st.integers(1, 2))
    channels, out = groups * data.draw(st.sampled_from([1, 2, 6])), groups * data.draw(st.sampled_from([1, 2, 16]))
    size = tuple(data.draw(st.integers(1, 5)) for _ in range(dims))
    kernel = tuple(data.draw(st.integers(1, 3)) for _ in range(dims))
    stride = tuple(data.draw(st.integers(1, 3)) for _ in range(dims))
    dilation = tuple(data.draw(st.integers(1, 2)) for _ in range(dims))
    extra = {"stride": stride, "dilation": dilation, "groups": groups, "bias": data.draw(flags)}
    if transposed:
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        extra["padding"] = tuple(data.draw(st.integers(0, 1)) for _ in range(dims))
        extra["output_padding"] = tuple(data.draw(st.integers(0, 1)) for _ in range(dims))
    else:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        if data.draw(flags):
            extra["padding"], extra["stride"] = "same", (1,) * dims
        else:
            extra["padding"] = tuple(data.draw(st.integers(0, 2)) for _ in range(dims))
        extra["padding_mode"] = data.draw(st.sampled_from(["zeros", "circular", "replicate", "reflect"]))
    try:
        layer = kind(channels, out, kernel, **extra)
    except (ValueError, RuntimeError):
        assume(False)
    check(layer, (channels, *size), n, clipping, bound)


@few
@given(st.data(), st.sampled_from(["layer", "rms", "group", "instance", "prelu"]), flags, batches, clippings, bounds)
def test_norms_and_prelu(data, kind, bias, n, clipping, bound):
    groups = data.draw(st.integers(1, 3))
    channels = groups * data.draw(st.integers(1, 3))
    places = tuple(data.draw(st.lists(small, min_size=1, max_size=2)))
    if kind == "layer":
        last = data.draw(st.integers(1, len(places)))
        layer = nn.LayerNorm(places[-last:], bias=bias)
    elif kind == "rms":
        layer = nn.RMSNorm(places[-1:])
    elif kind == "group":
        layer = nn.GroupNorm(groups, channels)
    elif kind == "instance":
        layer = (nn.InstanceNorm1d, nn.InstanceNorm2d)[len(places) - 1](channels, affine=True)
    else:
        layer = nn.PReLU(channels if bias else 1)
    check(layer, (channels, *places), n, clipping, bound)


@few
@given(st.data(), st.sampled_from(["embedding", "bag"]), batches, clippings, bounds)
def test_embeddings(data, kind, n, clipping, bound):
    tokens, width = data.draw(st.integers(1, 6)), data.draw(small)
    padding = data.draw(st.one_of(st.none(), st.integers(0, tokens - 1)))
    if kind == "bag":
        layer = nn.EmbeddingBag(tokens, width, mode=data.draw(st.sampled_from(["sum", "mean"])), padding_idx=padding)
        shape = (data.draw(small),)
    else:
        layer = nn.Embedding(tokens, width, padding_idx=padding)
        shape = tuple(data.draw(st.lists(small, min_size=1, max_size=2)))
    check(layer, shape, n, clipping, bound, tokens=tokens)
