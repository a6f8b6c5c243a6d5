"""Parameters are followed wherever an operation uses them: what real networks do with theirs, against the oracle."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import types
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import Made, follow, like_the_reference, weight
from networks import compare
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradveil.clipping import Clipper, clipped_sums, make_groups
from gradveil.clipping.operations.layout import Layout, NoLayout, find
from gradveil.clipping.operations.sources import Region, are_disjoint
from gradveil.errors import PrivacyViolation, UnsupportedModelError

B, T, D = 6, 4, 6


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def head(m, h):
    """(B, T, D) to three classes."""
    return m.head(torch.tanh(h).mean(1))


def made(forward, **members):
    return Made(lambda m, x: head(m, forward(m, x)), head=nn.Linear(D, 3), **members)


def windows(m, x):
    """Attention within windows of two positions: the batch is folded with them."""
    folded = x.view(-1, T // 2, 2, D).flatten(0, 1)
    q, k, v = m.qkv(folded).chunk(3, -1)
    scores = (q @ k.mT).view(len(x), T // 2, 2, 2) + m.bias[m.index].view(2, 2)
    return (scores.softmax(-1).flatten(0, 1) @ v).view(len(x), T, D)


def dora(m, x):
    """A low-rank change of a frozen matrix, with a length of its own for every row."""
    w = m.frozen + m.b @ m.a
    return F.linear(x, m.length[:, None] * w / w.norm(dim=1, keepdim=True))


def position_mlp(m, x):
    """A network on constants gives a bias for every pair of positions, as in Swin v2."""
    bias = m.second(torch.relu(m.first(m.table))).view(T, T)
    return (bias + x @ x.mT).softmax(-1) @ m.value(x)


def masked(m, x):
    h = m.embed(x)
    h[x[:, :, 0] > 0.5] = m.token
    return m.value(h)


def routed(m, x):
    gates = m.gate(x).softmax(-1)
    return sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(m.experts))


def queries(m, x):
    """DETR: learned queries attend to each other, and then to the example."""
    q = m.queries.expand(len(x), -1, -1)
    return m.cross(m.own(q, q, q)[0], x, x)[0]


def recurrent_start(m, x):
    start = m.start.expand(-1, len(x), -1).contiguous()
    return m.cell(x, start)[0]


def video(m, x):
    frames = x.reshape(len(x) * T, 1, 2, 3)
    return m.conv(frames).view(len(x), T, D)


def frequencies(m, x):
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.filter), n=T, dim=1)


def checkpointed(reentrant):
    def forward(m, x):
        outside = None if reentrant else m.w * m.scale  # torch's reentrant kind would free its graph

        def inner(h):
            w = m.w * m.scale if outside is None else outside
            return torch.tanh(F.linear(h, w) + m.shift)

        return inner(checkpoint(inner, x + m.start, use_reentrant=reentrant))

    return forward


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0), 1, enable_nested_tensor=False)


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 8, dropout=0.0), 1)


def mha(**settings: Any) -> nn.Module:
    return nn.MultiheadAttention(D, 2, **settings)


def filled(m, x):
    """A class token that is written into place, and a mask token."""
    z = x.new_zeros(len(x), T + 1, D)
    z[:, 0] = m.token
    z[:, 1:] = m.value(x)
    return z.masked_fill(x[:, :1, :1] > 0.5, m.fill)


def complex_product(m, x):
    return (torch.complex(x, x.flip(-1)) @ torch.view_as_complex(m.w)).real


def watched(m, x):
    h = m.value(x)
    h.register_hook(lambda g: g * 2.0)
    return h


def linear(*, bias: bool = True) -> nn.Module:
    return nn.Linear(D, D, bias=bias)


INDEX = torch.tensor([[0, 1], [2, 0]])
NETWORKS: dict[str, Any] = {
    "class token": lambda: made(
        lambda m, x: m.body(torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.position),
        token=weight(1, 1, D),
        position=weight(1, T + 1, D),
        body=nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True),
    ),
    "layer scale": lambda: made(lambda m, x: x + m.gamma * m.value(x), gamma=weight(D), value=linear()),
    "custom norm": lambda: made(lambda m, x: x * x.square().mean(-1, True).rsqrt() * (1 + m.w), w=weight(D)),
    "window attention": lambda: made(windows, qkv=nn.Linear(D, 3 * D), bias=weight(3), index=INDEX.flatten()),
    "sequence first": lambda: made(
        lambda m, x: m.body(x.transpose(0, 1)).transpose(0, 1), body=nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0)
    ),
    "encoder and decoder": lambda: made(
        lambda m, x: m.body(x.transpose(0, 1), m.queries.expand(-1, len(x), -1)).transpose(0, 1),
        body=nn.Transformer(D, 2, custom_encoder=encoder(), custom_decoder=decoder()),
        queries=weight(3, 1, D),
    ),
    "learned queries": lambda: made(
        queries, queries=weight(1, 3, D), own=mha(batch_first=True), cross=mha(batch_first=True)
    ),
    "packed attention of two": lambda: made(
        lambda m, x: m.attend(x, x.flip(1), x.flip(1))[0], attend=mha(batch_first=True)
    ),
    "position network": lambda: made(
        position_mlp, first=nn.Linear(2, 5), second=nn.Linear(5, 1), table=torch.randn(T * T, 2), value=linear()
    ),
    "positions looked up": lambda: made(
        lambda m, x: m.value(x + m.p(torch.tensor([0, 2, 2, 1]))), p=nn.Embedding(9, D), value=linear()
    ),
    "weight elsewhere": lambda: made(lambda m, x: F.linear(torch.tanh(m.value(x)), m.value.weight), value=linear()),
    "transposed": lambda: made(lambda m, x: torch.tanh(x @ m.w) @ m.w.T, w=weight(D, D)),
    "slices apart": lambda: made(lambda m, x: F.linear(x, m.w[:D]) * F.linear(x, m.w[D:]), w=weight(2 * D, D)),
    "slices that overlap": lambda: made(
        lambda m, x: F.linear(x, m.w[:D]) * F.linear(x, m.w[2 : D + 2]), w=weight(D + 2, D)
    ),
    "symmetric": lambda: made(lambda m, x: x @ (m.w + m.w.T), w=weight(D, D)),
    "weight norm": lambda: made(lambda m, x: m.value(x), value=nn.utils.parametrizations.weight_norm(nn.Linear(D, D))),
    "low rank": lambda: made(lambda m, x: F.linear(x, m.b @ m.a), a=weight(2, D), b=weight(D, 2)),
    "DoRA": lambda: made(dora, frozen=torch.randn(D, D), a=weight(2, D), b=weight(D, 2), length=weight(D)),
    "standardised": lambda: made(
        lambda m, x: F.linear(x, F.batch_norm(m.w.view(1, D, D), None, None, weight=m.g, training=True).view(D, D)),
        w=weight(D, D),
        g=weight(D),
    ),
    "hypernetwork": lambda: made(
        lambda m, x: F.linear(x, m.make(m.code).view(D, D)), make=nn.Linear(3, D * D), code=weight(3)
    ),
    "einsum": lambda: made(
        lambda m, x: torch.einsum("btd,hde->bthe", x, m.w).flatten(2) + torch.einsum("...d,de->...e", x, m.v),
        w=weight(2, D, D // 2),
        v=weight(D, D),
    ),
    "einsum by position": lambda: made(lambda m, x: torch.einsum("btd,tde->bte", x, m.w), w=weight(T, D, D)),
    "frequencies": lambda: made(frequencies, filter=weight(T // 2 + 1, D, 2)),
    "mask token": lambda: made(masked, embed=linear(), token=weight(D), value=linear()),
    "dense experts": lambda: made(routed, gate=nn.Linear(D, 2), experts=nn.ModuleList([linear(), linear()])),
    "video": lambda: made(video, conv=nn.Conv2d(1, D, (2, 3))),
    "folded norm": lambda: made(lambda m, x: m.norm(x.reshape(len(x) * T, D)).view(-1, T, D), norm=nn.GroupNorm(2, D)),
    "learned start": lambda: made(recurrent_start, cell=nn.GRU(D, D, batch_first=True), start=weight(1, 1, D)),
    "cells": lambda: made(
        lambda m, x: torch.stack([m.cell(step)[0] for step in x.unbind(1)], 1), cell=nn.LSTMCell(D, D)
    ),
    "recurrent of parameters": lambda: made(
        lambda m, x: x + m.cell(m.prompt)[0], cell=nn.LSTM(D, D, 2, batch_first=True), prompt=weight(1, T, D)
    ),
    "recurrent of a buffer": lambda: made(
        lambda m, x: x * m.cell(m.table)[0], cell=nn.GRU(D, D, bidirectional=False), table=torch.randn(T, D)
    ),
    "cell of parameters": lambda: made(
        lambda m, x: x + m.cell(m.p, m.q), cell=nn.GRUCell(D, D), p=weight(D), q=weight(D)
    ),
    "filled": lambda: made(filled, token=weight(D), value=linear(), fill=nn.Parameter(torch.tensor(0.3))),
    "complex": lambda: made(complex_product, w=weight(D, D, 2)),
    "hook on an activation": lambda: made(watched, value=linear()),
    "like a parameter": lambda: made(lambda m, x: x * m.w + m.w.new_zeros(len(x), T, D), w=weight(D)),
    "copies by cat": lambda: made(lambda m, x: x * torch.cat([m.w[None]] * len(x)), w=weight(T, D)),
    "copies by repeat": lambda: made(lambda m, x: x + m.w.repeat(len(x), 2, 1), w=weight(1, T // 2, D)),
    "checkpoint": lambda: made(checkpointed(False), w=weight(D, D), scale=weight(1), shift=weight(D), start=weight(D)),
    "reentrant checkpoint": lambda: made(
        checkpointed(True), w=weight(D, D), scale=weight(1), shift=weight(D), start=weight(D)
    ),
    "frozen batch norm": lambda: made(
        lambda m, x: m.value(m.norm(x.mT).mT), norm=nn.BatchNorm1d(D).eval(), value=linear()
    ),
}


@pytest.mark.filterwarnings("ignore:gradveil has no rule for")
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_as_people_write_them(name, clipping):
    model = NETWORKS[name]().double()
    x, y = torch.randn(B, T, D).double(), torch.randint(0, 3, (B,))
    for n in (B, 1, 0, T):  # a batch of as many examples as positions comes last, by then as any other
        compare(copy.deepcopy(model), x[:n], y[:n], clipping=clipping)


@pytest.mark.filterwarnings("ignore:gradveil has no rule for")
@pytest.mark.parametrize("name", NETWORKS)
def test_batches_of_other_sizes_on_the_same_model(name):
    """What was learned on the first batch holds for the ones that follow."""
    model = NETWORKS[name]().double()
    groups = make_groups(model, "flat")
    plain = copy.deepcopy(model)
    clipper = Clipper(model, groups, bounds=[0.1], loss_reduction="sum")
    for n in (1, 3, B, T, 1, 2 * B):
        x, y = torch.randn(n, T, D).double(), torch.randint(0, 3, (n,))
        expected = clipped_sums(plain, F.cross_entropy, x, y, groups=groups, bounds=[0.1]).sums
        model.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        clipper.start_step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "settings", [{}, {"num_layers": 2}, {"bidirectional": True}, {"bias": False}, {"proj_size": 3}]
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers(kind, settings, batch_first):
    if "proj_size" in settings and kind is not nn.LSTM:
        pytest.skip("only an LSTM projects its state")
    cell = kind(D, D, batch_first=batch_first, **settings)
    size = (settings.get("proj_size", D)) * (2 if settings.get("bidirectional") else 1)

    def forward(m, x):
        out = m.cell(x if batch_first else x.transpose(0, 1))[0]
        return m.head((out if batch_first else out.transpose(0, 1)).mean(1))

    model = Made(forward, cell=cell, head=nn.Linear(size, 3)).double()
    x, y = torch.randn(B, T, D).double(), torch.randint(0, 3, (B,))
    for clipping in ("per-layer", "flat"):
        compare(copy.deepcopy(model), x, y, clipping=clipping)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_an_operation_without_a_rule_is_taken_example_by_example(clipping):
    model = made(lambda m, x: m.value(torch.cdist(x, m.centres)), centres=weight(D, D), value=linear()).double()
    x, y = torch.randn(B, T, D).double(), torch.randint(0, 3, (B,))
    from gradveil.clipping.operations import last_resort

    last_resort._WARNED.clear()
    with pytest.warns(UserWarning, match=r"no rule for cdist\(\)"):
        compare(model, x, y, clipping=clipping, tolerance=1e-8)


@dataclasses.dataclass
class Found:
    logits: torch.Tensor
    name: str = ""


@pytest.mark.parametrize(
    "wrap",
    [
        Found,
        lambda t: types.SimpleNamespace(logits=t),
        lambda t: {"found": [Found(t)]},
        lambda t: torch.distributions.Categorical(logits=t),
    ],
)
def test_outputs_of_every_kind(wrap):
    def logits(output):
        while isinstance(output, dict | list):
            output = next(iter(output.values())) if isinstance(output, dict) else output[0]
        return output.logits

    model = nn.Sequential(nn.Linear(D, 3), Made(lambda m, x: wrap(x))).double()
    groups = make_groups(model, "flat")
    x, y = torch.randn(B, D).double(), torch.randint(0, 3, (B,))
    expected = clipped_sums(
        model, lambda out, y: F.cross_entropy(logits(out), y), x, y, groups=groups, bounds=[0.1]
    ).sums
    Clipper(model, groups, bounds=[0.1], loss_reduction="mean")
    F.cross_entropy(logits(model(x)), y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


def test_an_output_that_holds_tensors_in_an_unknown_way_is_refused():
    class Odd:
        def __init__(self, t):
            self.hidden = t

    model = nn.Sequential(nn.Linear(D, 3), Made(lambda m, x: (x, Odd(x))))
    follow(model)
    with pytest.raises(UnsupportedModelError, match=r"a Odd that holds tensors \(hidden\)"):
        model(torch.randn(B, D))


def test_a_matrix_of_similarities_is_refused_where_the_loss_uses_it():
    model = Made(lambda m, x: (m.value(x), m.value(x) @ m.value(x).T), value=nn.Linear(D, 3))
    follow(model)
    model(torch.randn(B, D))[0].sum().backward()
    with pytest.raises(UnsupportedModelError, match="batch in more than one dimension"):
        model(torch.randn(B, D))[1].sum().backward()


def test_what_is_derived_of_parameters_alone_is_no_output():
    model = Made(lambda m, x: (x * m.w, m.w * 2), w=weight(D))
    follow(model)
    out, derived = model(torch.randn(B, D))
    with pytest.raises(PrivacyViolation, match="outside the model's forward"):
        (out.sum() + derived.sum()).backward()


def test_batch_norm_that_is_woken_is_refused():
    model = nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, 3)).eval()
    follow(model)
    model(torch.randn(B, D)).sum().backward()
    model.train()
    with pytest.raises(UnsupportedModelError, match="BatchNorm1d was put into training mode"):
        model(torch.randn(B, D))


@pytest.mark.parametrize(
    "write",
    [
        lambda m, h: h.copy_(m.w),
        lambda m, h: h.clamp_(max=m.w),
        lambda m, h: h.index_put_((torch.tensor([0]),), m.w),
        lambda m, h: h.baddbmm_(h.detach().clone(), m.square.expand(len(h), D, D)),
    ],
)
def test_a_write_in_place_is_right_or_refused(write):
    def forward(m, x):
        h = m.value(x)
        write(m, h)  # what it returns is not used
        return h

    model = made(forward, value=linear(), w=weight(D), square=weight(D, D)).double()
    x, y = torch.randn(B, T, D).double(), torch.randint(0, 3, (B,))
    with contextlib.suppress(UnsupportedModelError):
        compare(model, x, y, clipping="flat", tolerance=1e-8)


@pytest.mark.parametrize(
    "derive",
    [
        lambda p, q: torch.zeros(D, D, dtype=p.dtype).copy_(p)[:2].copy_(q[:2]),
        lambda p, q: (p * 1)[0].mul_(q[0]),
        lambda p, q: (p * 1).view(-1).mul_(q.view(-1)),
    ],
)
def test_a_write_to_part_of_a_weight_is_refused(derive):
    def forward(m, x):
        w = m.p * 1
        part = derive(w, m.q)
        return F.linear(x, w) * part.sum()

    follow(model := made(forward, p=weight(D, D), q=weight(D, D)))
    with pytest.raises(UnsupportedModelError, match="writes to a view"):
        model(torch.randn(B, T, D))


def test_examples_in_the_middle_of_a_fold_of_another_size_are_refused():
    def forward(m, x):
        pair = torch.stack([x, x.flip(1)])  # (2, B, T, D)
        return m.value(pair.flatten(0, 2)).view_as(pair).sum(0)

    model = made(forward, value=linear()).double()
    clipper = follow(model)
    model(torch.randn(B, T, D).double()).sum().backward()
    clipper.start_step()
    with pytest.raises(UnsupportedModelError, match="does not fit a batch"):
        model(torch.randn(B, T + 2, D).double())


def test_first_batches_that_are_all_alike_hide_nothing():
    """A sequence that comes first, and layers that start at zero."""

    def forward(m, x):
        h = m.value(x.transpose(0, 1).flatten(0, 1)).view(T, -1, D).transpose(0, 1)
        return h + m.late(m.zero(x).transpose(0, 1).flatten(0, 1)).view(T, -1, D).transpose(0, 1)

    model = made(forward, value=linear(), zero=linear(), late=linear(bias=False)).double()
    nn.init.zeros_(model.zero.weight)
    nn.init.zeros_(model.zero.bias)
    plain = copy.deepcopy(model)
    clipper = follow(model, bound=0.1)
    for scale in (0.0, 0.0, 1.0):
        like_the_reference(clipper, plain, scale * torch.randn(B, T, D).double())
    for one in (model, plain):
        nn.init.constant_(one.zero.weight, 0.3)
    like_the_reference(clipper, plain, torch.randn(B, T, D).double())


def test_a_scripted_module_is_refused_by_name():
    model = nn.Sequential(torch.jit.script(nn.Linear(D, D)), nn.Linear(D, 3))
    with pytest.raises(UnsupportedModelError, match="compiled by TorchScript"):
        follow(model)


def test_nothing_is_kept_alive_by_a_pass():
    model = made(dora, frozen=torch.randn(D, D), a=weight(2, D), b=weight(D, 2), length=weight(D))
    clipper = follow(model)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            x = torch.randn(B, T, D)
            kept = weakref.ref(x)
            model(x).sum().backward()
            clipper.start_step()
            del x
        assert kept() is None  # without the help of the garbage collector
    finally:
        gc.enable()


# ---- layouts


@given(st.integers(1, 3), st.sampled_from([(1, 1), (1, 4), (4, 1), (2, 3)]), st.integers(0, 2), st.integers(2, 5))
def test_a_fold_is_found_from_what_changes(before, fold, dim, example):
    outer, inner = fold

    def batch(n, changed=False):
        values = torch.arange(n).double()
        if changed:
            values[example] += 0.5
        t = values.view(1, n, 1).expand(outer, n, inner).reshape(-1)
        shape = [before + 1] * 3
        shape[dim] = len(t)
        return t.view([-1 if d == dim else 1 for d in range(3)]).expand(shape).clone()

    found = find(batch(6), batch(8), batch(6, changed=True), (6, 8), example)
    assert found is not None and found.dim == dim
    assert found.split(6 * outer * inner, 6) == (outer, 6, inner)
    front, undo = found.front(batch(6), 6)
    assert torch.equal(undo(front), batch(6))
    for i in range(6):
        assert set(front[i].flatten().tolist()) == {float(i)}


def test_what_has_no_layout():
    assert find(torch.zeros(3, 2), torch.zeros(3, 2), None, (5, 7), 2) is None
    with pytest.raises(NoLayout, match="several of its dimensions"):
        find(torch.zeros(5, 5), torch.zeros(7, 7), None, (5, 7), 2)
    with pytest.raises(NoLayout, match="routing"):
        find(torch.zeros(3, 2), torch.zeros(4, 2), None, (5, 7), 2)
    mixed = torch.zeros(10, 1)
    with pytest.raises(NoLayout, match="several"):
        find(mixed, torch.zeros(14, 1), mixed + 1, (5, 7), 2)
    assert Layout(0, 3).split(10, 2) is None


@given(st.integers(0, 5), st.integers(1, 4), st.integers(0, 5), st.integers(1, 4), st.booleans())
def test_regions_that_share_no_element(first, size, second, other, columns):
    p = torch.zeros(10, 10)
    a = p[:, first : first + size] if columns else p[first : first + size]
    b = p[:, second : second + other] if columns else p[second : second + other].T
    apart = not set(range(first, first + size)) & set(range(second, second + other))
    assert are_disjoint(Region.of(a, p), Region.of(b, p)) == apart


def test_a_view_that_repeats_elements_has_no_region():
    p = torch.zeros(3, 4)
    assert Region.of(p.unsqueeze(0).expand(2, 3, 4), p) is None
    assert Region.of(p.unfold(1, 2, 1), p) is None
    assert Region.of(p.clone(), p) is None
