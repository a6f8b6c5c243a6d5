"""Plain SGD's update in the pass that adds the noise: the same weights and gradients, and nobody can tell."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

import gradveil
from gradveil import randomness
from gradveil.kernels import layers, native
from gradveil.randomness import NoiseSource
from gradveil.updates import Steps
from loops import dataset, network, run, start, weights

needs_library = pytest.mark.skipif(layers.layers() is None, reason=f"{native.status()}; {layers.status()}")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(autouse=True)
def _same_key(monkeypatch):
    """Runs without a seed that draw the same key: a seeded one never takes its steps with the noise."""
    monkeypatch.setattr(randomness.secrets, "token_bytes", lambda size: bytes(range(size)))


@pytest.fixture
def steps_taken(monkeypatch):
    """Whether each step was taken with the noise."""
    found = []
    plain = NoiseSource.add_to

    def add_to(self, *args, steps=None, **kwargs):
        plain(self, *args, steps=steps, **kwargs)
        found.append(steps is not None and steps.taken)

    monkeypatch.setattr(NoiseSource, "add_to", add_to)
    return found


class Odd(nn.Module):
    """Parameters of all sorts: without dimensions, frozen, never used."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(54, 54).requires_grad_(False)
        self.head = nn.Linear(54, 3)
        self.unused = nn.Linear(300, 4)

    def forward(self, x):
        return self.head(self.frozen(torch.relu(self.conv(x)).flatten(1))) * self.scale


def train(device, *, ordinary, dtype=torch.float32, clipping="per-layer"):
    """Weights and gradients of a run with two learning rates, both of them on a schedule."""
    torch.manual_seed(0)
    model = Odd().to(device, dtype)
    groups = [{"params": [*model.conv.parameters(), *model.frozen.parameters()], "lr": 0.3}]
    known = {id(p) for p in groups[0]["params"]}
    groups.append({"params": [p for p in model.parameters() if id(p) not in known]})
    optimizer = torch.optim.SGD(groups, lr=0.1)
    engine = gradveil.PrivacyEngine(strategy="dyn-s-decay", clip=1.0, sigma=2.0, steps=6, delta=1e-3, clipping=clipping)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(dataset(), batch_size=10)
    )
    if ordinary:
        optimizer.register_step_post_hook(lambda *_: None)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    seen = []
    for x, y in loader:
        versions = [p._version for p in engine.parameters.values()]
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device, dtype)), y.to(device)).backward()
        optimizer.step()
        schedule.step()
        assert all(p._version > v for p, v in zip(engine.parameters.values(), versions, strict=True))
        seen += [t.detach().clone() for p in engine.parameters.values() for t in (p, p.grad)]
    return seen, engine.releases


@needs_library
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
def test_weights_and_gradients_are_those_of_an_ordinary_step(device, dtype, clipping, steps_taken):
    with_noise, releases = train(device, ordinary=False, dtype=dtype, clipping=clipping)
    assert steps_taken == [device == "cpu" or dtype is torch.float32] * 6
    apart, same_releases = train(device, ordinary=True, dtype=dtype, clipping=clipping)
    assert steps_taken[6:] == [False] * 6
    assert releases == same_releases
    for a, b in zip(with_noise, apart, strict=True):
        if device == "cpu":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b)


@needs_library
@pytest.mark.parametrize("rates", [[0.5, 0.5], [0.5, 0.25]])
@pytest.mark.parametrize("stds", [[2.0, 2.0], [2.0, 1.0]])
@pytest.mark.parametrize("device", DEVICES)
def test_parameters_take_their_steps_however_they_lie(device, stds, rates):
    grads = [torch.randn(40, 30, device=device), torch.randn(2000, device=device)]
    before, key = [g.clone() for g in grads], randomness.SecretKey(1)
    parameters = [torch.randn(30, 40, device=device).mT, torch.randn(2000, device=device)]
    at = [p.clone() for p in parameters]
    steps = Steps(parameters, rates)
    NoiseSource(key, 0).add_to(grads, stds, divide_by=4.0, steps=steps)
    assert steps.taken
    NoiseSource(key, 0).add_to(before, stds, divide_by=4.0)
    for grad, same, p, old, rate in zip(grads, before, parameters, at, rates, strict=True):
        torch.testing.assert_close(grad, same)
        torch.testing.assert_close(p, old - rate * grad)


def _watched_globally(optimizer):
    return register_optimizer_step_pre_hook(lambda *_: None)


def _with_lr_on_device(optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)


