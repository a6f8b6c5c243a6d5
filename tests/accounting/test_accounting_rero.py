"""The reconstruction bound: reference values, the exact Gaussian case, and where there is none."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from accounting_records import make_header, make_release, make_run

from gradveil.accounting import (
    Setting,
    one_step_bound,
    planned_epsilon,
    planned_reconstruction_bound,
    reconstruction_bound,
    reconstruction_json,
)
from gradveil.errors import ConfigError

MNIST = Setting(sample_rate=0.01)


@pytest.mark.parametrize(("kappa", "gamma"), [(0.1, 0.1327), (0.01, 0.0155)])
def test_reference_values_of_a_whole_run(kappa: float, gamma: float) -> None:
    got = planned_reconstruction_bound([6.0] * 10_000, MNIST, kappa=kappa)
    assert got.whole_run == pytest.approx(gamma, abs=6e-5)
    assert got == reconstruction_bound(*make_run(), kappa=kappa)
    assert got.reason is None


def test_reference_value_of_one_step() -> None:
    assert one_step_bound(1.0, 0.1) == pytest.approx(0.389, abs=5e-4)


@pytest.mark.parametrize("kappa", [1e-4, 0.1, 0.5, 0.99])
def test_full_batches_are_the_gaussian_in_closed_form(kappa: float) -> None:
    """T releases of multiplier z are one of z / sqrt(T); negative epsilons matter where kappa is large."""
    got = planned_reconstruction_bound([3.0] * 16, Setting(sample_rate=1.0), kappa=kappa)
    assert got.whole_run == pytest.approx(one_step_bound(3.0 / 4, kappa), rel=1e-4)
    assert got.whole_run >= one_step_bound(3.0 / 4, kappa)
    assert got.one_step == one_step_bound(3.0, kappa)


def test_no_better_attack_on_one_sampled_step_exists() -> None:
    """The likelihood-ratio test between the two distributions of one step is the best attack; it meets the bound."""
    q, z, kappa = 0.3, 0.8, 0.05
    x = np.linspace(-15, 20, 400_001)
    width = x[1] - x[0]
    without = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    present = (1 - q) * without + q * np.exp(-((x - 1 / z) ** 2) / 2) / math.sqrt(2 * math.pi)
    # The ratio grows with x: the test is a threshold.
    above = np.cumsum(without[::-1])[::-1] * width
    start = int(np.argmax(above <= kappa))
    best = float(present[start:].sum() * width)
    got = planned_reconstruction_bound([z], Setting(sample_rate=q), kappa=kappa).whole_run
    assert best <= got <= best * 1.001


def test_gamma_grows_with_kappa_and_steps_and_falls_with_noise() -> None:
    def gamma(kappa: float = 0.1, steps: int = 1_000, sigma: float = 3.0, layers: int = 1) -> float:
        setting = Setting(sample_rate=0.01, layers=layers)
        return planned_reconstruction_bound([sigma] * steps, setting, kappa=kappa).whole_run or math.nan

    assert 0.1 < gamma() < gamma(steps=2_000) < gamma(sigma=2.0)
    assert gamma(kappa=0.01) < gamma()
    assert gamma(layers=4, sigma=6.0) == pytest.approx(gamma(), rel=1e-9)
    epsilon = planned_epsilon([3.0] * 1_000, MNIST).epsilon
    assert gamma() <= math.exp(epsilon) * 0.1 + 1e-5


def test_fixed_size_batches_have_the_bound_under_replace_one() -> None:
    poisson = planned_reconstruction_bound([6.0] * 500, MNIST, kappa=0.1)
    for sampling in ("without-replacement", "with-replacement"):
        got = planned_reconstruction_bound([6.0] * 500, Setting(sample_rate=0.01, sampling=sampling), kappa=0.1)
        assert poisson.whole_run < got.whole_run < 0.2
        assert (got.one_step > poisson.one_step) == (sampling == "with-replacement")


def test_the_least_noised_step_counts() -> None:
    header, releases = make_run(sigmas=[6.0, 2.0, 5.0], groups=("a", "b", "c", "d"))
    assert reconstruction_bound(header, releases, kappa=0.1).one_step == pytest.approx(one_step_bound(1.0, 0.1))


def test_no_releases_tell_nothing() -> None:
    got = reconstruction_bound(make_header(), [], kappa=0.1)
    assert (got.one_step, got.whole_run) == (0.1, 0.1)


def test_no_bound_for_l2max_with_the_reason() -> None:
    header, _ = make_run(taken=2, strategy="dyn-s-l2max", guarantee="paper-only")
    releases = [make_release(header, t, scale_is_public=False, sensitivity_rule="l2max-batch") for t in range(2)]
    got = reconstruction_bound(header, releases, kappa=0.1)
    assert (got.one_step, got.whole_run) == (None, None)
    assert "depends on the data" in got.reason
    data = json.loads(json.dumps(reconstruction_json([got]), allow_nan=False))
    assert data["one_step"] == data["whole_run"] == {"0.1": None}
    assert "depends on the data" in data["reason"]


def test_shuffling_bounds_one_step_only_and_an_unknown_sampler_none() -> None:
    got = planned_reconstruction_bound([1.0] * 3, Setting(sample_rate=0.01, sampling="shuffle"), kappa=0.1)
    assert got.one_step == pytest.approx(0.389, abs=5e-4)
    assert got.whole_run is None and "shuffled" in got.reason
    header, releases = make_run(taken=2)
    releases[1] = make_release(header, 1, sampler="unknown")
    got = reconstruction_bound(header, releases, kappa=0.1)
    assert (got.one_step, got.whole_run) == (None, None)


def test_next_to_no_noise_bounds_nothing() -> None:
    for rate in (0.5, 1.0):
        got = planned_reconstruction_bound([0.01] * 3, Setting(sample_rate=rate), kappa=0.1)
        assert 0.7 < got.whole_run <= 1.0
        assert got.one_step == pytest.approx(1.0)


@pytest.mark.parametrize("kappa", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_kappa_that_is_no_chance_is_refused(kappa: float) -> None:
    with pytest.raises(ConfigError, match="kappa"):
        planned_reconstruction_bound([6.0], MNIST, kappa=kappa)
    with pytest.raises(ConfigError, match="kappa"):
        reconstruction_bound(*make_run(taken=1), kappa=kappa)
