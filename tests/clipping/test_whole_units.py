"""Modules followed as a whole, through torch.func: their inputs, their outputs, and what they keep between calls."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import compare
from torch import nn
from torch.nn import functional as F

from gradveil.clipping import Clipper, make_groups
from gradveil.errors import UnsupportedModelError

BATCH, STEPS = 6, 4


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def follow(model, *, bound=1e9, clipping="flat"):
    groups = make_groups(model, clipping)
    return Clipper(model, groups, bounds=[bound] * len(groups), loss_reduction="sum")


def both(model, x, y=None):
    y = torch.randint(0, 3, (len(x),)) if y is None else y
    for clipping in ("per-layer", "flat"):
        model.zero_grad()
        compare(model, x, y, clipping=clipping)


def same_gradients(model, plain, tolerance=1e-10):
    """Nothing is clipped: the sums are the ordinary gradients."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=tolerance, atol=tolerance), name


class Scale(nn.Module):
    """A bare parameter."""

    def __init__(self, size=6):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(size))

    def forward(self, x):
        return x * self.scale


class Calls(nn.Module):
    """Modules, and how a forward pass uses them."""

    def __init__(self, run, **modules):
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args):
        return self.run(self, *args)


# ---- where the batch stands in an input


class FromState(nn.Module):
    """A recurrent network whose initial state comes from another layer, or is zero."""

    def __init__(self, kind, batch_first, layers=2, from_layer=True):
        super().__init__()
        self.cell = kind(6, 5, num_layers=layers, batch_first=batch_first)
        self.start = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)
        self.layers, self.from_layer = layers, from_layer

    def forward(self, x):
        first = torch.tanh(self.start(x[:, 0])).expand(self.layers, -1, -1)
        first = first if self.from_layer else torch.zeros_like(first)
        state = (first, first.clone()) if isinstance(self.cell, nn.LSTM) else first
        if self.cell.batch_first:
            return self.head(self.cell(x, state)[0][:, -1])
        return self.head(self.cell(x.transpose(0, 1), hx=state)[0][-1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batch", [BATCH, STEPS, 2, 1])  # as many examples as steps; as layers; nothing to learn from
def test_recurrent_layers_with_an_initial_state(kind, batch_first, batch):
    for from_layer in (True, False):
        both(FromState(kind, batch_first, from_layer=from_layer).double(), torch.randn(batch, STEPS, 6).double())


def test_attention_with_the_batch_second():
    def run(self, x):
        x = x.transpose(0, 1)
        return self.head(self.attend(x, x, x)[0].mean(0))

    for batch in (BATCH, STEPS, 1):
        model = Calls(run, attend=nn.MultiheadAttention(6, 2), head=nn.Linear(6, 3))
        both(model.double(), torch.randn(batch, STEPS, 6).double())


@pytest.mark.parametrize("batch", [STEPS + 1, STEPS])
def test_a_mask_for_all_examples_is_told_from_one_for_each(batch):
    """As many steps as examples: the mask (T, T) has the shape of a padding mask (B, T)."""
    causal = nn.Transformer.generate_square_subsequent_mask(STEPS, dtype=torch.float64)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    model = Calls(lambda self, x: self.head(self.layer(x, src_mask=causal)[:, -1]), layer=layer, head=nn.Linear(6, 3))
    both(model.double(), torch.randn(batch, STEPS, 6).double())


def test_a_padding_mask_goes_with_its_example():
    def run(self, x):
        padding = x[:, :, 0] > 0.8
        padding[:, 0] = False
        return self.head(self.attend(x, x, x, key_padding_mask=padding)[0].mean(1))

    for batch in (BATCH, STEPS, 1):
        model = Calls(run, attend=nn.MultiheadAttention(6, 2, batch_first=True), head=nn.Linear(6, 3))
        both(model.double(), torch.randn(batch, STEPS, 6).double())


def refused(model, *args, match):
    follow(model)
    with pytest.raises(UnsupportedModelError, match=match):
        model(*args)


def test_a_mask_for_every_head_of_every_example():
    def run(self, x):
        mask = torch.zeros(len(x) * 2, STEPS, STEPS, dtype=x.dtype) + x[:, :, :1].repeat_interleave(2, 0)
        return self.head(self.attend(x, x, x, attn_mask=mask)[0].mean(1))

    model = Calls(run, attend=nn.MultiheadAttention(6, 2, batch_first=True), head=nn.Linear(6, 3))
    both(model.double(), torch.randn(BATCH, STEPS, 6).double())


def test_a_parameter_that_is_handed_to_a_module():
    class Times(Scale):
        def forward(self, x, w):
            return x @ w.T * self.scale

    model = Calls(lambda self, x: self.times(self.a(x), self.a.weight), a=nn.Linear(6, 6), times=Times())
    both(model.double(), torch.randn(BATCH, 6).double())


# ---- outputs


class Indexed(Scale):
    """Outputs that have no gradient: integers, bools, and integers that are not per example."""

    def forward(self, x):
        y = torch.tanh(x * self.scale)
        return y, y.argmax(1), y > 0, torch.tensor(x.shape[0])


class IndexedInALoop(Indexed):
    def forward(self, x):
        return super().forward(x * float(x.detach().abs().max() > -1))


@pytest.mark.parametrize("kind", [Indexed, IndexedInALoop])
def test_outputs_without_a_gradient(kind):
    seen = []

    def run(self, x):
        y, largest, positive, rows = self.unit(self.a(x))
        seen.append(int(rows))
        assert not largest.requires_grad and torch.equal(largest, y.argmax(1)) and torch.equal(positive, y > 0)
        return self.head(y * positive) + F.one_hot(largest, 6)[:, :3]

    model = Calls(run, a=nn.Linear(6, 6), unit=kind(), head=nn.Linear(6, 3)).double()
    both(model, torch.randn(BATCH, 6).double())
    assert seen[-1] == BATCH


def test_an_output_that_depends_on_nothing_that_is_differentiated():
    class Beside(Scale):
        def forward(self, x):
            return x * self.scale, x.detach() * float(x.detach().abs().max() > -1)

    model = Calls(lambda self, x: self.head(sum(self.unit(x))), unit=Beside(), head=nn.Linear(6, 3))
    both(model.double(), torch.randn(BATCH, 6).double())


def test_outputs_that_are_not_tensors_are_those_of_the_whole_batch():
    class Counts(Scale):
        def forward(self, x):
            return F.dropout(x * self.scale, 0.1), x.shape[0], None

    seen = []

    def run(self, x):
        y, rows, nothing = self.unit(x)
        seen.append((len(x), rows, nothing))
        return self.head(y)

    model = Calls(run, unit=Counts(), head=nn.Linear(6, 3))
    follow(model)
    for batch in (BATCH, BATCH, 3):
        model(torch.randn(batch, 6)).sum().backward()
        model.zero_grad()
    assert len(seen) >= 3 and all(rows == given and nothing is None for given, rows, nothing in seen)


def test_a_list_with_a_tensor_for_every_example():
    class Listed(Scale):
        def forward(self, x):
            return list(x * self.scale)

    model = Calls(lambda self, x: torch.stack(self.unit(x)), unit=Listed())
    both(model.double(), torch.randn(BATCH, 6).double())


def test_outputs_may_be_changed_in_place():
    relu = nn.ReLU(inplace=True)
    both(nn.Sequential(nn.Linear(6, 6), Scale(), relu, nn.Linear(6, 3)).double(), torch.randn(BATCH, 6).double())

    def run(self, x):
        out, (h, _) = self.cell(x)
        return self.head(F.relu_(out)[:, -1] + h.mul_(2.0)[-1])

    model = Calls(run, cell=nn.LSTM(6, 5, batch_first=True), head=nn.Linear(5, 3)).double()
    both(model, torch.randn(BATCH, STEPS, 6).double())


# ---- kinds of calls


def test_calls_with_other_outputs():
    def run(self, x):
        once, _ = self.attend(x, x, x, need_weights=False)
        twice, weights = self.attend(once, x, x)
        thrice, of_heads = self.attend(twice, x, x, average_attn_weights=False)
        return self.head(thrice.mean(1)) + weights.square().sum((1, 2))[:, None] + of_heads[:, 0, 0, :3]

    model = Calls(run, attend=nn.MultiheadAttention(6, 2, batch_first=True), head=nn.Linear(6, 3)).double()
    both(model, torch.randn(BATCH, STEPS, 6).double())


def test_calls_whose_outputs_change_with_a_number():
    class Several(Scale):
        def forward(self, x, times):
            return [x * self.scale**i for i in range(1, times + 1)]

    def run(self, x):
        return self.head(sum(self.unit(x, 1)) + sum(self.unit(x, 3)) + sum(self.unit(x, 2)))

    both(Calls(run, unit=Several(), head=nn.Linear(6, 3)).double(), torch.randn(BATCH, 6).double())


# ---- what is as it was in the forward pass


def test_what_is_changed_in_place_is_as_in_ordinary_training():
    """What autograd saves, and so what may be changed before backward(), is the same."""

    def run(self, x):
        h = self.a(x)
        y = torch.tanh(h + self.shift)
        h.mul_(2.0)
        return self.head(y)

    model = Calls(run, a=nn.Linear(6, 6), shift=nn.Parameter(torch.randn(6)), head=nn.Linear(6, 3))
    both(model.double(), torch.randn(BATCH, 6).double())

    def breaks(self, x):
        h = torch.tanh(self.a(x))
        y = h * self.scale
        h.mul_(2.0)
        return self.head(y)

    model = Calls(breaks, a=nn.Linear(6, 6), scale=nn.Parameter(torch.randn(6)), head=nn.Linear(6, 3))
    follow(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(BATCH, 6)).sum().backward()


class Anneals(Scale):
    """A counter in a buffer, changed in place; another that is set anew; one that is not there at first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("power", torch.ones(()))
        self.register_buffer("first", None)
        self.again = nn.Module()
        self.again.register_buffer("calls", None)

    def forward(self, x):
        self.calls += 1
        self.power = self.power * 0.9
        if self.first is None:
            self.first = torch.zeros(())
        return x * self.scale * self.power / self.again.calls


class AnnealsInALoop(Anneals):
    def forward(self, x):
        return super().forward(x) * float(x.detach().abs().max() > -1)


@pytest.mark.parametrize("kind", [Anneals, AnnealsInALoop])
def test_buffers_advance_once_a_call_and_backward_sees_those_of_the_forward(kind):
    model = nn.Sequential(nn.Linear(6, 6), kind(), nn.Linear(6, 3)).double()
    model[1].again.calls = model[1].calls  # shared
    plain = copy.deepcopy(model)
    follow(model)
    for step in range(1, 4):
        x = torch.randn(1, 6).double()  # one example: no plain runs of the clipper's own
        for m in (model, plain):
            m.zero_grad()
            m(x).square().sum().backward()
        assert float(model[1].calls) == step and model[1].again.calls is model[1].calls
        assert torch.equal(model[1].power, plain[1].power)
        same_gradients(model, plain)


def test_spectral_norm():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))
    model = nn.Sequential(layer, nn.Linear(5, 3)).double()
    nn.init.normal_(layer.parametrizations.weight.original)
    with torch.no_grad():
        for buffer in layer.buffers():
            buffer.copy_(F.normalize(torch.randn_like(buffer), dim=0))
    plain = copy.deepcopy(model)
    follow(model)
    for _ in range(3):
        x = torch.randn(BATCH, 6).double()
        for m in (model, plain):
            m.zero_grad()
            m(x).square().sum().backward()
        same_gradients(model, plain)
