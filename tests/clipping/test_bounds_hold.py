"""Ways in which one example could exceed its bound, or a followed model be another one: mended, or refused by name."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from made import Made, follow
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from gradveil.clipping import Clipper, clipped_sums, make_groups
from gradveil.errors import PrivacyViolation, UnsupportedModelError
from loops import run, start


def length(model):
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))


def squared(outputs, targets):
    return (outputs.flatten(1) * targets).square().sum()


def assert_like_the_reference(model, x, clipping, bound=0.7):
    """.grad of a followed model beside that of one example at a time."""
    targets = torch.linspace(0.5, 1.5, len(x), dtype=x.dtype).unsqueeze(1)
    groups = make_groups(model, clipping)
    bounds = [bound] * len(groups)
    expected = clipped_sums(copy.deepcopy(model), squared, x, targets, groups=groups, bounds=bounds).sums
    clipper = Clipper(model, groups, bounds=bounds, loss_reduction="sum")
    squared(model(x), targets).backward()
    clipper.detach()
    for name, parameter in model.named_parameters():
        tolerance = 1e-9 if x.dtype == torch.float64 else 1e-4 * max(1e-3, float(expected[name].abs().max()))
        assert float((parameter.grad - expected[name]).abs().max()) <= tolerance, name


CLIPPINGS = ["per-layer", "flat"]
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("apart", [1e-3, 1e-4])
@pytest.mark.parametrize("seed", range(5))
def test_tied_layers_whose_gradients_cancel_are_not_underestimated(apart, seed):
    torch.manual_seed(seed)
    a, b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    b.weight = a.weight
    model = Made(lambda m, x, y: m.a(x) - m.b(y), a=a, b=b)
    bound = 0.8 * apart
    follow(model, bound=bound)
    x = torch.randn(1, 64)
    (model(x, x + apart * torch.randn(1, 64)) * torch.randn(64)).sum().backward()
    assert 0 < length(model) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_inside_a_reentrant_checkpoint_and_outside_has_the_norm_of_its_sum(dtype):
    model = Made(
        lambda m, x: m.a(checkpoint(m.a, m.first(x), use_reentrant=True)),
        a=nn.Linear(4, 4, bias=False),
        first=nn.Linear(4, 4),
    ).to(dtype)
    with torch.no_grad():
        model.a.weight.copy_(torch.eye(4))
        model.first.weight.copy_(10 * torch.eye(4))
    follow(model)
    model(torch.ones(1, 4, dtype=dtype)).sum().backward()
    assert length(model) == pytest.approx(1.0, rel=1e-5) and length(model) <= 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_backward_calls_that_reach_different_layers_of_a_group_are_refused(dtype):
    heads = nn.ModuleList(nn.Linear(5, 2) for _ in range(3))
    model = Made(lambda m, x: [head(x) for head in m.heads], heads=heads).to(dtype)
    follow(model)
    first, second, _ = model(5 * torch.randn(2, 5, dtype=dtype))
    first.sum().backward()
    with pytest.raises(PrivacyViolation, match="backward\\(\\) was called more than once"):
        second.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_backward_calls_that_reach_different_uses_of_a_layer_are_refused(dtype):
    model = Made(lambda m, x: (m.a(x), m.a(2 * x)), a=nn.Linear(5, 2)).to(dtype)
    follow(model, "per-layer")
    first, second = model(5 * torch.randn(2, 5, dtype=dtype))
    first.sum().backward()
    with pytest.raises(PrivacyViolation, match="more than once"):
        second.sum().backward()


def test_one_backward_call_for_each_of_two_batches_is_no_such_thing():
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    clipper = follow(model)
    for _ in range(2):
        model(5 * torch.randn(1, 5)).sum().backward()
    assert clipper.clip_stats.examples == 2
    assert length(model) <= 2.0


def _tensor_hook(parameter, hook):
    return parameter.register_hook(hook)


def _hook_after_accumulation(parameter, hook):
    return parameter.register_post_accumulate_grad_hook(lambda p: hook(p.grad))


@pytest.mark.parametrize("add", [_tensor_hook, _hook_after_accumulation])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_hooks_on_gradients_are_refused(add, clipping):
    engine, model, optimizer, loader = start(clipping=clipping)
    handle = add(model[0].weight, lambda _: None)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PrivacyViolation, match="hook on its gradient"):
        run(engine, model, optimizer, loader)
    assert len(engine.releases) == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    engine.detach()
    with pytest.raises(PrivacyViolation, match="hook on its gradient"):
        start(model=model)
    handle.remove()
    start(model=model)


@pytest.mark.parametrize("add", [_tensor_hook, _hook_after_accumulation])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_hook_that_comes_after_the_forward_pass_sees_nothing(add, clipping):
    found = []
    for hooked in (False, True):
        _, model, _, loader = start(clipping=clipping, seed=1)
        x, y = next(iter(loader))
        loss, seen = F.cross_entropy(model(x), y), []
        if hooked:
            add(model[0].weight, seen.append)
        loss.backward()
        assert all(gradient is None for gradient in seen)
        found.append(model[0].weight.grad)
    assert torch.equal(*found)


def test_a_model_that_sorts_its_batch():
    def sorts(m, x):
        order = x.norm(dim=1).argsort()
        return m.head(torch.tanh(m.a(x[order]))[order.argsort()])

    torch.manual_seed(0)
    x = torch.randn(4, 5).double() * torch.tensor([4.0, 3.0, 2.0, 1.0]).double().unsqueeze(1)
    for clipping in CLIPPINGS:
        model = Made(sorts, a=nn.Linear(5, 5), head=nn.Linear(5, 3)).double()
        assert_like_the_reference(model, x, clipping)


def test_a_model_that_changes_the_order_of_its_batch_unseen_is_refused_where_norms_span_layers():
    model = Made(lambda m, x: m.head(torch.tanh(m.a(x.flip(0))).flip(0)), a=nn.Linear(5, 5), head=nn.Linear(5, 3))
    x = torch.randn(4, 5).double()
    assert_like_the_reference(model.double(), x, "per-layer")
    follow(model, "flat")
    with pytest.raises(UnsupportedModelError, match="changes the order of the batch"):
        model(x)


@pytest.mark.parametrize("use", ["sum", "first", "unsqueeze"])
def test_an_embedding_without_a_batch_that_is_more_than_added(use):
    made = {"sum": lambda e: e.sum(0), "first": lambda e: e[0], "unsqueeze": lambda e: e.unsqueeze(0)}[use]

    def forward(m, x):
        return m.head(torch.tanh(x + made(m.position(torch.tensor([0, 1, 1, 3]))))).mean(1)

    for clipping in CLIPPINGS:
        model = Made(forward, position=nn.Embedding(4, 5), head=nn.Linear(5, 1)).double()
        assert_like_the_reference(model, torch.randn(3, 4, 5).double(), clipping, bound=0.3)


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_positions_that_are_looked_up_in_training_only(batch, clipping):
    def forward(m, x):
        return m.head(torch.tanh(x + m.position(torch.arange(7)) if m.training else x))

    torch.manual_seed(0)
    model = Made(forward, position=nn.Embedding(7, 5), head=nn.Linear(5, 1)).double()
    x = torch.randn(7, 7, 5).double()
    follow(model, clipping).detach()
    clipper = follow(model, clipping, bound=0.1)
    model(x[:2])  # what follows the batch is learned on the first of more than one example
    clipper.start_step()
    targets = torch.zeros(batch, 1).double()
    targets[0] = 100.0
    squared(model(x[:batch]), targets).backward()
    for names in ({"position.weight"}, {"head.weight", "head.bias"}) if clipping == "per-layer" else ():
        of_group = sum(float(p.grad.square().sum()) for n, p in model.named_parameters() if n in names)
        assert math.sqrt(of_group) <= 0.1
    if clipping == "flat":
        assert length(model) <= 0.1


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_layer_with_a_forward_of_its_own_keeps_it(clipping):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    layer = model[0]
    layer.forward = lambda x: 3 * F.linear(x, layer.weight, layer.bias)
    x = torch.randn(6, 5).double()
    plain = model(x)
    clipper = follow(model, clipping)
    assert torch.allclose(model(x), plain)
    assert torch.allclose(copy.deepcopy(model)(x), plain)
    clipper.detach()
    assert torch.equal(model(x), plain)
    targets = torch.ones(6, 1).double()
    groups = make_groups(model, clipping)
    clipper = Clipper(model, groups, bounds=[1e9] * len(groups), loss_reduction="sum")
    squared(model(x), targets).backward()
    got = [p.grad.clone() for p in model.parameters()]
    clipper.detach()
    wanted = torch.autograd.grad(squared(model(x), targets), list(model.parameters()))
    assert all(torch.allclose(a, b) for a, b in zip(got, wanted, strict=True))


class Scaled(nn.Module):
    """A layer and a bare parameter: followed as a whole."""

    def __init__(self, layer):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.linspace(0.5, 1.5, 5)), layer

    def forward(self, x):
        return torch.tanh(self.layer(x)) * self.scale


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("outside", ["two blocks", "before", "after", "never"])
def test_a_layer_shared_with_a_module_that_is_followed_as_a_whole(outside, clipping):
    torch.manual_seed(0)
    shared = nn.Linear(5, 5)
    head = nn.Linear(5, 3)
    if outside == "two blocks":
        model = nn.Sequential(Scaled(shared), Scaled(shared), head)
    elif outside == "before":
        model = Made(lambda m, x: m.head(m.block(m.a(x))), a=shared, block=Scaled(shared), head=head)
    elif outside == "after":
        model = Made(lambda m, x: m.head(m.z(m.block(x))), block=Scaled(shared), z=shared, head=head)
    else:
        model = Made(lambda m, x: m.head(m.block(x)), a=shared, block=Scaled(shared), head=head)
    assert_like_the_reference(model.double(), torch.randn(4, 5).double(), clipping)


def _after_parametrization(layer):
    parametrizations.weight_norm(layer)
    parametrize.remove_parametrizations(layer, "weight")


def _after_pruning(layer):
    prune.l1_unstructured(layer, "weight", amount=0.3)
    prune.remove(layer, "weight")


@pytest.mark.parametrize("change", [_after_parametrization, _after_pruning])
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_whose_weight_was_registered_after_its_bias(change, clipping, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    change(model[0])
    assert next(iter(model[0]._parameters)) == "bias"
    assert_like_the_reference(model.to(dtype), torch.randn(6, 5, dtype=dtype), clipping)


def test_a_layer_that_is_being_pruned_is_refused_with_the_way_out():
    model = nn.Sequential(nn.Linear(5, 4))
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    with pytest.raises(UnsupportedModelError, match=r"prune\.remove\(module, 'weight'\)"):
        follow(model)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_an_output_without_tensors_is_refused(clipping):
    model = Made(lambda m, x: str(m.a(x)), a=nn.Linear(5, 2))
    follow(model, clipping)
    with pytest.raises(UnsupportedModelError, match="returned a str, in which no tensor was found"):
        model(torch.randn(3, 5))


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_parameter_that_is_frozen_later_is_refused(clipping):
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    follow(model, clipping)
    model[1].weight.requires_grad_(False)
    with pytest.raises(PrivacyViolation, match=r"'1\.weight' was frozen"):
        model(torch.randn(3, 5))


class Keeps(nn.Module):
    """A layer that keeps something in a buffer: ``what`` makes it from the old value and the input."""

    def __init__(self, what, rebinds):
        super().__init__()
        self.layer, self.what, self.rebinds = nn.Linear(5, 2), what, rebinds
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x):
        if self.training:
            new = self.what(self.kept, x.detach())
            if self.rebinds:
                self.kept = new
            else:
                self.kept.copy_(new)
        return self.layer(x)


@pytest.mark.parametrize("rebinds", [False, True])
def test_a_buffer_computed_from_the_examples_is_refused_and_a_counter_is_not(rebinds):
    x = torch.randn(3, 5)
    for what in (lambda kept, x: 0.9 * kept + 0.1 * x.mean(), lambda kept, x: kept + len(x)):
        model = Keeps(what, rebinds)
        follow(model)
        with pytest.raises(UnsupportedModelError, match="'kept' is computed from the examples"):
            model(x)
        assert float(model.kept) == 0.0  # the runs that found it have left nothing behind
        model.eval()
        model(x)
    counts = Keeps(lambda kept, x: kept + 1, rebinds)
    follow(counts)
    for _ in range(3):
        counts(x).sum().backward()
    assert float(counts.kept) == 3.0


def test_writing_to_an_output_that_the_model_has_kept_is_refused_as_ever():
    model = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid())
    follow(model, "per-layer")
    with pytest.raises(RuntimeError, match=r"modified (by an )?in-?place"):
        model(torch.randn(3, 5)).mul_(2).sum().backward()


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_leaves_through_the_inputs_is_the_gradient_of_the_users_loss(clipping, reduction):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    follow(model, clipping, reduction=reduction)
    inputs, found = torch.randn(8, 5), []
    for net in (model, plain):
        x = torch.tanh(inputs.clone().requires_grad_())
        loss = F.softplus(net(x))
        found.append(torch.autograd.grad(getattr(loss, reduction)(), x)[0])
    torch.testing.assert_close(*found)
