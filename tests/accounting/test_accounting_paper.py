"""The published tables reproduce, and the figures say what they are."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from accounting_records import make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.accounting import at_total_delta, from_releases, paper_curve, paper_epsilons
from gradveil.accounting._rdp import CLASSIC_ORDERS, PROVED_ORDERS, rdp_poisson
from gradveil.errors import ConfigError

# steps: BaseC (with eps0 cut to .807, which the product does not do), AdvC, OptC, zCDP, MA
TABLE = {
    10_000: (123.354, 7.450, 6.740, 1.159, 0.823),
    7_996: (98.646, 6.518, 5.930, 1.034, 0.735),
    6_000: (74.024, 5.503, 5.037, 0.893, 0.636),
    5_419: (66.858, 5.188, 4.756, 0.848, 0.604),
    5_137: (63.379, 5.029, 4.615, 0.825, 0.588),
    5_000: (61.689, 4.952, 4.546, 0.814, 0.580),
}


@pytest.mark.parametrize("steps", TABLE)
def test_published_rows_reproduce(steps: int) -> None:
    got = paper_epsilons([6.0] * steps, 0.01, 1e-5)
    for method, published in zip(("BaseC", "AdvC", "OptC", "zCDP", "MA"), TABLE[steps], strict=True):
        # Three printed digits of MA and zCDP are .06 % to .09 % by themselves.
        assert got[method].epsilon == pytest.approx(published, rel=1.5e-3), method


def test_exact_eps0_and_the_printed_formula() -> None:
    got = paper_epsilons([6.0] * 10_000, 0.01, 1e-5)
    assert got["BaseC"].epsilon == pytest.approx(123.457, abs=5e-4)
    assert got["AdvC-printed"].epsilon == pytest.approx(6.686, abs=1e-3)


def test_each_formula_of_two_steps_by_hand() -> None:
    q, delta = 0.2, 1e-3
    eps = [math.log(1 + q * (math.exp(math.sqrt(2 * math.log(1.25 / delta)) / s) - 1)) for s in (3.0, 5.0)]
    squares, half = sum(e * e for e in eps), sum(e * (math.exp(e) - 1) / (math.exp(e) + 1) for e in eps)
    advanced = math.sqrt(2 * math.log(1 / delta) * squares)
    rho = q * q * (1 / 9 + 1 / 25)
    got = {m: p.epsilon for m, p in paper_epsilons([3.0, 5.0], q, delta).items()}
    del got["MA"]
    assert got == pytest.approx(
        {
            "BaseC": sum(eps),
            "AdvC": advanced + sum(e * (math.exp(e) - 1) for e in eps),
            "AdvC-printed": advanced + half,
            "OptC": half + math.sqrt(2 * squares * math.log(math.e + math.sqrt(squares) / delta)),
            "zCDP": rho + 2 * math.sqrt(rho * math.log(1 / delta)),
        },
        rel=1e-12,
    )


def test_at_a_true_total_delta_the_compositions_are_larger() -> None:
    got = at_total_delta([6.0] * 10_000, 0.01, 1e-5)
    assert (got["BaseC"], got["AdvC"], got["OptC"]) == pytest.approx((158.0, 10.75, 9.56), rel=1e-3)
    assert set(at_total_delta([], 0.01, 1e-5).values()) == {0.0}


def test_only_what_is_asked_for_is_computed_and_unknown_methods_are_refused() -> None:
    assert set(paper_curve([6.0], 0.01, 1e-5, methods=["zCDP"])) == {"zCDP"}
    with pytest.raises(ConfigError, match="Did you mean 'zCDP'"):
        paper_curve([6.0], 0.01, 1e-5, methods=["zCPD"])


def test_total_delta_is_stated() -> None:
    got = paper_epsilons([6.0] * 10_000, 0.01, 1e-5)
    assert got["BaseC"].delta_total == pytest.approx(1e-3)
    assert got["AdvC"].delta_total == got["OptC"].delta_total == pytest.approx(1.01e-3)
    assert got["MA"].delta_total == got["zCDP"].delta_total == 1e-5
    assert {p.delta_nominal for p in got.values()} == {1e-5}


@pytest.mark.parametrize(("sigma", "warns"), [(6.0, False), (15.0, True)])
def test_condition_of_the_closed_forms_warns(sigma: float, warns: bool) -> None:
    got = paper_epsilons([6.0, sigma], 0.01, 1e-5)
    assert [m for m, p in got.items() if p.warnings] == (["zCDP", "MA"] if warns else [])


def test_curve_ends_at_the_total_and_grows() -> None:
    sigmas = np.linspace(15, 4, 300)
    curve, total = paper_curve(sigmas, 0.01, 1e-5), paper_epsilons(sigmas, 0.01, 1e-5)
    for method, values in curve.items():
        assert values.shape == (300,)
        assert np.all(np.diff(values) > 0)
        assert values[-1] == total[method].epsilon
        assert values[99] == pytest.approx(paper_epsilons(sigmas[:100], 0.01, 1e-5)[method].epsilon, rel=2e-3)


def test_many_distinct_sigmas_are_fast_and_rounded_to_the_safe_side() -> None:
    sigmas = np.geomspace(15, 4, 10_000)
    start = time.perf_counter()
    got = paper_epsilons(sigmas, 0.01, 1e-5)["MA"].epsilon
    assert time.perf_counter() - start < 10
    # Every 25th sigma stands for 25: the largest of each 25 bounds the exact value from below.
    table = [rdp_poisson(0.01, float(s), CLASSIC_ORDERS) for s in sigmas[::25]]
    below = np.min(25 * np.sum(table, axis=0) + math.log(1e5) / (np.array(CLASSIC_ORDERS) - 1))
    assert below <= got <= below * 1.004


def test_no_steps_cost_nothing() -> None:
    assert {p.epsilon for p in paper_epsilons([], 0.01, 1e-5).values()} == {0.0}


def test_tiny_sigma_gives_infinity_without_a_warning() -> None:
    got = paper_epsilons([1e-3], 0.5, 1e-5)
    assert got["AdvC"].epsilon == math.inf
    assert got["AdvC"].to_dict()["epsilon"] == "inf"
    assert got["BaseC"].epsilon == pytest.approx(math.sqrt(2 * math.log(1.25e5)) * 1e3, rel=1e-3)


@pytest.mark.parametrize(
    ("sigmas", "rate", "delta", "named"),
    [
        ([6.0], 0.0, 1e-5, "sample rate 0.0"),
        ([6.0], 1.5, 1e-5, "sample rate 1.5"),
        ([6.0], 0.01, 0.0, "delta 0.0"),
        ([6.0], 0.01, 1.0, "delta 1.0"),
        ([6.0, 0.0], 0.01, 1e-5, "sigma is 0.0 at step 1"),
        ([6.0, math.nan], 0.01, 1e-5, "sigma is nan at step 1"),
    ],
)
def test_bad_settings_are_refused_with_the_value(sigmas: list[float], rate: float, delta: float, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        paper_epsilons(sigmas, rate, delta)


@settings(max_examples=20, deadline=None)
@given(q=st.floats(1e-4, 0.9), z=st.floats(0.5, 20), order=st.sampled_from([2.0, 3.0, 8.0, 32.0]))
def test_quadrature_agrees_with_the_finite_sum(q: float, z: float, order: float) -> None:
    from gradveil.accounting._rdp import _log_moments

    by_quadrature = _log_moments(q, z, np.array([order]), replace=False)
    assert by_quadrature is not None
    assert by_quadrature[0] / (order - 1) == pytest.approx(rdp_poisson(q, z, (order,))[0], rel=1e-9, abs=2e-13)


@pytest.mark.parametrize(("q", "z"), [(0.01, 6.0), (0.2, 1.0), (0.01, 0.7)])
def test_rdp_agrees_with_dp_accounting_at_whole_orders(q: float, z: float) -> None:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    orders = tuple(a for a in PROVED_ORDERS if a == int(a))
    reference = RdpAccountant(list(orders)).compose(PoissonSampledDpEvent(q, GaussianDpEvent(z))).rdp
    np.testing.assert_allclose(rdp_poisson(q, z, orders), reference, rtol=1e-7)


def test_replace_one_rdp_agrees_with_brute_force() -> None:
    q, z, order = 0.05, 1.3, 7.3
    x = np.linspace(-40, 60, 2_000_001)
    p = (1 - q) * np.exp(-x * x / 2) + q * np.exp(-((x - 1 / z) ** 2) / 2)
    r = (1 - q) * np.exp(-x * x / 2) + q * np.exp(-((x + 1 / z) ** 2) / 2)
    inside = (p > 1e-250) & (r > 1e-250)
    moment = np.sum((p[inside] / r[inside]) ** order * r[inside]) * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    assert rdp_poisson(q, z, (order,), True)[0] == pytest.approx(math.log(moment) / (order - 1), rel=1e-8)


def test_from_releases_takes_sigma_as_released() -> None:
    header, releases = make_run(sigmas=[6.0, 5.0], groups=("a", "b", "c"))
    assert from_releases(header, releases) == paper_epsilons([6.0, 5.0], 0.01, 1e-5)
