"""What the clipper promises in its docstring, and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import compare
from torch import nn
from torch.nn import functional as F

import gradveil
from gradveil.clipping import Clipper, clipped_sums, make_groups
from gradveil.clipping.backends import layers, native
from gradveil.errors import ConfigError, PrivacyViolation, UnknownNameError, UnsupportedModelError


def attach(model, clipping="per-layer", bound=1.0, reduction="mean"):
    groups = make_groups(model, clipping)
    return Clipper(model, groups, bounds=[bound] * len(groups), loss_reduction=reduction)


@given(
    st.sampled_from([torch.float32, torch.float64]),
    st.floats(1e-6, 1e6),
    st.floats(-8, 8),
    st.sampled_from(["per-layer", "flat"]),
    st.integers(0, 1000),
)
def test_clipped_sum_has_bounded_norm(dtype, bound, magnitude, clipping, seed):
    """One example alone: its contribution is never above the bound, however large its gradient is."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)).to(dtype)
    clipper = attach(model, clipping, bound)
    x = (torch.randn(1, 1, 5, 5) * 10**magnitude).to(dtype)
    (model(x) * 10**magnitude).sum().backward()
    for group in clipper.groups:
        named = dict(model.named_parameters())
        total = torch.sqrt(sum((named[n].grad.double() ** 2).sum() for n in group.parameters))
        assert float(total) <= bound
    clipper.detach()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("positions", [1, 3])
def test_a_long_row_of_equal_numbers_stays_within_its_bound(positions, clipping, compiled, monkeypatch):
    """Added up one after the other in float32, their norm would come out lower by 1e-5 and more."""
    if not compiled:
        for module in (native, layers):
            monkeypatch.setattr(module, "_load", lambda: (None, "left out by the test"))
    model = nn.Linear(1_000_000, 1)
    clipper = attach(model, clipping)
    model(torch.full((1, positions, 1_000_000), 1.1)[:, 0 if positions == 1 else slice(None)]).sum().backward()
    total = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()))
    assert 0.9999 < total <= 1.0
    clipper.detach()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_an_example_that_is_not_finite_counts_as_zero_and_is_counted(bad, clipping):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3), nn.LayerNorm(3)).double()
    x, y = torch.randn(5, 1, 5, 5).double(), torch.randint(0, 3, (5,))
    x[2, 0, 1, 1] = bad
    groups = make_groups(model, clipping)
    keep = [0, 1, 3, 4]
    expected = clipped_sums(model, F.cross_entropy, x[keep], y[keep], groups=groups, bounds=[0.2] * len(groups))
    clipper = Clipper(model, groups, bounds=[0.2] * len(groups), loss_reduction="sum")
    F.cross_entropy(model(x), y, reduction="sum").backward()
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, expected.sums[name], atol=1e-12), name
    assert int(clipper.clip_stats.not_finite) == 1
    clipper.detach()


def test_a_zero_gradient_contributes_zero():
    model = nn.Linear(4, 3)
    clipper = attach(model)
    (model(torch.randn(5, 4)) * 0).sum().backward()
    assert not model.weight.grad.any()
    clipper.detach()


def test_an_empty_batch_gives_exactly_zero_even_where_the_model_cannot_take_one():
    class Reshaping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x.view(x.size(0), -1))  # torch refuses view(0, -1)

    model = Reshaping()
    clipper = attach(model)
    out = model(torch.randn(0, 2, 2))
    assert out.shape == (0, 3)
    F.cross_entropy(out, torch.zeros(0, dtype=torch.long)).backward()
    assert not model.layer.weight.grad.any()
    assert not model.layer.bias.grad.any()
    assert clipper.clip_stats.examples == 0
    assert clipper.clip_stats.counts_within()[0] == 0
    clipper.detach()


def test_a_parameter_used_outside_its_module():
    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(F.linear(torch.tanh(self.layer(x)), self.layer.weight))

    for clipping in ("per-layer", "flat"):
        compare(Elsewhere().double(), torch.randn(5, 4).double(), torch.randint(0, 3, (5,)), clipping=clipping)


def test_a_parameter_used_outside_the_model_is_refused():
    for clipping in ("per-layer", "flat"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        clipper = attach(model, clipping)
        with pytest.raises(PrivacyViolation, match=r"'0.weight' got a gradient from a use outside"):
            (model(torch.randn(5, 4)).mean() + model[0].weight.square().sum()).backward()
        clipper.detach()


def test_a_penalty_on_the_weights_in_the_loss_is_refused():
    model = nn.Linear(4, 3)
    clipper = attach(model)
    with pytest.raises(PrivacyViolation, match="weight_decay"):
        (model(torch.randn(5, 4)).mean() + model.weight.square().sum()).backward()
    clipper.detach()


def test_the_same_pass_differentiated_twice_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    for clipping in ("per-layer", "flat"):
        clipper = attach(model, clipping)
        out = model(torch.randn(5, 4))
        out.mean().backward(retain_graph=True)
        with pytest.raises(PrivacyViolation, match="twice"):
            out.square().mean().backward()
        clipper.detach()


def test_a_model_that_mixes_examples_is_refused():
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x - x.mean(0))

    model = Centred()
    clipper = attach(model)
    with pytest.raises(UnsupportedModelError, match="mixes examples"):
        model(torch.randn(5, 4))
    clipper.detach()


