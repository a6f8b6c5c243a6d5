"""Rows that are chosen by what is in them: experts, packed sequences, bags, sorting. Against one example at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from made import Made, follow, like_the_reference, weight
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gradveil.errors import UnsupportedModelError

B, T, D, E = 6, 5, 4, 3


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


def mlp():
    return nn.Sequential(nn.Linear(D, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, D))


def pooled(m, h):
    return m.head(torch.tanh(h).mean(1))


def by_index(m, x):
    """As people write experts: tokens of an expert, their outputs added back."""
    rows, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
    gates = m.gate(rows).softmax(-1)
    weights, chosen = gates.topk(2, -1)
    for e, expert in enumerate(m.experts):
        token, place = torch.where(chosen == e)
        out.index_add_(0, token, expert(rows[token]) * weights[token, place, None])
    return pooled(m, out.view_as(x))


def by_mask(m, x):
    """A mask of positions; what is chosen goes back where it came from."""
    out, chosen = x.clone(), x[..., 0] > 0
    out[chosen] = m.experts[0](x[chosen]) * m.scale
    return pooled(m, out)


def by_matrix(m, x):
    """Experts as slices of one parameter, those that nobody chose left out (transformers' way)."""
    rows, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
    chosen = m.gate(rows).argmax(-1)
    for e in chosen.unique():
        token = (chosen == e).nonzero().flatten()
        out = out.index_add(0, token, F.silu(F.linear(rows[token], m.up[e])) + m.shift[e])
    return pooled(m, out.view_as(x))


def by_lookup(m, x):
    """A matrix for every token."""
    rows = x.flatten(0, 1)
    chosen = m.gate(rows).argmax(-1)
    return pooled(m, torch.bmm(m.up[chosen], rows.unsqueeze(-1)).squeeze(-1).view_as(x) + m.shift[chosen].view_as(x))


def by_sorting(m, x):
    """Tokens in the order of their experts, and back."""
    rows = x.flatten(0, 1)
    order = m.gate(rows).argmax(-1).argsort()
    out = m.experts[0](rows[order]) + m.shift[m.gate(rows).argmax(-1)[order]]
    return pooled(m, out[order.argsort()].view_as(x))


def gathered(m, x):
    """The best half of every example's own tokens."""
    best = x.norm(dim=-1).topk(2, 1).indices
    return m.head(m.experts[0](x.gather(1, best.unsqueeze(-1).expand(-1, -1, D))).sum(1))


ROUTED = [by_index, by_mask, by_matrix, by_lookup, by_sorting, gathered]


def routed(forward):
    return Made(
        forward,
        gate=nn.Linear(D, E),
        experts=nn.ModuleList([mlp() for _ in range(E)]),
        up=weight(E, D, D),
        shift=weight(E, D),
        scale=weight(D),
        head=nn.Linear(D, 3),
    ).double()


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("forward", ROUTED)
def test_experts(forward, clipping):
    model = routed(forward)
    plain = copy.deepcopy(model)
    clipper = follow(model, clipping, bound=0.3)
    for n in (B, 3, 1, 2 * B):
        like_the_reference(clipper, plain, torch.randn(n, T, D).double())


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences(kind, batch_first, enforce_sorted, clipping):
    both = kind is not nn.RNN

    def forward(m, x, lengths):
        given = x if batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(given, lengths, batch_first=batch_first, enforce_sorted=enforce_sorted)
        out, last = m.cell(packed)
        last = last[0] if kind is nn.LSTM else last
        steps, _ = pad_packed_sequence(out, batch_first=batch_first, total_length=T)  # as long whoever else is there
        steps = steps if batch_first else steps.transpose(0, 1)
        return m.head(steps).sum(1) + m.end(last.transpose(0, 1).flatten(1))

    directions = 2 if both else 1
    cell = kind(D, 3, num_layers=2, bidirectional=both, batch_first=batch_first)
    model = Made(forward, cell=cell, head=nn.Linear(3 * directions, 2), end=nn.Linear(6 * directions, 2)).double()
    plain = copy.deepcopy(model)
    clipper = follow(model, clipping, bound=0.3)
    for n in (B, 3, 1):
        lengths = torch.randint(1, T + 1, (n,))
        lengths = lengths.sort(descending=True).values if enforce_sorted else lengths
        like_the_reference(clipper, plain, torch.randn(n, T, D).double(), lengths)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("how", ["offsets", "with the last", "weights"])
def test_bags(mode, how):
    if how == "weights" and mode != "sum":
        pytest.skip("torch weighs tokens in sums only")

    def forward(m, x):
        lengths = (x[:, 0] % T).clamp(min=1)  # of its own for each example
        steps = torch.arange(T)
        tokens = x[steps < lengths.unsqueeze(1)]
        ends = lengths.cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends]) if m.bag.include_last_offset else ends - lengths
        weights = torch.linspace(0.5, 1.5, 9).double()[tokens] if how == "weights" else None
        return m.head(m.bag(tokens, offsets, per_sample_weights=weights))

    bag = nn.EmbeddingBag(9, D, mode=mode, include_last_offset=how == "with the last", padding_idx=2)
    model = Made(forward, bag=bag, head=nn.Linear(D, 2)).double()
    plain = copy.deepcopy(model)
    for clipping in ("per-layer", "flat"):
        clipper = follow(model, clipping, bound=0.3)
        for n in (B, 3):
            like_the_reference(clipper, plain, torch.randint(0, 9, (n, T)))
        clipper.detach()


