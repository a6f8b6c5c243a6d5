"""What is released is what is recorded: clip bounds, sensitivities, and the noise itself."""

from __future__ import annotations

import dataclasses
import math
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F

from gradveil.clipping import Clipper, clipped_sums, make_groups
from gradveil.engine.step import PrivateStep
from gradveil.mechanism import strategies
from gradveil.mechanism.adaptive import replay
from gradveil.mechanism.clip_bounds import AdaClip, QuantileClip
from gradveil.mechanism.noise.streams import NoiseSource, SecretKey
from gradveil.mechanism.records import Release
from gradveil.mechanism.schedules import DECAYS
from loops import dataset, in_double, network, run, start

PRIVATE = [n for n in strategies.names() if n != "non-private"]
ALPHA = 1e-6  # a right scale fails once in a million tests; a wrong one must always


def decays(strategy: str) -> bool:
    found = strategies.get(strategy)
    return "decay" in (found.bounds, found.noise)


class Seen(NamedTuple):
    """What a step was clipped to, and what came of it, before any noise."""

    bounds: tuple[float, ...]
    largest: list[float]  # norm after clipping, of each group
    within: list[int]  # examples within the bound, of each group
    sums: dict[str, torch.Tensor]
    whitening: dict[str, tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def before_noise():
    """The steps that are released in here, by number."""
    seen: dict[int, Seen] = {}
    plain = PrivateStep.release

    def release(self, sums, stats):
        seen[self.index] = Seen(
            bounds=self.clipper.weighing.bounds,
            largest=[stats.largest(g) for g in range(len(self.releaser.groups))],
            within=stats.counts_within(),
            sums={n: t.clone() for n, t in self.releaser.of_every_parameter(sums).items()},
            whitening={n: (m.clone(), b.clone()) for n, (m, b) in (self.releaser.rule.whitening or {}).items()},
        )
        return plain(self, sums, stats)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateStep, "release", release)
        yield seen


@given(
    st.sampled_from(PRIVATE),
    st.sampled_from(sorted(DECAYS)),
    st.sampled_from(["per-layer", "flat", {"a": ["0"], "b": ["3.weight"], "c": ["3.bias"]}]),
    st.sampled_from(["poisson", "without-replacement", "with-replacement", "shuffle"]),
    st.sampled_from(["example", "batch"]),
    st.floats(0.01, 10.0),
    st.integers(0, 10**6),
)
@settings(max_examples=120)
def test_no_example_exceeds_the_bound_the_noise_was_scaled_to(strategy, decay, clipping, sampling, reading, clip, seed):
    """Over all strategies x schedules x groupings x samplers: the record holds what was used."""
    found = strategies.get(strategy)
    extra = {"decay": decay} if decays(strategy) else {}
    if found.sensitivity == "l2max":
        extra["reading"] = reading
    if found.rule is not None:
        sampling = "poisson"  # what its filter is proved for
    engine, model, opt, loader = start(
        strategy=strategy,
        clip=clip,
        clipping=clipping,
        sampling=sampling,
        allow_unproved=True,
        steps=4,
        seed=seed,
        physical=3,
        **extra,
    )
    groups, planned = engine.groups, [engine.plan.sigma(t) for t in range(4)]
    with before_noise() as seen:
        run(engine, model, opt, loader)
    assert len(engine.releases) == 4
    if found.rule is not None:
        assert replay(found.rule, engine.header, engine.releases) == 4
    for release in engine.releases:
        step = seen[release.step]
        assert release.clip == step.bounds
        for largest, bound in zip(step.largest, release.clip, strict=True):
            assert largest <= bound
        assert release.sigma == planned[release.step] or found.rule is not None
        batch = release.expected_batch_size
        if found.sensitivity == "clip":
            assert release.sensitivity == release.clip
            assert release.scale_is_public
        elif reading == "example":
            assert set(release.sensitivity) == {max(step.largest)}
            assert not release.scale_is_public
        else:
            norms = [
                math.sqrt(sum(float(step.sums[n].double().square().sum()) for n in g.parameters)) / batch
                for g in groups
            ]
            assert release.sensitivity == pytest.approx([max(norms)] * len(groups))
            assert not release.scale_is_public
        assert release.noise_std == tuple(release.sigma * s for s in release.sensitivity)
        assert release.sampler == sampling
        assert release.sample_rate == 10 / 60
        assert len(release.noise_std) == len(groups) == len(engine.header.groups)
        assert Release.from_dict(release.to_dict()) == release
    if found.bounds == "decay":
        assert [r.clip[0] for r in engine.releases] == [engine.plan.clip(t) for t in range(4)]