def test_an_output_without_the_batch_is_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))
    clipper = attach(model)
    with pytest.raises(UnsupportedModelError, match="rows are not the examples"):
        model(torch.randn(5, 4))
    clipper.detach()


def contrastive(out, y):
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def batch_normalised(out, y):
    return F.cross_entropy((out - out.mean(0)) / out.std(0), y)


@pytest.mark.parametrize("loss", [contrastive, batch_normalised, lambda out, y: out.sum().square()])
def test_a_loss_that_mixes_examples_is_refused(loss):
    model = nn.Linear(4, 3)
    clipper = attach(model)
    out, y = model(torch.randn(5, 4)), torch.randint(0, 3, (5,))
    with pytest.raises(UnsupportedModelError, match="the loss mixes examples"):
        loss(out, y).backward()
    clipper.detach()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        lambda out, y, reduction: F.cross_entropy(out, y, label_smoothing=0.1, reduction=reduction),
        lambda out, y, reduction: F.mse_loss(out, F.one_hot(y, 3).float(), reduction=reduction),
        lambda out, y, reduction: F.l1_loss(out, F.one_hot(y, 3).float(), reduction=reduction),
        lambda out, y, reduction: F.nll_loss(F.log_softmax(out, 1), y, reduction=reduction),
        lambda out, y, reduction: getattr(out, reduction)(),
        F.multi_margin_loss,
    ],
)
def test_ordinary_losses_pass(loss, reduction):
    model = nn.Linear(4, 3)
    clipper = attach(model, reduction=reduction)
    for _ in range(2):
        loss(model(torch.randn(5, 4)), torch.randint(0, 3, (5,)), reduction=reduction).backward()
    clipper.detach()


def test_a_batch_that_is_folded_into_another_dimension():
    class Folding(nn.Module):
        def __init__(self, outer: bool) -> None:
            super().__init__()
            self.layer, self.outer = nn.Linear(4, 3), outer

        def forward(self, x):
            if self.outer:
                return self.layer(x.flatten(0, 1)).view(*x.shape[:2], 3).mean(1)
            return self.layer(x.transpose(0, 1).flatten(0, 1)).view(x.shape[1], x.shape[0], 3).mean(0)

    for outer in (True, False):
        for clipping in ("per-layer", "flat"):
            model, x = Folding(outer).double(), torch.randn(5, 2, 4).double()
            compare(model, x, torch.randint(0, 3, (5,)), clipping=clipping)


def test_a_sequence_that_comes_first_is_refused():
    recurrent = nn.Sequential(nn.LSTM(4, 3))  # batch_first=False
    clipper = attach(recurrent)
    with pytest.raises(UnsupportedModelError, match=r"mixes examples"):
        recurrent(torch.randn(7, 2, 4))
    clipper.detach()


def test_a_part_called_by_itself_is_refused_with_gradients_and_free_without():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    clipper = attach(model)
    with pytest.raises(PrivacyViolation, match="outside the model's forward"):
        model[0](torch.randn(5, 4)).sum().backward()
    with torch.no_grad():
        assert model[0](torch.randn(5, 4)).shape == (5, 4)
    clipper.detach()


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_batch_mixing_modules_are_refused_by_name(norm):
    model = nn.Sequential(nn.Linear(4, 4), norm)
    model.add_module("last", nn.Linear(4, 3))
    with pytest.raises(UnsupportedModelError, match=rf"{type(norm).__name__} '1'.*gradveil.fix"):
        attach(model)


def test_fix_replaces_batch_norms_and_leaves_the_users_model_alone():
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Sequential(nn.Conv2d(6, 7, 3), nn.BatchNorm2d(7)), nn.Flatten()
    )
    before = copy.deepcopy(model.state_dict())
    fixed = gradveil.fix(model)
    assert isinstance(model[1], nn.BatchNorm2d)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert isinstance(fixed[1], nn.GroupNorm)
    assert fixed[1].num_groups == 3
    assert isinstance(fixed[2][1], nn.GroupNorm)
    assert torch.equal(fixed[0].weight, model[0].weight)
    clipper = attach(fixed)
    fixed(torch.randn(3, 1, 8, 8)).mean().backward()
    clipper.detach()


