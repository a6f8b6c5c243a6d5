"""epsilon by step: ends at the run's epsilon, never falls, agrees with each prefix, and is fast."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from accounting_records import make_release, make_run

from gradveil.accounting import (
    Setting,
    paper_curve,
    planned_curve,
    planned_epsilon,
    proved_curve,
    proved_epsilon,
)
from gradveil.accounting._rdp import PROVED_ORDERS, rdp_poisson, tight_epsilons
from gradveil.errors import ConfigError

SIGMAS = np.geomspace(15, 4, 10_000)
MNIST = Setting(sample_rate=0.01)


@pytest.mark.parametrize("neighbours", ["add-remove", "replace-one"])
def test_rdp_after_each_of_10000_steps(neighbours: str) -> None:
    start = time.process_time()
    curve = planned_curve(SIGMAS.tolist(), MNIST, neighbours=neighbours)
    assert time.process_time() - start < 10  # 1 s on one idle core
    assert np.array_equal(curve.steps, np.arange(1, 10_001))
    assert np.all(np.diff(curve.epsilon) >= 0)
    for steps in (1, 700, 10_000):
        view = {"neighbours": neighbours, "accountant": "RDP"}
        exact = planned_epsilon(SIGMAS[:steps].tolist(), MNIST, **view).epsilon
        assert exact * (1 - 1e-9) <= curve.epsilon[steps - 1] <= exact * 1.01 + 1e-9
    assert curve.epsilon[-1] == pytest.approx(exact, rel=1e-12)


def test_pld_at_chosen_steps() -> None:
    curve = planned_curve(SIGMAS.tolist(), MNIST, accountant="PLD", at=[10_000, 100, 2_500])
    assert curve.steps.tolist() == [100, 2_500, 10_000]
    for steps, epsilon in zip(curve.steps.tolist(), curve.epsilon.tolist(), strict=True):
        assert epsilon == planned_epsilon(SIGMAS[:steps].tolist(), MNIST).epsilon
    assert np.all(np.diff(curve.epsilon) > 0)


def test_pld_at_steps_of_its_own_choosing() -> None:
    curve = planned_curve([6.0] * 3_000, MNIST, accountant="PLD")
    assert curve.steps[0] == 1
    assert curve.steps[-1] == 3_000
    assert 15 < curve.steps.size <= 24
    assert np.all(np.diff(curve.epsilon) >= 0)
    assert np.array_equal(planned_curve([6.0] * 7, MNIST, accountant="PLD").steps, np.arange(1, 8))


def test_10000_different_sigmas_on_one_core() -> None:
    """The limits of the project: published curves in 5 s, proved PLD in 10 s, with room for a busy machine."""
    random = np.random.default_rng(7)
    for sigmas in (random.uniform(0.8, 20, 10_000), np.geomspace(300, 0.5, 10_000)):
        assert np.unique(sigmas).size == 10_000
        start = time.process_time()
        curves = paper_curve(sigmas, 0.01, 1e-5)
        assert time.process_time() - start < 8
        assert all(c.shape == (10_000,) and np.all(np.diff(c) >= 0) for c in curves.values())
        start = time.process_time()
        assert 0.5 < planned_epsilon(sigmas.tolist(), MNIST).epsilon < 50
        assert time.process_time() - start < 15


def test_the_curve_of_a_run_is_that_of_its_releases() -> None:
    header, releases = make_run(sigmas=SIGMAS[::100].tolist(), groups=("a", "b", "c"))
    setting = Setting(sample_rate=0.01, layers=3)
    for accountant in ("PLD", "RDP"):
        got = proved_curve(header, releases, accountant=accountant)
        planned = planned_curve(SIGMAS[::100].tolist(), setting, accountant=accountant)
        np.testing.assert_allclose(got.epsilon, planned.epsilon, rtol=1e-9)
        assert got.epsilon[-1] == pytest.approx(
            proved_epsilon(header, releases, accountant=accountant).epsilon, rel=1e-12
        )
    assert proved_curve(header, releases, delta=1e-7).epsilon[-1] > got.epsilon[-1]


def test_a_step_that_releases_nothing_costs_nothing() -> None:
    header, releases = make_run(taken=4)
    nothing = {"clip": (0.0,), "sensitivity": (0.0,)}
    releases[0] = dataclasses.replace(releases[0], **nothing)
    releases[2] = dataclasses.replace(releases[2], **nothing)
    for accountant in ("PLD", "RDP"):
        curve = proved_curve(header, releases, accountant=accountant)
        assert curve.epsilon[0] == 0.0
        assert curve.epsilon[1] == curve.epsilon[2] > 0
        assert curve.epsilon[3] == proved_epsilon(header, releases, accountant=accountant).epsilon


@pytest.mark.parametrize("stopping", ["none", "public", "private"])
def test_the_curve_is_of_the_steps_taken_whatever_is_charged_in_the_end(stopping: str) -> None:
    header, releases = make_run(taken=30, steps=200, stopping=stopping)
    curve = proved_curve(header, releases)
    for n in (1, 17, 30):
        so_far = proved_epsilon(header, releases[:n], accountant="RDP", charge="taken").epsilon
        assert curve.epsilon[n - 1] == pytest.approx(so_far, rel=1e-12)
    charged = proved_epsilon(header, releases, accountant="RDP").epsilon
    assert (charged > curve.epsilon[-1] * 1.5) == (stopping != "public")


def test_nothing_proved_is_an_empty_curve_with_the_reason() -> None:
    header, releases = make_run(taken=3, strategy="dyn-s-l2max", guarantee="paper-only")
    releases[1] = make_release(header, 1, scale_is_public=False, sensitivity_rule="l2max-batch")
    for accountant in ("PLD", "RDP"):
        curve = proved_curve(header, releases, accountant=accountant)
        assert curve.steps.size == curve.epsilon.size == 0
        assert "depends on the data" in (curve.reason or "")
    assert "shuffled" in (planned_curve([6.0], Setting(sample_rate=0.1, sampling="shuffle")).reason or "")


def test_a_delta_too_small_for_the_pld_is_counted_by_what_is_named() -> None:
    curve = planned_curve([6.0] * 500, MNIST, delta=1e-12, accountant="PLD", at=[500])
    assert curve.accountant == "RDP"
    whole = planned_epsilon([6.0] * 500, MNIST, delta=1e-12, accountant="RDP").epsilon
    assert curve.epsilon[0] == pytest.approx(whole, rel=1e-12)


def test_no_steps_have_no_curve() -> None:
    for accountant in ("PLD", "RDP"):
        curve = planned_curve([], MNIST, accountant=accountant)
        assert curve.steps.size == 0
        assert curve.reason is None


@pytest.mark.parametrize("at", [[0], [4], [-1, 2]])
def test_points_outside_the_run_are_refused(at: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"outside 1 \.\. 3"):
        planned_curve([6.0] * 3, MNIST, at=at)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
def test_the_conversion_is_that_of_dp_accounting(delta: float) -> None:
    from dp_accounting.rdp import compute_epsilon

    rdp = np.array([n * rdp_poisson(0.01, z, PROVED_ORDERS) for n, z in ((1, 50.0), (100, 6.0), (5_000, 0.8))])
    expected = [compute_epsilon(list(PROVED_ORDERS), list(row), delta)[0] for row in rdp]
    assert tight_epsilons(PROVED_ORDERS, rdp, delta) == pytest.approx(expected, rel=1e-12)
