"""gradveil.fix: norms over the batch become norms in groups of channels, and nothing else changes."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle

import pytest
import torch
from networks import compare
from torch import nn
from torch.nn import functional as F

import gradveil
from gradveil.clipping import check_module
from gradveil.clipping.validation import support
from gradveil.clipping.validation.support import GroupedForward, normalisations
from gradveil.errors import ConfigError, UnsupportedModelError


class NormAct(nn.BatchNorm2d):
    """Like timm's BatchNormAct2d: its forward is torch's own, written out, and a dropout and an activation."""

    def __init__(self, channels, act=nn.ReLU, drop=0.0, **settings):
        super().__init__(channels, **settings)
        self.drop, self.act = nn.Dropout(drop), act()

    def forward(self, x):
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        over_batch = self.training or self.running_mean is None
        mean, var = self.running_mean, self.running_var
        x = F.batch_norm(x, mean, var, self.weight, self.bias, over_batch, self.momentum, self.eps)
        return self.act(self.drop(x))


class Quick(nn.BatchNorm1d):
    """Calls torch.batch_norm, with its arguments in another order."""

    def forward(self, x):
        return -torch.batch_norm(x, self.weight, self.bias, None, None, True, 0.1, self.eps, False)


class ByHand(nn.BatchNorm1d):
    def forward(self, x):
        return (x - x.mean(0)) / (x.var(0) + self.eps).sqrt() * self.weight + self.bias


class ByHandWithStatistics(nn.BatchNorm1d):
    def forward(self, x):
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), self.momentum)
        return (x - x.mean(0)) * self.weight


class Ghost(nn.BatchNorm1d):
    """Normalises parts of the batch, by laying examples side by side as channels."""

    def forward(self, x):
        parts = x.view(len(x) // 2, -1)
        weight, bias = self.weight.repeat(2), self.bias.repeat(2)
        return F.batch_norm(parts, None, None, weight, bias, True).view_as(x)


class Synchronised(nn.SyncBatchNorm):
    def forward(self, x):
        return F.relu(super().forward(x))


def network(norm, channels=6):
    return nn.Sequential(nn.Conv2d(2, channels, 3), norm, nn.Flatten(), nn.Linear(channels * 16, 3))


def images(rows=5, dtype=torch.float64):
    return torch.randn(rows, 2, 6, 6, dtype=dtype)


def random_norm(norm):
    """Parameters at no special value, so that all of them count."""
    for p in norm.parameters():
        nn.init.normal_(p, 0.5)
    return norm


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("make", [lambda: NormAct(6), lambda: NormAct(6, nn.PReLU), lambda: Synchronised(6)])
def test_a_norm_that_does_more_is_clipped_right(make, clipping):
    model = network(random_norm(make())).double()
    compare(gradveil.fix(model), images(), torch.arange(5) % 3, clipping=clipping)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, Quick])
def test_norms_after_a_linear_layer_are_clipped_right(norm, clipping):
    model = nn.Sequential(nn.Linear(4, 8), random_norm(norm(8)), nn.Tanh(), nn.Linear(8, 3)).double()
    compare(gradveil.fix(model), torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3, clipping=clipping)


def test_a_norm_keeps_its_activation_and_its_parameters():
    norm = random_norm(NormAct(6, lambda: nn.LeakyReLU(0.1), momentum=0.3, eps=1e-3))
    fixed, x = gradveil.fix(norm), torch.randn(4, 6, 3, 3)
    assert type(fixed) is NormAct and fixed is not norm
    expected = F.leaky_relu(F.group_norm(x, 3, norm.weight, norm.bias, 1e-3), 0.1)
    for model in (fixed, fixed.eval()):
        torch.testing.assert_close(model(x), expected)


def test_a_norm_keeps_its_dropout():
    fixed, x = gradveil.fix(NormAct(6, drop=0.5, act=nn.Identity)), torch.randn(8, 6, 10, 10)
    share = float((fixed(x) == 0).double().mean())
    assert 0.4 < share < 0.6
    assert not (fixed.eval()(x) == 0).any()


def test_a_norm_that_does_more_keeps_no_statistics():
    model = network(NormAct(6))
    fixed = gradveil.fix(model)
    assert [n for n, _ in fixed.named_buffers()] == []
    assert fixed[1].track_running_stats is False
    fixed(images(dtype=torch.float32))
    assert [n for n, _ in fixed.named_buffers()] == []
    assert model[1].num_batches_tracked == 0 and "forward" not in vars(model[1])
    check_module(fixed)
    assert normalisations(fixed) == []
    assert normalisations(model) == [model[1]]
    with pytest.raises(UnsupportedModelError, match="mixes examples"):
        check_module(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_fixed_model_goes_by_its_own_parameters(copied):
    fixed = gradveil.fix(network(NormAct(6)))
    twin, x = copied(fixed), images(dtype=torch.float32)
    assert torch.equal(twin(x), fixed(x))
    assert vars(twin[1])["forward"].module is twin[1]
    assert twin.gradveil_changes == fixed.gradveil_changes
    before = fixed(x)
    nn.init.normal_(twin[1].weight)
    assert torch.equal(fixed(x), before) and not torch.equal(twin(x), before)


def test_a_forward_that_was_set_on_the_object_is_kept():
    def absolute(self, x):
        return nn.BatchNorm1d.forward(self, x).abs()

    norm = nn.BatchNorm1d(4)
    norm.forward = absolute.__get__(norm)
    fixed, x = gradveil.fix(norm), torch.randn(5, 4)
    torch.testing.assert_close(fixed(x), F.group_norm(x, 2).abs())
    assert vars(fixed)["forward"].own.__self__ is fixed


def test_hooks_and_parametrisations_of_a_norm_are_kept():
    hooked, parametrised, seen = nn.BatchNorm1d(4), nn.BatchNorm1d(4), []
    hooked.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    nn.utils.parametrize.register_parametrization(parametrised, "weight", nn.Softplus())
    fixed = gradveil.fix(nn.Sequential(hooked, parametrised))
    x = torch.randn(5, 4)
    expected = F.group_norm(F.group_norm(x, 2), 2, parametrised.weight, parametrised.bias)
    torch.testing.assert_close(fixed(x), expected)
    assert seen == [nn.BatchNorm1d]


@pytest.mark.parametrize("kind", [ByHand, ByHandWithStatistics])
def test_a_norm_by_hand_is_refused_when_it_is_called(kind):
    fixed = gradveil.fix(nn.Sequential(nn.Linear(4, 4), kind(4)))
    with pytest.raises(UnsupportedModelError, match=rf"{kind.__name__} '1'.*F.batch_norm.*by hand with a module"):
        fixed(torch.randn(5, 4))
    with pytest.raises(UnsupportedModelError, match=kind.__name__):
        gradveil.fix(nn.Sequential(nn.Linear(4, 4), kind(4)), example=torch.randn(5, 4))


def test_examples_that_lie_side_by_side_as_channels_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"Ghost ''.*8 channels and not its own 4.*several examples"):
        gradveil.fix(Ghost(4))(torch.randn(6, 4))


def test_an_error_after_normalising_is_the_models_own():
    class Fails(nn.Module):
        def forward(self, x):
            raise TypeError("own")

    norm = NormAct(4, Fails)
    with pytest.raises(AttributeError, match="'int'"):
        gradveil.fix(norm)(5)
    with pytest.raises(TypeError, match="own"):
        gradveil.fix(norm)(torch.randn(2, 4, 3, 3))


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(6), (4, 6)),
        (nn.BatchNorm1d(6), (4, 6, 5)),
        (nn.BatchNorm2d(6), (4, 6, 5, 5)),
        (nn.BatchNorm3d(6), (4, 6, 2, 3, 4)),
        (nn.SyncBatchNorm(6), (4, 6, 5)),
    ],
)
def test_torchs_own_norms_are_replaced(norm, shape):
    fixed = gradveil.fix(norm)
    assert type(fixed) is nn.GroupNorm and fixed.num_groups == 3
    x = torch.randn(shape)
    torch.testing.assert_close(fixed(x), F.group_norm(x, 3))


def test_a_subclass_of_sync_batch_norm_asks_no_other_process():
    fixed = gradveil.fix(Synchronised(6))
    assert torch.distributed.get_world_size(fixed.process_group) == -1
    x = torch.randn(3, 6, 4)
    torch.testing.assert_close(fixed(x), F.group_norm(x, 3).relu())


def test_what_a_replaced_norm_is_like():
    norm = nn.BatchNorm2d(8, eps=1e-2).double().eval()
    norm.weight.requires_grad_(False)
    fixed = gradveil.fix(norm)
    assert fixed.eps == 1e-2 and fixed.weight.dtype is torch.float64 and not fixed.training
    assert not fixed.weight.requires_grad and fixed.bias.requires_grad
    assert not list(gradveil.fix(nn.BatchNorm2d(8, affine=False)).parameters())


@pytest.mark.skipif("bias" not in inspect.signature(nn.BatchNorm2d).parameters, reason="always has one in this torch")
def test_a_norm_without_a_shift_gets_none():
    assert gradveil.fix(nn.BatchNorm2d(8, bias=False)).bias is None


@pytest.mark.parametrize("make", [nn.BatchNorm2d, NormAct])
def test_a_frozen_norm_in_eval_mode_is_left_alone(make):
    backbone = nn.Sequential(nn.Conv2d(2, 6, 3), make(6)).requires_grad_(False).eval()
    backbone[1].running_mean.fill_(0.5)
    model = nn.Sequential(backbone, nn.Conv2d(6, 6, 1), make(6))
    fixed = gradveil.fix(model)
    assert type(fixed[0][1]) is make and "forward" not in vars(fixed[0][1])
    assert torch.equal(fixed[0][1].running_mean, backbone[1].running_mean)
    assert len(fixed.gradveil_changes) == 1 and fixed.gradveil_changes[0].startswith("2: ")
    check_module(fixed)
    assert normalisations(fixed) == [fixed[0][1]]
    assert len(gradveil.fix(model.train()).gradveil_changes) == 2


def test_a_norm_in_eval_mode_that_trains_or_has_no_statistics_is_replaced():
    trains = nn.BatchNorm2d(6).eval()
    without = nn.BatchNorm2d(6, track_running_stats=False).requires_grad_(False).eval()
    assert [type(m) for m in gradveil.fix(nn.Sequential(trains, without))] == [nn.GroupNorm] * 2


def test_the_number_of_groups():
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 12, 3), NormAct(12))
    fixed, x = gradveil.fix(model, num_groups=4), torch.randn(2, 12, 3, 3)
    assert fixed[1].num_groups == 4
    torch.testing.assert_close(fixed[3](x), F.group_norm(x, 4).relu())
    with pytest.raises(ConfigError, match=r"num_groups is 8, and NormAct '3' has 12 channels.*model: 1, 2, 4\."):
        gradveil.fix(model, num_groups=8)
    gradveil.fix(nn.Linear(3, 3), num_groups=8)


@pytest.mark.parametrize("wrong", [0, -2, 2.0, True, "4"])
def test_a_number_of_groups_that_is_none(wrong):
    with pytest.raises(ConfigError, match=r"num_groups is .*positive integer"):
        gradveil.fix(nn.BatchNorm2d(8), num_groups=wrong)


def test_a_lazy_norm_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"LazyBatchNorm2d '1' is lazy"):
        gradveil.fix(nn.Sequential(nn.Conv2d(1, 4, 3), nn.LazyBatchNorm2d()))


def test_changes_are_listed_and_logged(caplog):
    shared = nn.BatchNorm2d(8)
    model = nn.Sequential()
    model.features = nn.Sequential(nn.Conv2d(2, 8, 3), shared, shared)
    model.bn1 = NormAct(64)
    model.norm = nn.InstanceNorm2d(8, track_running_stats=True)
    model.kept = nn.ModuleList([nn.GroupNorm(2, 8), nn.InstanceNorm2d(8), nn.LayerNorm(8)])
    with caplog.at_level(logging.INFO, logger="gradveil"):
        fixed = gradveil.fix(model)
    assert fixed.gradveil_changes == (
        "features.1: BatchNorm2d(8) -> GroupNorm(4, 8)",
        "bn1: NormAct(64) normalises in 32 groups",
        "norm: InstanceNorm2d(8) without running statistics",
    )
    assert caplog.messages == list(fixed.gradveil_changes)
    assert fixed.features[1] is fixed.features[2]
    assert not hasattr(model, "gradveil_changes")
    assert gradveil.fix(nn.BatchNorm2d(8)).gradveil_changes == ("(root): BatchNorm2d(8) -> GroupNorm(4, 8)",)


def test_a_fixed_model_has_nothing_left_to_fix():
    once = gradveil.fix(network(NormAct(6)))
    twice, x = gradveil.fix(once), images(dtype=torch.float32)
    assert twice.gradveil_changes == ()
    assert torch.equal(twice(x), once(x))


def test_a_users_own_group_norm_is_untouched():
    class Own(nn.GroupNorm):
        pass

    fixed = gradveil.fix(nn.Sequential(Own(2, 4)))
    assert type(fixed[0]) is Own and fixed.gradveil_changes == ()


class Everything(nn.Module):
    """Norms of all kinds, in place activations behind them, and chance."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.more = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), random_norm(NormAct(6, drop=0.3))
        self.running = nn.InstanceNorm2d(6, track_running_stats=True)
        self.last = nn.Conv2d(6, 3, 1)

    def forward(self, x, scale=1.0):
        x = self.conv(x.mul_(scale))
        x = x + F.relu_(self.norm(x))
        x = self.running(x + self.more(x))
        return {"logits": self.last(F.dropout(x, 0.2, self.training)).mean((2, 3)), "rows": len(x)}