def test_parameters_that_cannot_be_clipped_are_refused():
    with pytest.raises(UnsupportedModelError, match="complex"):
        attach(nn.Linear(4, 3, dtype=torch.complex64))
    with pytest.raises(UnsupportedModelError, match="lazy"):
        attach(nn.LazyLinear(3))
    with pytest.warns(FutureWarning), pytest.raises(UnsupportedModelError, match="parametrizations"):
        attach(nn.utils.weight_norm(nn.Linear(4, 3)))


def test_groups_are_checked():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with pytest.raises(UnknownNameError, match="per-layer"):
        make_groups(model, "per-leyer")
    with pytest.raises(ConfigError, match=r"no clipping group holds 1.weight"):
        make_groups(model, {"a": ["0"]})
    with pytest.raises(ConfigError, match="clipped twice"):
        make_groups(model, {"a": ["0", "1"], "b": ["1.bias"]})
    with pytest.raises(UnknownNameError, match=r"'2'"):
        make_groups(model, {"a": ["0", "1", "2"]})
    with pytest.raises(ConfigError, match="no trainable parameter"):
        make_groups(nn.ReLU(), "flat")
    assert [g.name for g in make_groups(model, "per-layer")] == ["0", "1"]
    assert make_groups(model, "per-layer")[0].parameters == ("0.weight", "0.bias")


def test_copies_and_pickles_of_an_attached_model_are_plain_models():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))
    clipper = attach(model, bound=1e-3)
    x = torch.randn(5, 4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is nn.Sequential
        with torch.no_grad():
            twin[0].weight.zero_()
        assert model[0].weight.any()  # the copy has its own weights, and uses them
        assert torch.equal(twin[0](x)[0], twin[0].bias)
        twin(x).sum().backward()  # ordinary autograd: not clipped, not counted
        assert twin[3].weight.grad.norm() > 1e-2
    assert clipper.clip_stats.passes == 0
    clipper.detach()


def test_detach_leaves_no_trace():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(18, 3))
    plain = copy.deepcopy(model)
    before = {m: set(vars(m)) for m in model.modules()}
    clipper = attach(model)
    keys = list(model.state_dict())
    model(torch.randn(2, 1, 5, 5)).mean().backward()
    assert list(model.state_dict()) == keys
    clipper.detach()
    for m in model.modules():
        assert set(vars(m)) == before[m]
        assert not m._forward_pre_hooks
        assert not m._forward_hooks
    assert all(not p._backward_hooks for p in model.parameters())
    x = torch.randn(4, 1, 5, 5)
    model.zero_grad()
    for m in (model, plain):
        F.cross_entropy(m(x), torch.tensor([0, 1, 2, 0])).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out, y: F.mse_loss(out[:, :1], y.float()), "broadcast"),
        (lambda out, y: ((out[:, :1] - y.float()) ** 2).mean(), "broadcast"),
        (lambda out, y: F.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 3.0])), "normaliser"),
        (lambda out, y: F.cross_entropy(out, y, ignore_index=0), "normaliser"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), "normaliser"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_mixes_examples_through_their_targets_is_refused(loss, words):
    model = nn.Linear(4, 3)
    clipper = attach(model)
    out, y = model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 0, 1])
    with pytest.raises(UnsupportedModelError, match=words):
        loss(out, y)
    clipper.detach()


def test_a_module_under_two_names_and_parameters_without_dimensions():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x):
            return self.scale * x

    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared, Scaled(), nn.Linear(4, 3)).double()
    for clipping in ("per-layer", "flat"):
        model.zero_grad()
        compare(model, torch.randn(5, 4).double(), torch.randint(0, 3, (5,)), clipping=clipping)
    assert isinstance(model[0].weight, nn.Parameter)


class LossInside(nn.Module):
    """A mean over the labels that are not ignored: one example's labels change the weight of every other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.layer(x).flatten(0, 1), y.flatten())


def test_ignored_labels_in_a_loss_inside_the_model_do_not_let_one_example_count_for_many():
    """A mean over all tokens that count would let the last example change the sum by 70 times the bound."""
    x, y = torch.ones(101, 300, 6) * 0.3, torch.zeros(101, 300, dtype=torch.long)
    y[:100, 1:] = -100
    model = LossInside()
    clipper = Clipper(model, make_groups(model, "flat"), bounds=[1.0], loss_reduction="mean")
    sums = []
    for n in (101, 100):
        model.zero_grad()
        clipper.start_step()
        model(x[:n], y[:n]).backward()
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    clipper.detach()
    assert float((sums[0] - sums[1]).norm()) <= 1 + 1e-5


def test_a_loss_inside_the_model_is_taken_for_one_example_at_a_time():
    model = LossInside()
    clipper = Clipper(model, make_groups(model, "flat"), bounds=[0.5], loss_reduction="mean")
    model(torch.randn(1, 4, 6), torch.tensor([[0, 1, -100, 2]])).backward()
    assert math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())) <= 0.5
    clipper.detach()