class Wide(nn.Module):
    """Two groups with enough coordinates for a test of their noise."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(25, 120)
        self.head = nn.Linear(120, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.flatten(1))))


def scale_p_value(noise: np.ndarray, std: float) -> float:
    """Two-sided test that independent normal values have this standard deviation and mean zero."""
    standard = noise / std
    scale = stats.chi2.cdf((standard**2).sum(), len(standard))
    place = stats.norm.cdf(standard.sum() / math.sqrt(len(standard)))
    shape = stats.kstest(standard, "norm").pvalue
    return min(2 * min(scale, 1 - scale), 2 * min(place, 1 - place), shape)


@pytest.mark.parametrize("physical", [None, 2])
@pytest.mark.parametrize("strategy", PRIVATE)
def test_the_recorded_noise_std_is_accepted_and_two_thirds_and_three_halves_of_it_rejected(strategy, physical):
    """Per group; also with physical parts: the noise is added once, not once per part."""
    extra = {"reading": "batch"} if strategies.get(strategy).sensitivity == "l2max" else {}
    engine, model, opt, loader = start(
        strategy=strategy, model=Wide().double(), clip=0.7, sigma=3.0, steps=3, physical=physical, **extra
    )
    in_double(loader)
    named = dict(model.named_parameters())
    with before_noise() as seen:
        for x, y in loader:
            opt.zero_grad()
            taken = len(engine.releases)
            F.cross_entropy(model(x), y).backward()
            if len(engine.releases) == taken:
                continue
            release = engine.releases[-1]
            sums, whitening = seen[release.step].sums, seen[release.step].whitening
            for group, std in zip(engine.groups, release.noise_std, strict=True):
                drawn = []
                for n in group.parameters:
                    centre, scale = whitening.get(n, (0.0, 1.0))
                    drawn.append(((named[n].grad - centre) * 10.0 - sums[n]) / scale)
                values = torch.cat([d.flatten() for d in drawn]).numpy()
                assert scale_p_value(values, std) > ALPHA
                assert scale_p_value(values, std * 2 / 3) < ALPHA
                assert scale_p_value(values, std * 3 / 2) < ALPHA
            opt.step()
    assert len(engine.releases) == 3


def test_noise_is_independent_over_steps_parameters_and_keys():
    def draw(key, step, size=4000):
        source = NoiseSource(key, step)
        return [source.normal_like(torch.empty(size, dtype=torch.float64)) for _ in range(2)]

    key = SecretKey(1)
    columns = [*draw(key, 0), *draw(key, 1), *draw(SecretKey(2), 0), *draw(SecretKey(), 0)]
    correlation = torch.corrcoef(torch.stack(columns)) - torch.eye(8)
    assert float(correlation.abs().max()) < 5 / math.sqrt(4000)
    again = draw(SecretKey(1), 0)
    assert torch.equal(again[0], columns[0])
    side = [NoiseSource(key, s).noised([0.0], 1.0, sensitivity=1.0)[0] for s in range(2000)]
    assert stats.kstest(side, "norm").pvalue > 1e-4
    half = NoiseSource(key, 0).normal_like(torch.empty(10, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16


def test_the_key_is_not_printed_and_not_pickled():
    import pickle

    with pytest.raises(TypeError, match="not written"):
        pickle.dumps(SecretKey(12345))
    assert "12345" not in repr(SecretKey(12345))


@pytest.mark.parametrize("clipping", ["per-layer", "flat"])
def test_adding_an_example_changes_the_sums_by_at_most_the_bound(clipping):
    """The sums that the clipper gives, with an example and without it."""
    x, y = dataset().tensors[0].double(), dataset().tensors[1]
    model = network().double()
    groups = make_groups(model, clipping)
    clipper = Clipper(model, groups, bounds=[0.2] * len(groups), loss_reduction="mean")
    clipper.on_end = lambda: None

    def sums(n):
        clipper.start_step()
        F.cross_entropy(model(x[:n]), y[:n]).backward()
        return clipper.take_sums()

    for i in range(10):
        without, with_it = sums(i), sums(i + 1)
        for group in groups:
            moved = [with_it[n] - without.get(n, 0) for n in group.parameters]
            assert 0 < math.sqrt(sum(float(d.square().sum()) for d in moved)) <= 0.2 * (1 + 1e-9)


# ---- quantile clipping (Andrew et al.)


def test_quantile_clip_follows_the_quantile_and_charges_its_counts():
    engine, model, opt, loader = start(
        strategy="quantile-clip", clip=5.0, sigma=1.0, steps=60, batch_size=60, lr=0.0, options={"count_noise": 1.0}
    )
    run(engine, model, opt, loader)
    x, y = dataset().tensors
    norms = clipped_sums(model, F.cross_entropy, x, y, groups=engine.groups, bounds=[1.0, 1.0]).norms
    medians = norms.median(0).values.tolist()
    final = np.mean([r.clip for r in engine.releases[-20:]], axis=0)
    assert final == pytest.approx(medians, rel=0.15)  # the model does not move (lr 0), the bounds find its medians
    for before, after in zip(engine.releases, engine.releases[1:], strict=False):
        (side,) = before.side
        assert side.sensitivity == pytest.approx(math.sqrt(2) / 2)
        assert side.noise_std == 1.0
        for g in range(2):
            share = side.values[g] / 60 + 0.5
            assert after.clip[g] == pytest.approx(before.clip[g] * math.exp(-0.2 * (share - 0.5)))
    z = (2 / 1.0**2 + 2 / (2 * 1.0) ** 2) ** -0.5
    assert engine.releases[0].multiplier == pytest.approx(z)


def test_quantile_counts_are_noised_at_the_recorded_std():
    noise = []
    for seed in range(400):
        engine, model, opt, loader = start(
            strategy="quantile-clip", steps=1, sampling="without-replacement", seed=seed, options={"count_noise": 4.0}
        )
        with before_noise() as seen:
            run(engine, model, opt, loader)
        noise.append(engine.releases[0].side[0].values[0] - (seen[0].within[0] - 5.0))
        engine.detach()
    noise = np.array(noise)
    assert scale_p_value(noise, 4.0) > ALPHA
    assert scale_p_value(noise, 4.0 * 2 / 3) < ALPHA
    assert scale_p_value(noise, 4.0 * 3 / 2) < ALPHA


def test_quantile_default_count_noise():
    plan = strategies.parameters("quantile-clip", steps=5, clip=1.0, sigma=6.0)
    groups = [dataclasses.make_dataclass("G", ["name"])("a")]
    assert QuantileClip(plan, groups, batch_size=600.0).count_noise == 30.0
    assert QuantileClip(plan, groups, batch_size=6000.0).count_noise == 300.0
    assert QuantileClip(plan, groups, batch_size=20.0).count_noise == 30.0


# ---- adaclip (Pichapati et al.)


def test_adaclip_is_its_algorithm_one_example_at_a_time():
    model = network().double()
    engine, model, opt, loader = start(strategy="adaclip", model=model, steps=6, seed=4, sigma=0.5)
    in_double(loader)
    rule = engine.rule
    assert isinstance(rule, AdaClip)
    for x, y in loader:
        before = {n: (rule.mean[n].clone(), rule.spread[n].clone()) for n in rule.mean}
        sums = {n: torch.zeros_like(m) for n, (m, _) in before.items()}
        scale = {}
        for group in engine.groups:
            total = sum(before[n][1].sum() for n in group.parameters)
            for n in group.parameters:
                scale[n] = before[n][1].sqrt() * total.sqrt()
        for i in range(len(x)):
            huge = [1e12] * len(engine.groups)
            grads = clipped_sums(
                model, F.cross_entropy, x[i : i + 1], y[i : i + 1], groups=engine.groups, bounds=huge
            ).sums
            for group in engine.groups:
                w = {n: (grads[n] - before[n][0]) / scale[n] for n in group.parameters}
                norm = math.sqrt(sum(float(v.square().sum()) for v in w.values()))
                for n, v in w.items():
                    sums[n] += v / max(1.0, norm)
        opt.zero_grad()
        with before_noise() as seen:
            F.cross_entropy(model(x), y).backward()
        for n, total in seen[engine.step - 1].sums.items():
            assert torch.allclose(total, scale[n] * sums[n], atol=1e-10)
        opt.step()
        for n, p in model.named_parameters():
            m, s = before[n]
            noised = p.grad
            v = ((noised - m) ** 2 - (scale[n] * 0.5 / 10.0) ** 2).clamp(1e-12, 10.0)
            assert torch.allclose(rule.mean[n], 0.99 * m + 0.01 * noised)
            assert torch.allclose(rule.spread[n] ** 2, 0.9 * s**2 + 0.1 * v)
    assert all(r.clip == (1.0, 1.0) and r.noise_std == (0.5, 0.5) for r in engine.releases)


def test_adaclip_scales_are_normalised_per_group():
    engine, *_ = start(strategy="adaclip")
    for group in engine.groups:
        ratio = sum(
            float((engine.rule.spread[n] ** 2 / engine.rule.whitening[n][1] ** 2).sum()) for n in group.parameters
        )
        assert ratio == pytest.approx(1.0, rel=1e-4)  # the expected squared norm of a whitened gradient is 1
