"""The engine in a user's own loop."""

from __future__ import annotations

import copy
import math
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import gradveil
from gradveil.accounting import proved_epsilon
from gradveil.clipping import clipped_sums
from gradveil.errors import (
    BudgetExhausted,
    ConfigError,
    PrivacyViolation,
    UnknownNameError,
    UnsupportedModelError,
)
from gradveil.mechanism import strategies
from loops import N, dataset, in_double, network, run, start, weights, without_noise


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
    assert not opt._optimizer_step_pre_hooks and not opt._optimizer_step_post_hooks
    assert not model._state_dict_pre_hooks


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clipping", ["per-layer", "flat", {"conv": ["0"], "head": ["3"]}])
@pytest.mark.parametrize("physical", [None, 3])
def test_backward_leaves_the_clipped_sum_over_the_expected_batch_size(reduction, clipping, physical):
    """Beside its noise, which is left out here."""
    engine, model, opt, loader = start(
        model=network().double(), clipping=clipping, clip=0.3, loss_reduction=reduction, physical=physical
    )
    in_double(loader)
    bounds = [0.3] * len(engine.groups)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with without_noise():
        for x, y in loader:
            opt.zero_grad()
            expected = clipped_sums(model, F.cross_entropy, x, y, groups=engine.groups, bounds=bounds).sums
            for name, of_part in expected.items():
                total[name] += of_part
            done = engine.step
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            if engine.step == done:
                assert all(p.grad is None for p in model.parameters())
                continue
            for name, p in model.named_parameters():
                assert float((p.grad - total[name] / 10).abs().max()) < 1e-10
                total[name].zero_()
            opt.step()
    assert engine.step == 12


