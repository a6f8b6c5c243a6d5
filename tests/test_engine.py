"""The engine in a user's own loop."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import gradveil
from gradveil import strategies
from gradveil.accounting import proved_epsilon
from gradveil.clipping import clipped_sums
from gradveil.errors import (
    BudgetExhausted,
    ConfigError,
    PrivacyViolation,
    UnknownNameError,
    UnsupportedModelError,
)
from loops import N, dataset, network, run, start, weights


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw-foreach"])
@pytest.mark.parametrize("strategy", strategies.names())
def test_every_strategy_with_every_optimizer_keeps_the_model_what_it_is(strategy, optimizer):
    model = network()
    keys, kind = list(model.state_dict()), type(model)
    engine, private, opt, loader = start(strategy=strategy, optimizer=optimizer, model=model, seed=1)
    assert private is model
    before = weights(model)

    def unchanged():
        assert list(model.state_dict()) == keys
        assert type(model) is kind

    run(engine, model, opt, loader, unchanged)
    unchanged()
    assert not torch.equal(weights(model), before)
    assert torch.isfinite(weights(model)).all()
    assert engine.step == 12
    assert len(engine.releases) == (12 if strategy != "non-private" else 0)
    engine.detach()
    assert all("forward" not in vars(m) for m in model.modules())
    assert not opt._optimizer_step_pre_hooks
    assert not model._state_dict_pre_hooks


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clipping", ["per-layer", "flat", {"conv": ["0"], "head": ["3"]}])
def test_grad_after_backward_is_the_sum_of_clipped_gradients_for_any_batch_fed(reduction, clipping):
    model = network().double()
    engine, model, opt, _ = start(model=model, clipping=clipping, clip=0.3, loss_reduction=reduction)
    for n in (1, 4, 17):
        x, y = torch.randn(n, 1, 5, 5).double(), torch.randint(0, 3, (n,))
        expected = clipped_sums(
            model, F.cross_entropy, x, y, groups=engine.groups, bounds=[0.3] * len(engine.groups)
        ).sums
        opt.zero_grad()
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        for name, p in model.named_parameters():
            assert float((p.grad - expected[name]).abs().max()) < 1e-9


@pytest.mark.parametrize("strategy", strategies.names())
@pytest.mark.parametrize("physical", [1, 3, 50])
def test_physical_batches_give_the_same_run(strategy, physical):
    results = []
    for split in (None, physical):
        engine, model, opt, loader = start(
            strategy=strategy, model=network().double(), physical=split, seed=5, optimizer="momentum"
        )
        loader._tensors = tuple(t.double() if t.is_floating_point() else t for t in loader._tensors)
        run(engine, model, opt, loader)
        results.append((weights(model), engine.releases))
        engine.detach()
    (a, whole), (b, parts) = results
    assert torch.allclose(a, b, rtol=0, atol=1e-9)
    assert len(whole) == len(parts)
    for r, s in zip(whole, parts, strict=True):
        assert r.noise_std == pytest.approx(s.noise_std)
        assert [side.values for side in r.side] == [pytest.approx(side.values) for side in s.side]


def test_the_largest_norms_are_those_of_the_reference():
    model = network().double()
    engine, model, _, _ = start(model=model, clip=0.3)
    x, y = torch.randn(9, 1, 5, 5).double(), torch.randint(0, 3, (9,))
    norms = clipped_sums(model, F.cross_entropy, x, y, groups=engine.groups, bounds=[0.3, 0.3]).norms
    F.cross_entropy(model(x), y).backward()
    assert list(engine.largest_norms.values()) == pytest.approx(norms.clamp(max=0.3).amax(0).tolist())


def test_seeded_runs_repeat_and_runs_without_a_seed_differ():
    final = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4), ("d", None), ("e", None)):
        engine, model, opt, loader = start(seed=seed)
        run(engine, model, opt, loader)
        final[name] = weights(model)
        engine.detach()
    assert torch.equal(final["a"], final["b"])
    for one, other in (("a", "c"), ("a", "d"), ("d", "e")):
        assert not torch.equal(final[one], final[other])


def test_a_seeded_run_says_that_whoever_knows_the_seed_can_take_the_noise_off():
    engine, *rest = start(seed=3, steps=2)
    run(engine, *rest)
    assert "whoever knows the seed can take the noise off" in " ".join(str(engine.statement()).split())
    assert "3" not in repr(engine._key)
    engine, *rest = start(steps=2)
    run(engine, *rest)
    assert "the run was seeded" not in " ".join(str(engine.statement()).split())


def test_the_statement_in_a_users_loop():
    engine, *rest = start(clipping="flat", sigma=3.0)
    run(engine, *rest)
    statement = engine.statement()
    assert 0 < statement.proved.epsilon < 10
    assert statement.proved.steps_charged == 12
    assert "MA" in statement.paper
    for strategy in ("dyn-s", "non-private"):
        engine, *rest = start(strategy=strategy)
        run(engine, *rest)
        assert engine.statement().proved.epsilon == math.inf
        assert engine.statement().proved.reason


def test_empty_batches_are_steps_that_release_noise():
    engine, model, opt, loader = start(batch_size=1, steps=100, sigma=3.0)  # q = 1/N
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        before = weights(model)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if not len(x):
            assert all(not p.grad.any() for p in model.parameters())
        opt.step()
        assert not torch.equal(weights(model), before)
    assert sizes.count(0) > 20
    assert max(sizes) > 1
    assert len(engine.releases) == 100
    assert {(r.sampler, r.sample_rate, r.expected_batch_size) for r in engine.releases} == {("poisson", 1 / N, 1.0)}
    assert engine.statement().proved.epsilon < math.inf


def test_the_loop_goes_on_where_it_was_left():
    engine, model, opt, loader = start()
    for x, y in islice(loader, 5):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    assert len(loader) == 7
    run(engine, model, opt, loader)
    assert [r.step for r in engine.releases] == list(range(12))


def test_steps_beyond_the_declared_are_refused():
    engine, model, opt, loader = start(steps=3)
    run(engine, model, opt, loader)
    assert list(loader) == []
    F.cross_entropy(model(torch.randn(4, 1, 5, 5)), torch.zeros(4, dtype=torch.long)).backward()
    with pytest.raises(BudgetExhausted, match="declared 3 steps"):
        opt.step()
    assert len(engine.releases) == 3


@pytest.mark.parametrize("strategy", ["dyn-sigma", "quantile-clip", "adaclip", "dyn-s-decay"])
def test_the_planned_multiplier_is_the_one_released(strategy):
    engine, *rest = start(strategy=strategy)
    planned = [engine.book.budget.planned_multiplier(t) for t in range(12)]
    run(engine, *rest)
    assert [r.multiplier for r in engine.releases] == pytest.approx(planned, rel=1e-9)


def test_fixed_variance_is_planned_and_released_alike():
    for strategy in ("dyn-s-decay", "dyn-s", "dyn-s-l2max"):
        engine, *rest = start(strategy=strategy, fixed_variance=True)
        planned = [engine.book.budget.planned_multiplier(t) for t in range(12)]
        run(engine, *rest)
        assert [r.multiplier for r in engine.releases] == pytest.approx(planned, rel=1e-9)
        for r in engine.releases:
            assert set(r.noise_std) == {2.0}
            assert r.sigma == pytest.approx(2.0 / r.sensitivity[0])
            assert r.scale_is_public
        proved = proved_epsilon(engine.header, engine.releases, accountant="RDP")
        assert proved.epsilon < math.inf


def test_a_batch_that_did_not_come_from_the_loader_is_recorded_as_unknown_and_proves_nothing():
    engine, model, opt, _ = start()
    F.cross_entropy(model(torch.randn(4, 1, 5, 5)), torch.zeros(4, dtype=torch.long)).backward()
    with pytest.warns(UserWarning, match="did not come from the loader"):
        opt.step()
    assert engine.releases[0].sampler == "unknown"
    assert engine.statement().proved.epsilon == math.inf
    _, model, opt, _ = start(budget=5.0)
    F.cross_entropy(model(torch.randn(4, 1, 5, 5)), torch.zeros(4, dtype=torch.long)).backward()
    with pytest.warns(UserWarning, match="loader"), pytest.raises(BudgetExhausted, match="unknown sampling"):
        opt.step()


def test_two_batches_in_one_step_are_refused():
    _, model, opt, loader = start()
    for x, y in islice(loader, 2):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyViolation, match="2 batches were drawn"):
        opt.step()


def test_a_batch_used_twice_in_one_step_is_refused():
    _, model, opt, loader = start()
    x, y = next(iter(loader))
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyViolation, match=rf"{2 * len(x)} examples went through backward"):
        opt.step()


def test_an_abandoned_batch_does_not_enter_the_next_release():
    engine, model, opt, loader = start(seed=9)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        break
    run(engine, model, opt, loader)
    fresh, other, opt, loader = start(seed=9)
    run(fresh, other, opt, loader)
    assert torch.equal(weights(model), weights(other))


def test_a_closure_is_refused():
    _, model, opt, loader = start()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(PrivacyViolation, match="closure"):
            opt.step(lambda: 0.0)
        break


def test_parameters_unused_in_a_step_get_noise():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(25, 3)
            self.spare = nn.Linear(25, 3)

        def forward(self, x):
            return self.used(x.flatten(1))

    model = Branches()
    before = model.spare.weight.detach().clone()
    engine, model, opt, loader = start(model=model, steps=2)
    run(engine, model, opt, loader)
    assert not torch.equal(model.spare.weight, before)


def test_gradients_that_are_not_finite_count_as_zero_and_are_reported():
    data = dataset()
    data.tensors[0][7] = float("nan")
    model = network()
    engine = gradveil.PrivacyEngine(strategy="baseline", clip=1.0, sigma=1.0, steps=10, delta=1e-3, seed=1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model, opt, loader = engine.make_private(module=model, optimizer=opt, data_loader=data, batch_size=N)
    with pytest.warns(UserWarning, match="not finite"):
        run(engine, model, opt, loader)
    assert engine.not_finite_examples == 10
    assert torch.isfinite(weights(model)).all()


def test_strangers_in_the_optimizer_are_refused():
    model = network()
    opt = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=2, delta=1e-3)
    with pytest.raises(ConfigError, match="parameter"):
        engine.make_private(module=model, optimizer=opt, data_loader=dataset(), batch_size=5)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"sigma": 0.0}, ConfigError, "positive"),
        ({"sigma": math.nan}, ConfigError, "finite"),
        ({"clip": -1.0}, ConfigError, "positive"),
        ({"delta": 0.0}, ConfigError, "probability"),
        ({"delta": 1.0}, ConfigError, "probability"),
        ({"delta": math.nan}, ConfigError, "probability"),
        ({"delta": 0.5}, ConfigError, "1/N"),
        ({"strategy": "baselin"}, UnknownNameError, "'baseline'"),
        ({"sampling": "shuffle"}, ConfigError, "allow_unproved"),
        ({"sampling": "poission"}, UnknownNameError, "'poisson'"),
        ({"loss_reduction": "none"}, UnknownNameError, "mean"),
        ({"strategy": "dyn-s", "budget": 1.0}, ConfigError, "no proved epsilon"),
        ({"budget": -1.0}, ConfigError, "positive"),
        ({"clipping": "per-tensor"}, UnknownNameError, "per-layer"),
        ({"options": {"quantile": 0.5}}, ConfigError, "takes no options"),
        ({"strategy": "quantile-clip", "options": {"quantil": 0.5}}, ConfigError, "quantil"),
        ({"strategy": "quantile-clip", "options": {"quantile": 1.5}}, ConfigError, "between 0 and 1"),
        ({"strategy": "adaclip", "options": {"h1": 0.0}}, ConfigError, "h1"),
        ({"seed": "secret"}, ConfigError, "whole number"),
        ({"views": 0}, ConfigError, "views is 0.*averaged.*at least 1"),
        ({"views": -2}, ConfigError, "views is -2"),
        ({"views": 1.5}, ConfigError, "views is 1.5"),
        ({"views": True}, ConfigError, "views is True"),
        ({"batch_size": 61}, ConfigError, "batch size is 61"),
        ({"model": nn.Sequential(nn.Flatten(), nn.BatchNorm1d(25), nn.Linear(25, 3))}, UnsupportedModelError, "fix"),
    ],
)
def test_refusals(settings, error, words):
    with pytest.raises(error, match=words):
        start(**settings)


def test_shuffling_asked_for_explicitly_is_never_called_proved():
    engine, *rest = start(sampling="shuffle", allow_unproved=True)
    run(engine, *rest)
    assert engine.statement().proved.epsilon == math.inf
    assert "shuffl" in engine.statement().proved.reason


@pytest.mark.parametrize("sampling", ["without-replacement", "with-replacement"])
def test_fixed_size_sampling_in_the_loop(sampling):
    engine, *rest = start(sampling=sampling)
    run(engine, *rest)
    assert {r.sampler for r in engine.releases} == {sampling}


def test_a_dataset_needs_a_batch_size_and_one_engine_is_one_run():
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=2, delta=1e-3)
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="without batch_size"):
        engine.make_private(module=model, optimizer=opt, data_loader=dataset())
    with pytest.raises(ConfigError, match="batch_size=3 was given"):
        engine.make_private(module=model, optimizer=opt, data_loader=DataLoader(dataset(), batch_size=5), batch_size=3)
    engine.make_private(module=model, optimizer=opt, data_loader=dataset(), batch_size=5)
    with pytest.raises(ConfigError, match="one engine is one run"):
        engine.make_private(module=model, optimizer=opt, data_loader=dataset(), batch_size=5)
    with pytest.raises(ConfigError, match="make_private first"):
        gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=2).statement()


def test_parameters_that_join_later_are_refused():
    model = network()
    model[0].requires_grad_(False)
    _, model, opt, loader = start(model=model)
    x, y = next(iter(loader))
    model[0].requires_grad_(True)
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyViolation, match="after make_private"):
        opt.step()


def test_optimizers_that_cannot_be_private_and_models_that_are_already_are_refused():
    model = network()
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=2, delta=1e-3)
    partly = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"does not hold '3\.weight'"):
        engine.make_private(module=model, optimizer=partly, data_loader=dataset(), batch_size=5)
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ConfigError, match="LBFGS"):
        engine.make_private(module=model, optimizer=lbfgs, data_loader=dataset(), batch_size=5)
    _, model, _, _ = start(model=model)
    with pytest.raises(ConfigError, match="private already"):
        start(model=model)


def test_gradients_changed_between_backward_and_step_are_refused():
    """Scaling a sum by its own norm, or adding to it, undoes what was clipped."""
    for change in (
        lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1),
        lambda m: m[0].weight.grad.mul_(2.0),
        lambda m: setattr(m[0].weight, "grad", torch.ones_like(m[0].weight)),
    ):
        for clipping in ("per-layer", "flat"):
            _, model, opt, loader = start(clipping=clipping)
            x, y = next(iter(loader))
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            change(model)
            with pytest.raises(PrivacyViolation, match="changed between backward"):
                opt.step()


def test_a_budget_for_an_unproved_strategy_is_the_published_one_and_is_named_so():
    settings = {"strategy": "dyn-s-l2max", "sigma": 2.0, "steps": 60, "allow_unproved": True}
    engine, *rest = start(**settings)
    run(engine, *rest)
    full = engine.statement().paper["MA"].epsilon
    held, *rest = start(**settings, budget=full * 0.6)
    with pytest.raises(BudgetExhausted, match=r"published.*MA.*not a guarantee"):
        run(held, *rest)
    assert 0 < len(held.releases) < 60
    assert held.statement().paper["MA"].epsilon <= full * 0.6
    assert held.statement().proved.epsilon == math.inf
    with pytest.raises(ConfigError, match=r"no proved epsilon|budget"):
        start(strategy="non-private", budget=1.0, allow_unproved=True)