class OwnSGD(torch.optim.SGD):
    pass


def _made(kind, **settings):
    return lambda p: kind(p, lr=0.1, **settings)


@pytest.mark.filterwarnings("ignore:this step's batch did not come from the loader")
@pytest.mark.parametrize(
    ("make", "change"),
    [
        pytest.param(_made(torch.optim.SGD, momentum=0.9), None, id="momentum"),
        pytest.param(_made(torch.optim.SGD, weight_decay=0.1), None, id="weight-decay"),
        pytest.param(_made(torch.optim.SGD, maximize=True), None, id="maximize"),
        pytest.param(_made(torch.optim.SGD, fused=True), None, id="fused"),
        pytest.param(_made(torch.optim.Adam), None, id="adam"),
        pytest.param(_made(OwnSGD), None, id="subclass"),
        pytest.param(_made(torch.optim.SGD), _with_lr_on_device, id="lr-tensor"),
        pytest.param(_made(torch.optim.SGD), _watched_globally, id="global-hook"),
        pytest.param(_made(torch.optim.SGD), lambda o: o.register_step_pre_hook(lambda *_: None), id="hook-before"),
        pytest.param(_made(torch.optim.SGD), lambda o: o.register_step_post_hook(lambda *_: None), id="hook-after"),
    ],
)
def test_a_step_that_is_more_or_that_others_watch_is_the_optimizers_own(make, change, steps_taken):
    model = network()
    optimizer = make(model.parameters())
    engine = gradveil.PrivacyEngine(strategy="baseline", clip=1.0, sigma=2.0, steps=3, delta=1e-3)
    engine.make_private(module=model, optimizer=optimizer, data_loader=dataset(), batch_size=10)
    handle = change(optimizer) if change is not None else None
    x, y = dataset().tensors
    try:
        for _ in range(3):
            before = weights(model)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            assert not torch.equal(weights(model), before)
    finally:
        if handle is not None:
            handle.remove()
    assert steps_taken == [False] * 3


def test_a_seeded_run_and_one_with_whitening_take_their_steps_apart(steps_taken):
    for settings in ({"seed": 3}, {"strategy": "adaclip"}):
        engine, model, optimizer, loader = start(**settings)
        run(engine, model, optimizer, loader)
    assert not any(steps_taken)


@needs_library
def test_a_watcher_sees_noised_gradients_and_weights_that_have_not_moved(steps_taken):
    _, model, optimizer, loader = start()
    seen = []

    def before(*_):
        seen.append(([p.grad.clone() for p in model.parameters()], weights(model)))

    batches = iter(loader)
    for watched in (False, True, False):
        handle = optimizer.register_step_pre_hook(before) if watched else None
        at = weights(model)
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        sums = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        if handle is not None:
            handle.remove()
            grads, then = seen[-1]
            assert torch.equal(then, at)
            for p, g, s in zip(model.parameters(), grads, sums, strict=True):
                assert torch.equal(p.grad, g) and not torch.equal(g, s)
        assert not torch.equal(weights(model), at)
    assert steps_taken == [True, False, True]


@needs_library
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_there_after_the_step_and_go_with_zero_grad(set_to_none, steps_taken):
    _, model, optimizer, loader = start()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        before = copy.deepcopy(list(model.parameters()))
        optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p.detach(), old.detach() - 0.1 * p.grad)
        optimizer.zero_grad(set_to_none=set_to_none)
    assert steps_taken == [True] * 12
    assert not optimizer.state


@needs_library
def test_parts_of_a_batch_take_one_step(steps_taken):
    results = []
    for physical in (None, 3):
        engine, model, optimizer, loader = start(physical=physical, model=network().double())
        loader._tensors = tuple(t.double() if t.is_floating_point() else t for t in loader._tensors)
        run(engine, model, optimizer, loader)
        results.append(weights(model))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    assert steps_taken == [True] * 24


@needs_library
def test_a_release_is_written_down_before_the_weights_move(monkeypatch):
    engine, model, optimizer, loader = start()

    def breaks(self, *args, **kwargs):
        raise KeyboardInterrupt

    before = weights(model)
    monkeypatch.setattr(NoiseSource, "add_to", breaks)
    with pytest.raises(KeyboardInterrupt):
        run(engine, model, optimizer, loader)
    assert len(engine.releases) == 1
    assert torch.equal(weights(model), before)


def test_detach_leaves_no_hook_on_the_optimizer():
    engine, model, optimizer, loader = start()
    run(engine, model, optimizer, loader)
    engine.detach()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
