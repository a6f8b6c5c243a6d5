"""What a forward pass keeps of its batch, and what a backward pass reaches beside the model's parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from made import Made, follow
from torch import nn
from torch.nn import functional as F

from gradveil.clipping.validation.surroundings import Snapshot
from gradveil.errors import PrivacyViolation, UnsupportedModelError

B, D = 8, 4


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


def batch():
    return torch.randn(B, D), torch.arange(B) % 3  # five of eight labels are not 0


class Scaler:
    mean = None

    def fit(self, x):
        self.mean = x.mean(0)


def by_object(m, x):
    if m.scaler.mean is None:
        m.scaler.fit(x)
    return m.net(x - m.scaler.mean)


def by_dictionary(m, x):
    m.kept.setdefault("mean", x.mean(0))
    return m.net(x - m.kept["mean"])


def by_list(m, x):
    if not m.listed:
        m.listed.append(x.mean(0))
    return m.net(x - m.listed[0])


def by_missing_buffer(m, x):
    if m.mean is None:
        m.mean = x.mean(0)
    return m.net(x - m.mean)


def by_new_buffer(m, x):
    if not hasattr(m, "made"):
        m.register_buffer("made", x.mean(0))
    return m.net(x)


def by_parameter(m, x):
    """As ActNorm has it, with the flag in a tensor attribute."""
    if m.flag == 0:
        m.shift.data.copy_(-x.mean(0))
        m.flag.fill_(1)
    return m.net(x + m.shift)


def by_frozen_parameter(m, x):
    if m.training:
        m.bank.data.lerp_(x.mean(0), 0.1)
    return m.net(x)


def by_extra_state(m, x):
    m.seen = x.mean(0)
    return m.net(x)


class Model(Made):
    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def keeps(forward):
    kind = Model if forward is by_extra_state else Made
    model = kind(forward, net=nn.Linear(D, 3), shift=nn.Parameter(torch.zeros(D)))
    model.scaler, model.kept, model.listed, model.flag, model.seen = Scaler(), {}, [], torch.zeros(1), None
    model.register_buffer("mean", None)
    model.bank = nn.Parameter(torch.zeros(D), requires_grad=False)
    return model


@pytest.mark.parametrize(
    "forward",
    [
        by_object,
        by_dictionary,
        by_list,
        by_missing_buffer,
        by_new_buffer,
        by_parameter,
        by_frozen_parameter,
        by_extra_state,
    ],
)
def test_what_is_computed_from_the_first_batch_is_refused(forward):
    model = keeps(forward)
    before = copy.deepcopy(model.state_dict())
    follow(model, "per-layer", reduction="mean")
    with pytest.raises(UnsupportedModelError, match=r"computed from the examples|mixes examples|the model remembers"):
        model(batch()[0])
    assert all(torch.equal(a, before[n]) for n, a in model.state_dict().items() if isinstance(a, torch.Tensor))
    assert model.scaler.mean is None and not model.kept and not model.listed and not model.flag.any()


def test_counters_of_every_kind_advance_once_a_step():
    def forward(m, x):
        m.count["calls"] += 1
        m.listed.append(1)
        m.ticks += 1
        return m.net(x)

    model = Made(forward, net=nn.Linear(D, 3))
    model.count, model.listed, model.ticks = {"calls": 0}, [], torch.zeros(1)
    clipper = follow(model, reduction="mean")
    for _ in range(3):
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        clipper.start_step()
    assert model.count["calls"] == len(model.listed) == int(model.ticks) == 3


def test_a_snapshot_puts_back_what_a_model_holds():
    model = keeps(by_object)
    state = Snapshot(model)
    model.kept["a"] = {"b": [1]}
    model.listed.append(2)
    model.scaler.mean = 3
    with torch.no_grad():
        model.net.weight.zero_()
    assert set(state.changed()) == {"net.weight"}
    state.put_back()
    assert not model.kept and not model.listed and model.scaler.mean is None and model.net.weight.any()
    assert not state.changed()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_trainable_tensor_beside_the_model_is_refused(place, kind, late):
    model = nn.Linear(D, 3)
    clipper = follow(model, reduction="mean")
    for _ in range(3 if late else 0):
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        clipper.start_step()
    extra = torch.zeros(D if place == "before" else 3)
    extra = nn.Parameter(extra) if kind is nn.Parameter else extra.requires_grad_()
    x, y = batch()
    with pytest.raises(PrivacyViolation, match="not part of the private model"):  # noqa: PT012
        out = model(x + extra) if place == "before" else model(x) + extra
        torch.autograd.backward(F.cross_entropy(out, y))
    assert extra.grad is None


def test_inputs_may_have_gradients():
    model = nn.Linear(D, 3)
    follow(model, reduction="mean")
    x, y = batch()
    delta = torch.zeros_like(x, requires_grad=True)
    F.cross_entropy(model(x + delta), y).backward()
    assert delta.grad.shape == x.shape


def checked(loss, forward=None, reduction="mean"):
    """What is noted of a batch whose loss this is."""
    model = Made(forward or (lambda m, x: m.net(x)), net=nn.Linear(D, 3))
    clipper = follow(model, reduction=reduction)
    found = {}
    clipper.checks.report = found.update
    x, y = batch()
    loss(model(x), y, model).backward()
    return found


def test_a_loss_of_an_output_without_the_examples_first_does_not_count_as_checked():
    def both(out, y, m):
        return F.cross_entropy(out[0], y) + out[1].mean(1).square().sum()

    assert not checked(both, lambda m, x: (m.net(x), m.net(x).T)).get("loss")


def test_a_loss_of_a_kept_activation_does_not_count_as_checked():
    def forward(m, x):
        m.kept = m.net(x)
        return m.kept.tanh()

    def both(out, y, m):
        return F.cross_entropy(out, y, reduction="sum") + m.kept.mean(0).square().sum()

    assert not checked(both, forward, "sum").get("loss")


def test_a_loss_that_branches_does_not_count_as_checked():
    def guarded(out, y, m):
        loss = F.cross_entropy(out, y)
        return loss * 0 if loss > 10 else loss

    assert not checked(guarded).get("loss")
    assert checked(lambda out, y, m: F.cross_entropy(out, y)).get("loss")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_normalises_is_refused(dtype):
    def masked(out, y, m):
        mask = (y > 0).to(dtype)
        return (F.cross_entropy(out, y, reduction="none") * mask).sum() / mask.sum()

    with pytest.raises(UnsupportedModelError, match="normaliser"):
        checked(masked)


def test_rows_that_a_mask_chooses_do_not_count_as_checked():
    assert not checked(lambda out, y, m: F.cross_entropy(out[y > 0], y[y > 0])).get("loss")


def test_a_flag_for_every_example():
    model = Made(lambda m, x, flag: m.net(x) * flag.unsqueeze(1), net=nn.Linear(D, 3))
    follow(model, reduction="mean")
    x, y = batch()
    F.cross_entropy(model(x, y > 0), y).backward()