@pytest.mark.parametrize("train", [True, False])
def test_the_check_of_outputs_accepts_what_is_right_and_leaves_no_trace(train):
    model = Everything().train(train)
    random_norm(model.norm)
    state, x = copy.deepcopy(model.state_dict()), images(1, torch.float32)
    before, chance = x.clone(), torch.get_rng_state()
    for example in (x, (x, 0.5), {"x": x, "scale": 2.0}):
        fixed = gradveil.fix(model, example=example)
        assert len(fixed.gradveil_changes) == 3
    assert torch.equal(x, before) and torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_the_check_of_outputs_refuses_a_fix_that_loses_an_activation(monkeypatch):
    model, x = network(NormAct(6)), images(dtype=torch.float32)
    monkeypatch.setattr(support, "_only_normalises", lambda module: True)
    assert type(gradveil.fix(model)[1]) is nn.GroupNorm
    with pytest.raises(UnsupportedModelError, match=r"more than its norms.*1: NormAct\(6\) -> GroupNorm\(3, 6\).*hand"):
        gradveil.fix(model, example=x)


def test_the_check_of_outputs_refuses_a_model_that_asks_for_the_type_of_its_norms():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            x = self.norm(x)
            return (x.relu(), x) if isinstance(self.norm, nn.BatchNorm1d) else x

    with pytest.raises(UnsupportedModelError, match="asks for the type"):
        gradveil.fix(Asks(), example=torch.randn(3, 4))