class Odd(nn.Module):
    """Parameters of all sorts: without dimensions, frozen, never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(54, 54).requires_grad_(False)
        self.head = nn.Linear(54, 3)
        self.unused = nn.Linear(30, 4)

    def forward(self, x):
        return self.head(self.frozen(torch.relu(self.conv(x)).flatten(1))) * self.scale


@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.SGD, {"fused": True, "maximize": True}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_the_weights_are_those_of_the_same_optimizer_fed_with_the_releases(kind, settings, physical):
    """With two learning rates on a schedule. Between the parts of a batch the optimizer has nothing to update with."""
    model = Odd()
    twin = copy.deepcopy(model)

    def made(of):
        groups = [{"params": list(of.conv.parameters()), "lr": 0.3}]
        groups.append({"params": [p for n, p in of.named_parameters() if not n.startswith("conv")]})
        optimizer = kind(groups, lr=0.1, **settings)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    (optimizer, schedule), (other, other_schedule) = made(model), made(twin)
    engine = gradveil.PrivacyEngine(strategy="dyn-s-decay", clip=1.0, sigma=2.0, steps=6, delta=1e-3)
    *_, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=dataset(), batch_size=10, physical_batch_size=physical
    )
    for x, y in loader:
        done = engine.step
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if engine.step > done:
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert (p.grad is not None) == p.requires_grad
                q.grad = None if p.grad is None else p.grad.clone()
            other.step()
            schedule.step()
            other_schedule.step()
        assert torch.equal(weights(model), weights(twin))
    assert engine.step == 6


def test_releases_are_added_to_the_gradients_that_are_there():
    """As autograd does it, where nobody calls zero_grad."""
    found = []
    for clears in (True, False):
        _, model, opt, loader = start(steps=3, seed=4)
        total = [torch.full_like(p, 7.0) for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.full_like(p, 7.0)
        for x, y in loader:
            if clears:
                opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for p, so_far in zip(model.parameters(), total, strict=True):
                so_far += p.grad
        found.append(total if clears else [p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("strategy", strategies.names())
@pytest.mark.parametrize("physical", [1, 3, 50])
def test_physical_batches_give_the_same_run(strategy, physical):
    results = []
    for split in (None, physical):
        engine, model, opt, loader = start(
            strategy=strategy, model=network().double(), physical=split, seed=5, optimizer="momentum"
        )
        in_double(loader)
        run(engine, model, opt, loader)
        results.append((weights(model), engine.releases))
        engine.detach()
    (a, whole), (b, parts) = results
    assert torch.allclose(a, b, rtol=0, atol=1e-9)
    assert len(whole) == len(parts)
    for r, s in zip(whole, parts, strict=True):
        assert r.noise_std == pytest.approx(s.noise_std)
        assert [side.values for side in r.side] == [pytest.approx(side.values) for side in s.side]


@pytest.mark.parametrize("physical", [None, 4])
def test_the_largest_norm_that_scales_the_noise_is_that_of_the_reference(physical):
    """Of the l2-max strategies, over all examples and groups, after clipping."""
    engine, model, _, loader = start(
        model=network().double(), strategy="dyn-s-l2max", clip=0.3, batch_size=30, physical=physical
    )
    in_double(loader)
    largest, seen = 0.0, 0
    for x, y in loader:
        bounds = engine.rule.bounds(engine.step)
        norms = clipped_sums(model, F.cross_entropy, x, y, groups=engine.groups, bounds=bounds).norms
        largest = max(largest, float(norms.clamp(max=torch.tensor(bounds)).max()))
        F.cross_entropy(model(x), y).backward()
        if len(engine.releases) > seen:
            seen += 1
            assert engine.releases[-1].sensitivity == pytest.approx((largest, largest))
            largest = 0.0
    assert seen == 12


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


def test_a_seeded_run_says_that_anyone_who_knows_the_seed_can_subtract_the_noise():
    engine, *rest = start(seed=3, steps=2)
    run(engine, *rest)
    said = "the run was seeded: anyone who knows the seed can subtract the noise"
    assert said in " ".join(str(engine.statement()).split())
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
        assert all(p.grad.all() for p in model.parameters())
        opt.step()
        assert not torch.equal(weights(model), before)
    assert sizes.count(0) > 20
    assert max(sizes) > 1
    assert len(engine.releases) == 100
    assert {(r.sampler, r.sample_rate, r.expected_batch_size) for r in engine.releases} == {("poisson", 1 / N, 1.0)}
    assert engine.statement().proved.epsilon < math.inf


def test_the_release_of_an_empty_batch_is_noise_alone():
    _, model, opt, loader = start(batch_size=1, steps=100, sigma=3.0)
    with without_noise():
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            assert any(p.grad.any() for p in model.parameters()) == (len(x) > 0)


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
    with pytest.raises(BudgetExhausted, match="declared 3 steps"):
        list(loader)
    opt.zero_grad()
    with pytest.raises(BudgetExhausted, match="declared 3 steps"):
        F.cross_entropy(model(torch.randn(4, 1, 5, 5)), torch.zeros(4, dtype=torch.long)).backward()
    assert all(p.grad is None for p in model.parameters())
    assert len(engine.releases) == 3


@pytest.mark.parametrize("strategy", ["dyn-sigma", "quantile-clip", "adaclip", "dyn-s-decay"])
def test_the_planned_multiplier_is_the_one_released(strategy):
    engine, *rest = start(strategy=strategy)
    planned = [engine._log.budget.planned_multiplier(t) for t in range(12)]
    run(engine, *rest)
    assert [r.multiplier for r in engine.releases] == pytest.approx(planned, rel=1e-9)


def test_fixed_variance_is_planned_and_released_alike():
    for strategy in ("dyn-s-decay", "dyn-s", "dyn-s-l2max"):
        engine, *rest = start(strategy=strategy, fixed_variance=True)
        planned = [engine._log.budget.planned_multiplier(t) for t in range(12)]
        run(engine, *rest)
        assert [r.multiplier for r in engine.releases] == pytest.approx(planned, rel=1e-9)
        for r in engine.releases:
            assert set(r.noise_std) == {2.0}
            assert r.sigma == pytest.approx(2.0 / r.sensitivity[0])
            assert r.scale_is_public
        proved = proved_epsilon(engine.header, engine.releases, accountant="RDP")
        assert proved.epsilon < math.inf


def test_a_batch_that_did_not_come_from_the_loader_is_recorded_as_unknown_and_proves_nothing():
    engine, model, *_ = start()
    x, y = torch.randn(4, 1, 5, 5), torch.zeros(4, dtype=torch.long)
    with pytest.warns(UserWarning, match="did not come from the loader"):
        F.cross_entropy(model(x), y).backward()
    assert engine.releases[0].sampler == "unknown"
    assert engine.statement().proved.epsilon == math.inf
    engine, model, *_ = start(budget=5.0)
    with pytest.warns(UserWarning, match="loader"), pytest.raises(BudgetExhausted, match="unknown sampling"):
        F.cross_entropy(model(x), y).backward()
    assert not engine.releases
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("together", [False, True])
def test_a_batch_that_is_differentiated_twice_is_refused(together):
    engine, model, _, loader = start()
    x, y = next(iter(loader))
    if together:
        with pytest.raises(PrivacyViolation, match=rf"{2 * len(x)} examples went through backward"):
            F.cross_entropy(model(torch.cat([x, x])), torch.cat([y, y])).backward()
        assert not engine.releases
        assert all(p.grad is None for p in model.parameters())
        return
    F.cross_entropy(model(x), y).backward()
    released = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(PrivacyViolation, match=r"again after the batch of step 0 was released.*twice"):
        F.cross_entropy(model(x), y).backward()
    assert len(engine.releases) == 1
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), released, strict=True))


def test_a_batch_that_is_not_whole_is_not_released():
    engine, model, _, loader = start(sampling="without-replacement")
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x[:-1]), y[:-1]).backward()
    assert not engine.releases
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(PrivacyViolation, match=r"batch of step 0 \(10 examples\) was not released"):
        next(batches)


def test_the_passes_over_a_batch_are_released_together_once_all_examples_are_there():
    """A user may cut a batch up without physical_batch_size."""
    found = []
    for cuts in ([10], [4, 6], [1, 2, 7]):
        engine, model, opt, loader = start(seed=2, sampling="without-replacement", model=network().double())
        in_double(loader)
        for x, y in loader:
            opt.zero_grad()
            for rows, labels in zip(x.split(cuts), y.split(cuts), strict=True):
                assert all(p.grad is None for p in model.parameters())
                F.cross_entropy(model(rows), labels).backward()
            opt.step()
        found.append(weights(model))
        assert engine.step == 12
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=1e-10)


def test_examples_dropped_by_their_own_content_are_allowed_when_declared():
    engine, model, opt, loader = start(drops_examples=True)
    for x, y in loader:
        opt.zero_grad()
        keep = x.flatten(1).mean(1) > 0
        F.cross_entropy(model(x[keep]), y[keep]).backward()
        opt.step()
    assert len(engine.releases) == 12
    assert engine.header.plan["drops_examples"] is True
    _, model, _, loader = start(drops_examples=True)
    x, y = next(iter(loader))
    with pytest.raises(PrivacyViolation, match="more than once"):
        F.cross_entropy(model(torch.cat([x, x[:1]])), torch.cat([y, y[:1]])).backward()


@pytest.mark.parametrize("passes", [0, 1])
def test_an_abandoned_batch_does_not_enter_the_next_release(passes):
    """Of which nothing, or a part, went through backward()."""
    found = []
    for abandons in (True, False):
        engine, model, opt, loader = start(seed=9, physical=3)
        if abandons:
            for x, y in loader:
                if not passes:
                    break
                F.cross_entropy(model(x), y).backward()
                assert all(p.grad is None for p in model.parameters())
                break
        run(engine, model, opt, loader)
        found.append((weights(model), engine.releases))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_closure_is_called_by_the_optimizer_and_makes_the_release():
    found = []
    for closed in (True, False):
        engine, model, opt, loader = start(seed=2)
        for x, y in loader:

            def closure(model=model, opt=opt, x=x, y=y):
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            if closed:
                opt.step(closure)
            else:
                closure()
                opt.step()
        assert len(engine.releases) == 12
        found.append(weights(model))
    assert torch.equal(*found)


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
    assert engine.non_finite_examples == 10
    assert torch.isfinite(weights(model)).all()


def test_a_batch_clipped_to_other_bounds_than_would_be_recorded_is_refused():
    engine, model, _, loader = start()
    x, y = next(iter(loader))
    engine._clipper.weighing.bounds = (9.0, 9.0)
    with pytest.raises(PrivacyViolation, match="clipped to other bounds"):
        F.cross_entropy(model(x), y).backward()
    assert not engine.releases
    assert all(p.grad is None for p in model.parameters())
    F.cross_entropy(model(x), y).backward()  # as the message says
    assert engine.releases[0].clip == (1.0, 1.0)


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
        ({"views": 0}, ConfigError, "views is 0.*rows that each example has.*at least 1"),
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
    engine, model, _, loader = start(model=model)
    x, _ = next(iter(loader))
    model[0].requires_grad_(True)
    with pytest.raises(PrivacyViolation, match=r"'0\.weight' was made trainable.*after make_private"):
        model(x)
    assert not engine.releases


def test_optimizers_that_cannot_be_private_and_models_that_are_already_are_refused():
    model = network()
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=2, delta=1e-3)
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ConfigError, match="LBFGS"):
        engine.make_private(module=model, optimizer=lbfgs, data_loader=dataset(), batch_size=5)
    _, model, _, _ = start(model=model)
    with pytest.raises(ConfigError, match="private already"):
        start(model=model)


def test_an_optimizer_of_some_parameters_moves_those_and_the_others_have_their_releases():
    model = network()
    engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=2, delta=1e-3)
    partly = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model, opt, loader = engine.make_private(module=model, optimizer=partly, data_loader=dataset(), batch_size=5)
    before = [p.detach().clone() for p in model.parameters()]
    run(engine, model, opt, loader)
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == [True, True, False, False]
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1),
        lambda m: m[0].weight.grad.mul_(2.0),
        lambda m: setattr(m[0].weight, "grad", torch.ones_like(m[0].weight)),
    ],
)
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_what_is_done_with_gradients_after_backward_is_post_processing(change, clipping):
    """The optimizer finds what the user made of them; ledger and statement are the same."""
    engine, model, opt, loader = start(clipping=clipping)
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        change(model)
        expected = [p.detach() - 0.1 * p.grad for p in model.parameters()]
        opt.step()
        for p, e in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.detach(), e)
    plain, *rest = start(clipping=clipping)
    run(plain, *rest)
    assert engine.epsilon == plain.epsilon < math.inf


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
