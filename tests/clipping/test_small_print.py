"""Uses that are ordinary and easily forgotten: what users print and copy, layers of size zero, edges of rules."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from made import Made, follow, weight
from networks import compare
from torch import nn
from torch.nn import functional as F

import gradveil
from gradveil.clipping import Clipper, make_groups
from gradveil.clipping.backends import layers, native
from gradveil.errors import PrivacyViolation, UnsupportedModelError


@pytest.fixture(autouse=True, params=["compiled", "layers in Python", "PyTorch"])
def _ways(request, monkeypatch):
    torch.manual_seed(0)
    without = {"compiled": (), "layers in Python": (layers,), "PyTorch": (layers, native)}[request.param]
    for module in without:
        monkeypatch.setattr(module, "_load", lambda: (None, "left out by the test"))


def test_the_first_loss_is_printed_copied_and_saved():
    model = nn.Linear(6, 3)
    follow(model, reduction="mean")
    out = model(torch.randn(4, 6))
    loss = F.cross_entropy(out, torch.zeros(4, dtype=torch.long))
    loss.backward()
    assert f"{loss:.3f}" == f"{loss.item():.3f}" == f"{loss.detach():.3f}" and "tensor(" in repr(loss)
    assert type(loss.detach()) is torch.Tensor and type(out.argmax(1)) is torch.Tensor
    assert torch.equal(copy.deepcopy(out.detach()), out)
    file = io.BytesIO()
    torch.save(out.detach(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), out)


@pytest.mark.parametrize("change", [lambda o: o.div_(2), lambda o: o.mul_(2), lambda o: o[:, :1].zero_()])
def test_outputs_may_be_changed_in_place(change):
    model, x = nn.Linear(6, 2), torch.randn(4, 6)
    plain = copy.deepcopy(model)
    follow(model, bound=1e9)
    for m in (model, plain):
        out = m(x)
        change(out)
        out.square().sum().backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("slopes", [1, 8])
def test_prelu_at_zero(slopes):
    model = nn.Sequential(nn.Linear(6, 8), nn.PReLU(slopes), nn.Linear(8, 2))
    nn.init.zeros_(model[0].weight), nn.init.zeros_(model[0].bias)
    plain, x = copy.deepcopy(model), torch.randn(4, 6)
    follow(model, bound=1e9)
    for m in (model, plain):
        m(x).sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("positions", [(), (3,), (0,)])
@pytest.mark.parametrize(("inputs", "outputs"), [(0, 4), (4, 0)])
def test_linear_layers_without_inputs_or_outputs(clipping, dtype, positions, inputs, outputs):
    empty, other = nn.Linear(inputs, outputs), nn.Linear(4, 4)
    model = Made(lambda m, x: torch.cat([m.empty(x[..., :inputs]), m.other(x)], -1), empty=empty, other=other)
    model, x = model.to(dtype), torch.randn(4, *positions, 4, dtype=dtype)
    wanted = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(4):
        of_one = dict(
            zip(wanted, torch.autograd.grad(model(x[i : i + 1]).square().sum(), model.parameters()), strict=True)
        )
        groups = (
            [list(wanted)] if clipping == "flat" else [["empty.weight", "empty.bias"], ["other.weight", "other.bias"]]
        )
        for names in groups:
            norm = torch.stack([of_one[n].square().sum() for n in names]).sum().sqrt()
            for n in names:
                wanted[n] += of_one[n] * (1e-2 / norm).clamp(max=1.0)
    follow(model, clipping, bound=1e-2)
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-7)


def test_an_embedding_of_no_tokens():
    model = Made(lambda m, x: m.embed(x).sum(1) + m.start, embed=nn.Embedding(5, 4), start=weight(4))
    follow(nn.Sequential(model))
    model = nn.Sequential(nn.Embedding(5, 4))
    follow(model)
    model(torch.zeros(3, 0, dtype=torch.long)).sum().backward()
    assert float(model[0].weight.grad.abs().sum()) == 0.0


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_another_modules_parameter(clipping):
    embed = nn.Embedding(5, 4)
    held = [embed]
    decode = Made(lambda m, z: F.linear(z * m.scale, held[0].weight), scale=weight(4))
    model = Made(lambda m, x: m.decode(m.embed(x).mean(1)), embed=embed, decode=decode).double()
    x, y = torch.randint(0, 5, (3, 2)), torch.randint(0, 5, (3,))
    groups = make_groups(model, clipping)
    alone = [copy.deepcopy(model) for _ in x]  # a copy's list would still hold this model's embedding
    clipper = Clipper(model, groups, bounds=[0.1] * len(groups), loss_reduction="sum")
    F.cross_entropy(model(x), y, reduction="sum").backward()
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    clipper.detach()
    for i, other in enumerate(alone):
        held[0] = other.embed
        F.cross_entropy(other(x[i : i + 1]), y[i : i + 1]).backward()
        grads = {name: p.grad for name, p in other.named_parameters()}
        for group in groups:
            norm = torch.cat([grads[name].flatten() for name in group.parameters]).norm()
            for name in group.parameters:
                expected[name] += grads[name] * min(1.0, 0.1 / float(norm))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_a_kept_activation(clipping):
    inner = Made(lambda m, x: x * m.w + m.context, w=weight(6))

    def forward(m, x):
        m.inner.context = m.layer(x)
        out = m.inner(x)
        m.inner.context = None
        return out

    model = Made(forward, layer=nn.Linear(6, 6), inner=inner)
    compare(model, torch.randn(4, 6), torch.randint(0, 6, (4,)), clipping=clipping, tolerance=1e-4)


def test_what_a_module_followed_as_a_whole_keeps_is_of_the_ordinary_run():
    def forward(m, x):
        m.calls += 1
        m.kept = (x + m.start).detach()
        return m.layer(m.kept)

    model = Made(forward, start=weight(6), layer=nn.Linear(6, 2))
    model.calls = 0
    clipper, x = follow(model), torch.randn(4, 6)
    model(x).square().sum().backward()
    clipper.detach()
    torch.testing.assert_close(model.kept, x + model.start.detach())
    assert model.calls == 1
    copy.deepcopy(model)


def test_a_sparse_embedding_has_a_dense_gradient():
    model = Made(lambda m, x: F.embedding(x, m.w, sparse=True).sum(1), w=weight(5, 4))
    compare(model, torch.randint(0, 5, (3, 2)), torch.randint(0, 4, (3,)), tolerance=1e-4)
    follow(model)
    model(torch.randint(0, 5, (3, 2))).sum().backward()
    assert not model.w.grad.is_sparse


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_parameters_in_half_precision_are_refused_unless_they_are_frozen(half):
    """The sum would be rounded before the noise: by half a percent of itself, not of the bound."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model[0].to(half)
    with pytest.raises(UnsupportedModelError, match=r"'0.weight' is of torch.*rounded"):
        follow(model)
    model[0].requires_grad_(False)
    follow(model)


def test_what_is_unfrozen_later_is_refused():
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    follow(model)
    model[0].weight.requires_grad_(True)
    with pytest.raises(PrivacyViolation, match=r"'0.weight' was made trainable"):
        model(torch.randn(4, 6))


def test_fix_mends_a_module_that_is_held_twice():
    norm = nn.BatchNorm2d(4)
    mended = gradveil.fix(nn.Sequential(norm, nn.ReLU(), nn.Sequential(norm)))
    assert type(mended[0]) is nn.GroupNorm and mended[0] is mended[2][0]


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_a_bound_beyond_float32_bounds_nothing(clipping):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    plain, x = copy.deepcopy(model), torch.randn(4, 2, 4, 4)
    follow(model, clipping, bound=1e39)
    for m in (model, plain):
        m(x).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
