"""Bounds that are estimated, and gradients that are normalised: what each example counts for, and what is charged."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gradveil.accounting import proved_epsilon
from gradveil.clipping import Clipper, clipped_sums, make_groups
from gradveil.engine.step import PrivateStep
from gradveil.errors import ConfigError
from gradveil.mechanism import strategies
from gradveil.mechanism.clip_bounds import AutoClip, SearchedClip
from gradveil.mechanism.records import AuxiliaryRelease
from loops import dataset, network, run, start

QUIET = {"count_noise": 1.0}  # enough for a test to see what the counts say


def estimate(*, clip=4.0, steps=200, batch_size=600.0, groups=2, **options):
    plan = strategies.parameters("dyn-private", steps=steps, clip=clip, sigma=6.0)
    return SearchedClip(plan, [None] * groups, batch_size=batch_size, **options)


def follow(rule, norms, steps):
    """The rule on batches of these norms, counted without noise."""
    for step in range(steps):
        within = [
            float((norms[g] <= bound).mean() - 0.5) * rule.batch_size for g, bound in enumerate(rule.bounds(step))
        ]
        rule.learn(
            (AuxiliaryRelease(name="counts", values=tuple(within), sensitivity=1.0, noise_std=1.0),), {}, 6.0, 600.0
        )
    return rule


@pytest.mark.parametrize("start_at", [0.01, 1.0, 4.0, 32.0, 500.0])
def test_where_an_estimate_starts_is_forgotten(start_at):
    norms = np.random.default_rng(0).lognormal(mean=[[0.0], [1.0]], sigma=0.6, size=(2, 5000))
    rule = follow(estimate(clip=start_at, steps=10_000), norms, 100)
    evenly = math.sqrt((np.median(norms, axis=1) ** 2).mean())  # found, and split over the groups
    assert rule.ceiling == pytest.approx(evenly, rel=0.25)
    most = 0.995 * rule.ceiling  # it decays
    assert rule.bounds(100) == pytest.approx([min(most, high) for high in np.quantile(norms, 0.9, axis=1)], rel=0.05)
    wide = follow(estimate(clip=start_at, steps=10_000, headroom=100.0), norms, 400)
    assert wide.bounds(400) == pytest.approx(np.quantile(norms, 0.9, axis=1), rel=0.05)


@pytest.mark.parametrize("start_at", [1.0, 4.0, 32.0])
def test_a_search_comes_from_below_and_takes_a_few_steps(start_at):
    rule = estimate(clip=start_at, steps=10_000, groups=1)
    norms = np.full((1, 100), 3.0)
    highest = max(follow(rule, norms, 1).bounds(step)[0] for step in range(1, 25))
    assert highest < 3.0 * math.exp(0.5)  # where it crosses, once
    assert rule.ceiling == pytest.approx(3.0, rel=0.4)


def test_a_bound_follows_the_norms_down_and_not_up():
    rule = follow(estimate(steps=101, groups=1), np.full((1, 100), 2.0), 40)
    found = rule.ceiling
    follow(rule, np.full((1, 100), 1000.0), 60)
    assert rule.bounds(100)[0] == pytest.approx(found / 2)  # the ceiling decays to half over the run
    follow(rule, np.full((1, 100), 1e-3), 1)  # it goes on from the bound that was used, not from far above it
    assert rule.bounds(101)[0] < found / 2


def test_counts_that_say_little_are_searched_for_longer_and_nearer():
    small, large = estimate(batch_size=22.0, steps=6000), estimate(batch_size=600.0, steps=6000)
    assert small.looks > 50 and large.looks == 1
    short = estimate(batch_size=22.0, steps=60)
    assert short.longest_search == 10 and 0.5 < short.bounds(0)[0] / 4.0 < 1.0 and large.bounds(0)[0] < 0.1


def test_a_bound_that_is_found_waits_for_the_others():
    """Norms grow while a network learns: a search that went on would end where it took longest, not where it began."""
    rule = estimate(clip=32.0, steps=10_000)
    low, high = np.full(100, 1.0), np.full(100, 30.0)
    follow(rule, [low, high], 3)
    found = rule.bounds(3)[0]
    assert rule.been_above == [True, False]
    follow(rule, [100.0 * low, high], 4)
    assert rule.bounds(7)[0] == found and rule.been_above == [True, False]
    follow(rule, [100.0 * low, high], 8)
    assert 20.0 < rule.ceiling * math.sqrt(2.0) < 45.0


def test_noise_of_one_count_hardly_moves_a_bound():
    small = estimate(batch_size=22.0, groups=1)  # counts of a batch of 22 are noised by 30
    before = small.bounds(0)[0]
    value = small.count_noise  # at the median, one standard deviation off
    small.learn((AuxiliaryRelease(name="counts", values=(value,), sensitivity=0.5, noise_std=30.0),), {}, 6.0, 22.0)
    assert small.bounds(1)[0] == pytest.approx(before * math.exp(-0.05))


def test_estimates_are_refused_where_they_make_no_sense():
    with pytest.raises(ConfigError, match="headroom is 0"):
        estimate(headroom=0)
    with pytest.raises(ConfigError, match=r"quantile is 1\.0"):
        estimate(quantile=1.0)


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
@pytest.mark.parametrize("strategy", ["dyn-private", "dyn-private-sigma"])
def test_clip_and_noise_follow_the_estimate_and_the_counts_are_charged(strategy, clipping):
    engine, model, opt, loader = start(
        strategy=strategy, clip=5.0, sigma=1.0, steps=60, batch_size=60, lr=0.0, clipping=clipping, options=QUIET
    )
    run(engine, model, opt, loader)
    groups = len(engine.groups)
    x, y = dataset().tensors
    norms = clipped_sums(model, F.cross_entropy, x, y, groups=engine.groups, bounds=[1.0] * groups).norms
    final = np.mean([r.clip for r in engine.releases[-20:]], axis=0)
    decayed = engine.plan.clip(50) / engine.plan.clip(0)
    evenly = float(norms.median(dim=0).values.square().mean().sqrt())
    expected = [min(decayed * evenly, high) for high in norms.quantile(0.9, dim=0).tolist()]
    assert final == pytest.approx(expected, rel=0.2)
    for release in engine.releases:
        assert release.scale_is_public
        assert release.noise_std == tuple(release.sigma * c for c in release.clip)
        joint = groups / release.sigma**2 + groups / (2 * 1.0) ** 2
        assert release.multiplier == pytest.approx(joint**-0.5)
    assert math.isfinite(proved_epsilon(engine.header, engine.releases).epsilon)


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("strategy", ["dyn-private", "quantile-clip"])
@pytest.mark.parametrize("lost", [False, True])
def test_the_bound_of_a_layer_that_nobody_uses_does_not_run_away(strategy, lost):
    class Idle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = network(), torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.used(x) * (math.nan if lost else 1.0)

    engine, model, opt, loader = start(
        model=Idle(), strategy=strategy, clip=5.0, sigma=1.0, steps=60, batch_size=60, options=QUIET
    )
    run(engine, model, opt, loader)
    assert max(c for release in engine.releases for c in release.clip) < 50.0
    assert all(float(p.detach().abs().max()) < 1e3 for p in model.parameters())


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_a_search_is_not_longer_than_the_run(steps):
    rule = estimate(steps=steps)
    assert rule.longest_search == steps and 4.0 * math.exp(-steps / 4) <= rule.bounds(0)[0] <= 4.0


def test_an_estimate_goes_on_from_a_checkpoint():
    rule = follow(estimate(), np.full((2, 100), 2.0), 17)
    other = estimate()
    other.load_state_dict(rule.state_dict())
    assert follow(other, np.full((2, 100), 3.0), 5).bounds(22) == follow(rule, np.full((2, 100), 3.0), 5).bounds(22)


# ---- normalised gradients


@pytest.mark.parametrize("gamma", [0.01, 3.0])
@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_normalised_sums_are_those_of_one_example_at_a_time(clipping, gamma):
    model = network().double()
    x, y = dataset().tensors
    x = x.double()
    groups = make_groups(model, clipping)
    expected = clipped_sums(model, F.cross_entropy, x, y, groups=groups, bounds=[1.0] * len(groups), gamma=gamma)
    clipper = Clipper(model, groups, bounds=(1.0,) * len(groups), loss_reduction="mean")
    clipper.weighing.gamma = gamma
    F.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected.sums[name], rtol=1e-9, atol=1e-12)
    for g in range(len(groups)):
        largest = float((expected.norms[:, g] / (expected.norms[:, g] + gamma)).max())
        assert clipper.clip_stats.largest(g) == pytest.approx(largest)
    clipper.detach()


def test_normalised_gradients_of_any_length_count_for_less_than_one(monkeypatch):
    engine, model, _, loader = start(strategy="normalised", steps=3, sigma=2.0)
    largest = []
    release = PrivateStep.release

    def look(self, sums, stats):
        largest.append([stats.largest(g) for g in range(len(engine.groups))])
        return release(self, sums, stats)

    monkeypatch.setattr(PrivateStep, "release", look)
    for (x, y), scale in zip(loader, (1e-6, 1.0, 1e6), strict=True):
        (scale * F.cross_entropy(model(x), y)).backward()
    assert all(0.0 < norm < 1.0 for norms in largest for norm in norms)
    assert len(largest) == 3


def test_normalised_has_no_clip_bound():
    engine, model, opt, loader = start(strategy="normalised", steps=3, sigma=2.0, clip=7.0)
    run(engine, model, opt, loader)
    assert {c for r in engine.releases for c in r.clip} == {1.0}
    assert {s for r in engine.releases for s in r.noise_std} == {2.0}
    assert engine.releases[0].multiplier == pytest.approx(2.0 / math.sqrt(2))


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.inf])
def test_gamma_is_positive(gamma):
    plan = strategies.parameters("normalised", steps=3, sigma=1.0)
    with pytest.raises(ConfigError, match="no direction"):
        AutoClip(plan, [None], gamma=gamma)
