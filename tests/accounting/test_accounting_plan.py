"""The sigma of a whole run: under every proved strategy it spends the target, and no more."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest

from gradveil.accounting import calibrate_plan, default_view, proved_epsilon
from gradveil.accounting import plan as plans
from gradveil.errors import ConfigError
from gradveil.mechanism import strategies
from gradveil.mechanism.records import (
    AuxiliaryRelease,
    Release,
    RunHeader,
    inverse_square,
    noise_multiplier,
    planned_multiplier,
    why_unproved,
)
from gradveil.mechanism.strategies import PrivacyPlan, parameters
from made_records import release_at

PROVED = [name for name in strategies.names() if strategies.get(name).guarantee == "proved"]
GROUPS, POPULATION, BATCH, STEPS, DELTA = 3, 2_000, 50, 40, 1e-5


def count_noise(plan: PrivacyPlan) -> float:
    """As bounds.QuantileClip chooses it: it grows with sigma."""
    return max(BATCH / 20.0, 5.0 * plan.sigma.start)


def side_of(plan: PrivacyPlan) -> float:
    return GROUPS / (2.0 * count_noise(plan)) ** 2


def counts(plan: PrivacyPlan) -> tuple[AuxiliaryRelease, ...]:
    if not plan.strategy.bounds.startswith("private"):
        return ()
    noise = count_noise(plan)
    return (AuxiliaryRelease(name="counts", values=(0.0,) * 3, sensitivity=math.sqrt(GROUPS) / 2, noise_std=noise),)


def released(plan: PrivacyPlan, sampling: str) -> tuple[RunHeader, list[Release]]:
    """What an engine with this plan records."""
    header = RunHeader(
        strategy=plan.strategy.name,
        guarantee=plan.strategy.guarantee,
        groups=("a", "b", "c"),
        population=POPULATION,
        sampling=sampling,
        sample_rate=BATCH / POPULATION,
        expected_batch_size=float(BATCH),
        steps=plan.steps,
        delta=DELTA,
        seeded=False,
        plan=plan.to_plan(),
    )
    releases = []
    for t in range(plan.steps):
        clip, sigma = plan.clip(t), plan.sigma(t)
        fixed: dict[str, Any] = {}
        if plan.fixed_variance:
            sigma = plan.varsigma / clip
            fixed = {"noise_std": (plan.varsigma,) * GROUPS}
        releases.append(release_at(header, t, sigma=sigma, clip=clip, side=counts(plan), **fixed))
    return header, releases


def calibrated(epsilon: float, *, sampling: str = "poisson", least: float = 0.0, **settings: Any) -> PrivacyPlan:
    def plan_of(sigma: float) -> PrivacyPlan:
        return parameters(**{"strategy": "baseline", "steps": STEPS, "clip": 2.0} | settings, sigma=sigma)

    sigma = calibrate_plan(
        epsilon,
        plan_of=plan_of,
        groups=GROUPS,
        sampling=sampling,
        population=POPULATION,
        batch_size=BATCH,
        delta=DELTA,
        side_of=side_of if counts(plan_of(max(1.0, least))) else None,
        least=least,
    )
    return plan_of(sigma)


@pytest.mark.parametrize(
    "settings",
    [
        *({"strategy": name} for name in PROVED),
        {"strategy": "dyn-s-decay", "fixed_variance": True},
        {"sampling": "without-replacement"},
        {"sampling": "with-replacement"},
    ],
    ids=lambda s: " ".join(map(str, s.values())),
)
@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_the_whole_run_spends_the_target_and_no_more(epsilon: float, settings: dict[str, Any]) -> None:
    sampling = settings.get("sampling", "poisson")
    header, releases = released(calibrated(epsilon, **settings), sampling)
    neighbours, accountant = default_view(sampling)
    spent = proved_epsilon(header, releases, neighbours=neighbours, accountant=accountant).epsilon
    assert epsilon * (1 - 0.001) <= spent <= epsilon


def test_a_decay_to_a_given_end_starts_where_the_target_is_met() -> None:
    plan = calibrated(1.5, strategy="dyn-sigma", sigma_decay="linear", sigma_end=1.5, least=1.5)
    assert plan.sigma(0) > plan.sigma(STEPS - 1) == pytest.approx(1.5)
    assert 1.5 * (1 - 0.001) <= proved_epsilon(*released(plan, "poisson")).epsilon <= 1.5


@pytest.mark.parametrize("epsilon", [0.01, 50.0, 1_000.0])
def test_extreme_targets_are_met(epsilon: float) -> None:
    header, releases = released(calibrated(epsilon), "poisson")
    assert epsilon * (1 - 0.001) <= proved_epsilon(header, releases).epsilon <= epsilon


def test_few_evaluations_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = plans.composed_epsilon
    monkeypatch.setattr(plans, "composed_epsilon", lambda charges, **k: asked.append(1) or real(charges, **k))
    calibrated(2.0, strategy="dyn-sigma")
    assert len(asked) <= 8


def test_what_has_no_epsilon_cannot_be_aimed_at() -> None:
    with pytest.raises(ConfigError, match="'dyn-s-l2max' scales its noise to the data"):
        calibrated(1.0, strategy="dyn-s-l2max")
    with pytest.raises(ConfigError, match="'non-private' is not private"):
        calibrated(1.0, strategy="non-private")
    with pytest.raises(ConfigError, match="shuffled batches"):
        calibrated(1.0, sampling="shuffle")
    with pytest.raises(ConfigError, match="epsilon 0"):
        calibrated(0.0)


def test_a_target_that_no_sigma_meets_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be spent: at sigma = 20"):
        calibrated(5.0, strategy="dyn-sigma", sigma_end=20.0, least=20.0)
    with pytest.raises(ConfigError, match="out of reach"):
        calibrate_plan(
            0.1,
            plan_of=lambda sigma: parameters("quantile-clip", steps=STEPS, clip=1.0, sigma=sigma),
            groups=GROUPS,
            sampling="poisson",
            population=POPULATION,
            batch_size=BATCH,
            delta=DELTA,
            side_of=lambda plan: 4.0,
        )


def test_a_setting_without_effect_is_not_warned_of_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrated(1.0, decay=None)
        sigma = calibrate_plan(
            1.0,
            plan_of=lambda sigma: parameters("baseline", steps=4, clip=1.0, sigma=sigma, decay="linear"),
            groups=1,
            sampling="poisson",
            population=POPULATION,
            batch_size=BATCH,
            delta=DELTA,
        )
    assert sigma > 0


# --- the formulas -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [*PROVED, "dyn-s-decay fixed"])
def test_the_planned_multiplier_is_the_one_released(strategy: str) -> None:
    name, _, fixed = strategy.partition(" ")
    plan = parameters(name, steps=STEPS, clip=2.0, sigma=3.0, fixed_variance=bool(fixed))
    side = side_of(plan) if counts(plan) else 0.0
    for release in released(plan, "poisson")[1]:
        planned = planned_multiplier(
            groups=GROUPS,
            sigma=plan.sigma(release.step),
            clip=plan.clip(release.step),
            varsigma=plan.varsigma if fixed else None,
            side_inverse_square=side,
        )
        assert planned == pytest.approx(release.multiplier, rel=1e-14)
        assert release.side_inverse_square == pytest.approx(side, rel=1e-14)


def test_parts_add_up_in_inverse_squares() -> None:
    parts = [(1.0, 3.0), (2.0, 5.0), (0.5, 4.0)]
    exact = sum((s / std) ** 2 for s, std in parts)
    assert inverse_square(parts) == pytest.approx(exact, rel=1e-14)
    assert noise_multiplier(parts) == pytest.approx(exact**-0.5, rel=1e-14)
    beside = inverse_square(parts[1:])
    assert noise_multiplier(parts[:1], side_inverse_square=beside) == pytest.approx(exact**-0.5, rel=1e-14)
    assert noise_multiplier([*parts, (0.0, 0.0)]) == noise_multiplier(parts)
    assert (noise_multiplier([]), inverse_square([])) == (math.inf, 0.0)


@pytest.mark.parametrize(
    "bad", [(1.0, 0.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (math.inf, 1.0), ("1", 1.0)]
)
def test_a_part_that_is_not_noised_is_no_protection(bad: Any) -> None:
    assert noise_multiplier([(1.0, 3.0), bad]) == 0.0
    assert inverse_square([bad]) == math.inf
    for side in (math.nan, math.inf, -1.0):
        assert noise_multiplier([(1.0, 3.0)], side_inverse_square=side) == 0.0


def test_why_nothing_is_proved() -> None:
    for sampling in ("poisson", "without-replacement", "with-replacement", None):
        assert why_unproved("proved", fixed_variance=False, sampling=sampling) is None
        assert why_unproved("paper-only", fixed_variance=True, sampling=sampling) is None
        assert "scales its noise" in (why_unproved("paper-only", fixed_variance=False, sampling=sampling) or "")
        assert "adds no noise" in (why_unproved("none", fixed_variance=False, sampling=sampling) or "")
    assert "shuffled batches" in (why_unproved("proved", fixed_variance=False, sampling="shuffle") or "")
    assert "own sampler" in (why_unproved("proved", fixed_variance=True, sampling="unknown") or "")
