"""The kinds of layers that the tests of Opacus go through, over the ranges of their settings; batch first and not."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from made import Made, follow, like_the_reference, weight
from torch import nn

N, T, D = 5, 4, 6


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


def check(model, *inputs):
    """Per layer and flat, in train and eval mode, with a second batch of another size."""
    plain = copy.deepcopy(model.double())
    for clipping, training in (("per-layer", True), ("flat", False)):
        clipper = follow(model.train(training), clipping, bound=0.5)
        plain.train(training)
        like_the_reference(clipper, plain, *inputs)
        like_the_reference(clipper, plain, *(t[:3] for t in inputs))
        clipper.detach()


def grid(**ranges):
    """Every combination of the settings, as pytest's parameters."""
    keys = list(ranges)
    combinations = [dict(zip(keys, values, strict=True)) for values in itertools.product(*ranges.values())]
    return pytest.mark.parametrize("settings", combinations, ids=lambda s: "-".join(str(v) for v in s.values()))


@grid(shape=[(), (T,), (T, 3)], outputs=[1, 7], bias=[True, False])
def test_linear(settings):
    layer = nn.Linear(D, settings["outputs"], bias=settings["bias"])
    check(layer, torch.randn(N, *settings["shape"], D).double())


@grid(
    dims=[1, 2, 3], kernel_size=[1, 3], stride=[1, 2], padding=[0, 1, "same", "valid"], groups=[1, 2], dilation=[1, 2]
)
def test_convolutions(settings):
    dims = settings.pop("dims")
    if settings["padding"] == "same" and settings["stride"] > 1:
        pytest.skip("torch has no strided convolution of the same size")
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](2, 4, **settings)
    check(layer, torch.randn(N, 2, *[(9, 7, 6)[i] for i in range(dims)]).double())


@grid(kind=[nn.LSTM, nn.GRU, nn.RNN], layers=[1, 2], bias=[True, False], both=[True, False], first=[True, False])
def test_recurrent(settings):
    first = settings["first"]
    cell = settings["kind"](
        D, 3, settings["layers"], bias=settings["bias"], bidirectional=settings["both"], batch_first=first
    )

    def forward(m, x, h):
        state = h.movedim(1, 0).contiguous()
        state = (state, state.flip(0)) if settings["kind"] is nn.LSTM else state
        out, last = m.cell(x if first else x.transpose(0, 1), state)
        last = last[0] if isinstance(last, tuple) else last
        return torch.cat([(out if first else out.transpose(0, 1)).flatten(1), last.transpose(0, 1).flatten(1)], 1)

    states = settings["layers"] * (2 if settings["both"] else 1)
    check(Made(forward, cell=cell), torch.randn(N, T, D).double(), torch.randn(N, states, 3).double())


@grid(heads=[1, 2], bias=[True, False], bias_kv=[True, False], zero=[True, False], kdim=[None, 3], first=[True, False])
def test_multi_head_attention(settings):
    first, kdim = settings["first"], settings["kdim"]
    layer = nn.MultiheadAttention(
        D,
        settings["heads"],
        bias=settings["bias"],
        add_bias_kv=settings["bias_kv"],
        add_zero_attn=settings["zero"],
        kdim=kdim,
        vdim=kdim,
        batch_first=first,
    )

    def forward(m, q, k):
        if not first:
            q, k = q.transpose(0, 1), k.transpose(0, 1)
        out = m.attend(q, k, k)[0]
        return out if first else out.transpose(0, 1)

    check(Made(forward, attend=layer), torch.randn(N, T, D).double(), torch.randn(N, T + 1, kdim or D).double())


@grid(padding=[None, 1], shape=[(), (T,), (T, 2)])
def test_embedding(settings):
    check(nn.Embedding(9, D, padding_idx=settings["padding"]), torch.randint(0, 9, (N, *settings["shape"])))


@grid(mode=["sum", "mean", "max"], padding=[None, 1])
def test_embedding_bag(settings):
    check(nn.EmbeddingBag(9, D, mode=settings["mode"], padding_idx=settings["padding"]), torch.randint(0, 9, (N, T)))


@grid(groups=[1, 2, 6], dims=[1, 2, 3])
def test_group_norm(settings):
    check(nn.GroupNorm(settings["groups"], D), torch.randn(N, D, *[3, 4, 2][: settings["dims"]]).double())


@grid(dims=[1, 2, 3])
def test_instance_norm(settings):
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[settings["dims"] - 1]
    check(kind(D, affine=True), torch.randn(N, D, *[3, 4, 2][: settings["dims"]]).double())


@grid(kind=[nn.LayerNorm, nn.RMSNorm], over=[1, 2], before=[0, 1, 2])
def test_layer_norm(settings):
    shape = (T, D)[2 - settings["over"] :]
    check(settings["kind"](shape), torch.randn(N, *(3, 2)[: settings["before"]], *shape).double())


@pytest.mark.parametrize("first", [True, False])
def test_a_bias_at_the_end_of_a_sequence(first):
    def forward(m, x):
        given = x if first else x.transpose(0, 1)
        row = m.b.expand(len(x), 1, -1) if first else m.b.expand(1, len(x), -1)
        out = torch.cat([given, row], 1 if first else 0)
        return out if first else out.transpose(0, 1)

    check(Made(forward, b=weight(D)), torch.randn(N, T, D).double())