@pytest.mark.parametrize("scale", [1e-3, 1e6])
def test_the_check_of_outputs_sees_through_layers_in_which_signals_fade_or_grow(monkeypatch, scale):
    """Without any normalisation, after a few layers nothing is left of them, or nothing finite."""
    convs = [nn.Conv2d(6, 6, 1, bias=False) for _ in range(10)]
    for conv in convs:
        nn.init.normal_(conv.weight, 0.0, scale)
    model = nn.Sequential(*(part for conv in convs for part in (conv, NormAct(6))), nn.Flatten(), nn.Linear(54, 3))
    x = torch.randn(2, 6, 3, 3)
    gradveil.fix(model, example=x)
    monkeypatch.setattr(support, "_only_normalises", lambda module: True)
    with pytest.raises(UnsupportedModelError, match="more than its norms"):
        gradveil.fix(model, example=x)


@pytest.mark.parametrize("x", [torch.full((2, 4), torch.inf), torch.zeros(0, 4)])
def test_an_example_that_shows_nothing_is_refused(x):
    with pytest.raises(ConfigError, match="no finite number"):
        gradveil.fix(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), example=x)


def test_a_private_run_of_a_norm_that_does_more():
    model = gradveil.fix(network(NormAct(6, drop=0.1)))
    assert isinstance(vars(model[1])["forward"], GroupedForward)
    data = torch.utils.data.TensorDataset(images(12, torch.float32), torch.arange(12) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = gradveil.PrivacyEngine(sigma=1.0, clip=1.0, delta=1e-3, steps=3, seed=1)
    model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=data, batch_size=6)
    before = model[1].weight.detach().clone()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    engine.detach()
    assert not torch.equal(model[1].weight, before)