def test_rows_that_are_mixed_after_they_were_chosen_are_refused():
    def forward(m, x):
        rows = x.flatten(0, 1)
        chosen = rows[rows[:, 0] > 0]
        h = m.experts[0](chosen - chosen.mean(0))
        return pooled(m, x + h.mean(0))

    follow(model := routed(forward))
    with pytest.raises(UnsupportedModelError, match="mixes examples"):
        model(torch.randn(B, T, D).double())


def test_rows_whose_owners_are_lost_are_refused_by_name():
    def forward(m, x):
        rows = x.flatten(0, 1)
        chosen = rows[rows[:, 0] > 0]
        h = m.experts[0][0](chosen.flatten().view(-1, D))  # the same rows, but nobody can tell
        return pooled(m, x) + 0 * h.sum()

    follow(model := routed(forward))
    with pytest.raises(UnsupportedModelError, match=r"linear\(\) uses parameter 'experts.0.0.weight'.*not known whose"):
        model(torch.randn(B, T, D).double())


@pytest.mark.parametrize("how", ["list", "tensor"])
def test_a_model_that_sorts_after_first_batches_in_order(how):
    """What is unknown of rows after an operation that does not keep them apart is not taken from the first batches."""

    def forward(m, x, n):
        order = sorted(range(len(x)), key=lambda i: -int(n[i])) if how == "list" else n.argsort(descending=True)
        back = sorted(range(len(x)), key=lambda i: order[i]) if how == "list" else order.argsort()
        h = m.experts[0](torch.tanh(m.gate(x))[order] @ m.up[0, :E]) * (torch.arange(T) < n[order][:, None])[..., None]
        return m.head(h.sum(1)[back])

    model = routed(forward)
    plain = copy.deepcopy(model)
    clipper = follow(model, bound=0.3)
    for n in (torch.full((B,), T), torch.full((B,), T), torch.tensor([1, 4, 2, 5, 3, 1])):
        like_the_reference(clipper, plain, torch.randn(B, T, D).double(), n)


def test_packed_sequences_after_first_batches_of_equal_lengths():
    def forward(m, x, n):
        packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        return m.head(pad_packed_sequence(m.cell(packed)[0], batch_first=True, total_length=T)[0].sum(1))

    model = Made(forward, cell=nn.GRU(D, 3, batch_first=True), head=nn.Linear(3, 2)).double()
    plain = copy.deepcopy(model)
    clipper = follow(model, bound=0.3)
    for n in (torch.full((B,), T), torch.full((B,), T), torch.tensor([1, 4, 2, 5, 3, 1])):
        like_the_reference(clipper, plain, torch.randn(B, T, D).double(), n)
