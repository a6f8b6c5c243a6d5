"""The step-bit audit: it knows what is released, is never above what is proved, and far above what is published."""

from __future__ import annotations

import math

import numpy as np
import pytest
from audited import layers, setting
from scipy import stats

from gradveil import audit
from gradveil.audit.canary import play
from gradveil.audit.steps import judge_steps
from gradveil.errors import ConfigError
from gradveil.mechanism import strategies

PROVED = [name for name in strategies.names() if strategies.get(name).guarantee == "proved"]
L2MAX = [name for name in strategies.names() if strategies.get(name).sensitivity == "l2max"]
STEPS = 150


@pytest.mark.parametrize("strategy", PROVED)
def test_the_auditor_knows_what_every_proved_strategy_releases_but_for_coin_and_noise(strategy):
    """Without the canary what is left is standard normal; with it, it is that and all that the clip bounds allow."""
    made = setting(strategy=strategy)
    coins = np.random.default_rng(0).random(STEPS) < 0.5
    played = play(made, coins, seed=1)
    noise = played.matched_filter - coins * played.strength
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    assert stats.kstest(played.noise_scale, "norm").pvalue > 1e-3
    most = played.strength * [release.multiplier for release in played.releases]
    assert 0.97 < most.max() <= 1 + 1e-5  # normalised gradients are a little shorter than their bound
    found = judge_steps(played, coins, made, confidence=0.95)
    assert found.verdict() == "consistent with what is proved"
    assert found.proved == pytest.approx(audit.gaussian_epsilon(1 / min(r.multiplier for r in played.releases), 1e-5))


@pytest.mark.parametrize("reading", strategies.READINGS)
@pytest.mark.parametrize("strategy", L2MAX)
def test_l2max_leaks_more_than_is_published_in_either_reading(strategy, reading):
    found = audit.audit_steps(setting(strategy=strategy, reading=reading, sigma=6.0, sigma_end=None), steps=STEPS)
    assert found.proved == math.inf
    assert "depends on the data" in found.reason
    assert found.strongest.epsilon > 2 * audit.gaussian_epsilon(1 / 6, 1e-5)
    assert {bound.method for bound in found.bounds} == {"one-run"}  # nothing that takes the noise to be Gaussian
    assert found.to_dict()["epsilon_proved"] == "inf"


def test_fixed_variance_does_not_follow_the_data_and_is_proved():
    found = audit.audit_steps(setting(strategy="dyn-s-l2max", reading="batch", fixed_variance=True), steps=STEPS)
    assert math.isfinite(found.proved)
    assert found.verdict() == "consistent with what is proved"


@pytest.mark.parametrize(
    "made",
    [
        {"clipping": "flat"},
        {"physical": 3},
        {"physical": 1, "examples": 3},  # the canary is a part by itself, of nothing where the coin says so
        {"calm": None},
        {"model": layers(64, 10)},
        {"clip": 0.01, "sigma": 30.0},
        {"strategy": "quantile-clip", "options": {"count_noise": 0.5}},  # most of the leak is beside the gradient
    ],
    ids=str,
)
def test_what_is_left_is_noise_in_every_setting(made):
    made = setting(**made)
    coins = np.random.default_rng(1).random(STEPS) < 0.5
    played = play(made, coins, seed=2)
    assert stats.kstest(played.matched_filter - coins * played.strength, "norm").pvalue > 1e-3
    most = played.strength * [release.multiplier for release in played.releases]
    assert most.max() == pytest.approx(1.0, abs=1e-3)


def test_an_audit_repeats_itself_and_another_seed_is_another():
    made = setting(model=layers(64, 10))
    first, again, other = (audit.audit_steps(made, steps=60, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.bounds != other.bounds


def test_all_bounds_share_one_confidence():
    found = audit.audit_steps(setting(model=layers(64, 10)), steps=60)
    rows = {(bound.statistic, bound.method): bound for bound in found.bounds}
    assert len(rows) == 4
    assert rows["matched filter", "Gaussian family"].tests == 4
    assert rows["noise scale", "one-run"].tests == 4
    assert rows["matched filter", "one-run f-DP"].tests == 12  # three numbers of guesses
    assert found.tests == 3 + 3
    assert "neither coin nor noise" in found.strongest.threat_model


def test_progress_is_told_step_by_step():
    seen = []
    audit.audit_steps(setting(model=layers(64, 10)), steps=20, progress=seen.append)
    assert seen == list(range(1, 21))


def test_the_model_that_is_audited_stays_as_it_was():
    made = setting(model=layers(64, 10))
    before = [p.clone() for p in made.model.parameters()]
    audit.audit_steps(made, steps=20)
    assert all(p.equal(q) for p, q in zip(before, made.model.parameters(), strict=True))
    assert made.model.training


@pytest.mark.parametrize(
    ("made", "steps", "why"),
    [
        ({"strategy": "non-private"}, 50, "adds no noise"),
        ({"sample_rate": 0.5}, 50, "the coin's doing alone"),
        ({}, 5, "too few"),
    ],
)
def test_what_cannot_be_audited_is_refused(made, steps, why):
    with pytest.raises(ConfigError, match=why):
        audit.audit_steps(setting(**made), steps=steps)


@pytest.mark.parametrize(
    ("made", "why"),
    [({"examples": 1}, "at least one"), ({"calm": 2.0}, "calm"), ({"sample_rate": 0.0}, "sample rate")],
)
def test_settings_that_cannot_be_played_are_refused(made, why):
    with pytest.raises(ConfigError, match=why):
        setting(**made)
