"""The composed privacy loss: above the truth where the truth is known, near dp-accounting elsewhere, and fast."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from accounting_records import make_release, make_run

from gradveil.accounting import affordable_steps, proved_epsilon, statement
from gradveil.accounting._compose import composed_epsilon
from gradveil.accounting._pld import Mechanism, fixed_size_deltas
from gradveil.accounting._pld_fft import interval, pad, pld_epsilon, resolves, step_pmfs
from gradveil.accounting._quantize import cells

NEARLY_ALL = Mechanism(sampler="poisson", rate=1 - 1e-13)
ALL = Mechanism(sampler="without-replacement", rate=1.0, batch_size=7, population=7)
# What a Gaussian of T = 1e5, z = 300 truly has, to 50 digits (mpmath).
TRUE = {
    (NEARLY_ALL, "add-remove"): {1e-10: 6.93819, 1e-12: 7.665, 1e-14: 8.329},
    (NEARLY_ALL, "replace-one"): {1e-12: 16.613, 1e-13: 17.285},
    (ALL, "replace-one"): {1e-10: 15.1734, 1e-13: 17.285},
}


@pytest.mark.parametrize("case", TRUE, ids=lambda case: f"{case[0].sampler} {case[1]}")
def test_tiny_deltas_of_long_runs_are_never_below_the_truth(case) -> None:
    mechanism, neighbours = case
    for delta, true in TRUE[case].items():
        got = composed_epsilon([(mechanism, 300.0)] * 100_000, delta=delta, neighbours=neighbours, accountant="PLD")
        assert got >= true * (1 - 1e-4)
        # Rounding of the transform is not small against these; another bound stands in.
        assert not resolves(delta, 100_000)
        assert got < true * (1.2 if mechanism is NEARLY_ALL else 10)


def test_small_deltas_are_looked_up_with_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    def epsilon(delta: float) -> float:
        return pld_epsilon(((NEARLY_ALL, 300.0, 100_000),), replace=False, delta=delta, size=6.0)

    padded = epsilon(2e-9)
    assert pad(100_000) == pytest.approx(1e-10)
    monkeypatch.setattr("gradveil.accounting._pld_fft.ROUNDING", 0.0)
    assert padded == pytest.approx(epsilon(1.9e-9), rel=1e-9)
    assert padded > epsilon(2e-9) * (1 + 1e-4)


def test_where_delta_is_too_small_another_bound_stands_in_and_is_named() -> None:
    header, releases = make_run(taken=2_000)
    got = proved_epsilon(header, releases, delta=1e-12)
    assert got.accountant == "RDP"
    assert got.epsilon == proved_epsilon(header, releases, delta=1e-12, accountant="RDP").epsilon < math.inf
    header, releases = make_run(taken=2_000, sampling="with-replacement")
    got = proved_epsilon(header, releases, delta=1e-12, neighbours="replace-one")
    assert got.epsilon == math.inf
    assert got.reason is not None and "too small" in got.reason
    assert affordable_steps(header, releases[:5], [6.0] * 2_000, budget=50.0, delta=1e-12) < 500


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(("q", "z", "steps"), [(0.01, 6.0, 300), (0.3, 0.7, 20), (0.001, 0.5, 50), (0.9, 2.0, 1)])
def test_agrees_with_dp_accounting(q: float, z: float, steps: int, replace: bool) -> None:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    relation = NeighboringRelation.REPLACE_ONE if replace else NeighboringRelation.ADD_OR_REMOVE_ONE
    reference = privacy_loss_distribution.from_gaussian_mechanism(
        z, value_discretization_interval=1e-3 if z < 1 else 1e-4, sampling_prob=q, neighboring_relation=relation
    )
    expected = (reference.self_compose(steps) if steps > 1 else reference).get_epsilon_for_delta(1e-5)
    charges = [(Mechanism(sampler="poisson", rate=q), z)] * steps
    got = composed_epsilon(charges, delta=1e-5, neighbours="replace-one" if replace else "add-remove", accountant="PLD")
    assert got == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("sampler", ["poisson", "without-replacement", "with-replacement"])
def test_one_step_is_a_pair_of_distributions_and_coarser_grids_lie_above(sampler: str, replace: bool) -> None:
    mechanism = Mechanism(sampler=sampler, rate=0.1, batch_size=5, population=50)

    def delta(h: float, direction: int, epsilon: float) -> float:
        pmfs = step_pmfs(mechanism, replace, 0.8, h)
        first, masses, infinite = pmfs[direction % len(pmfs)]
        losses = h * (first + np.arange(masses.size))
        assert masses.sum() + infinite == pytest.approx(1.0, abs=1e-9)
        assert float(masses @ np.exp(-losses)) <= 1 + 1e-9
        return infinite + float(masses @ np.maximum(-np.expm1(epsilon - losses), 0.0))

    for direction in (0, 1):
        for epsilon in (-0.05, 0.0, 0.0301, 0.5123, 2.0):
            values = [delta(1e-4 * 2.0**k, direction, epsilon) for k in (0, 3, 6, 9)]
            assert values == sorted(values) or np.all(np.diff(values) > -1e-13)


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.5])
def test_with_replacement_bound_holds_on_an_enumerated_mechanism(epsilon: float) -> None:
    """Ten examples, batches of three, all others at -1 and the one at +1 or 0 (in units of C), z = 1."""
    n, batch, z = 10, 3, 1.0
    x = np.linspace(-12, 14, 200_001)
    rows = [math.comb(batch, k) * (1 / n) ** k * (1 - 1 / n) ** (batch - k) for k in range(batch + 1)]

    def density(contribution: float) -> np.ndarray:
        means = [k * contribution - (batch - k) for k in range(batch + 1)]
        return sum(w * np.exp(-((x - m) ** 2) / (2 * z * z)) for w, m in zip(rows, means, strict=True)) / (
            z * math.sqrt(2 * math.pi)
        )

    mechanism = Mechanism(sampler="with-replacement", rate=0.3, batch_size=batch, population=n)
    bound = fixed_size_deltas(mechanism, z, np.array([epsilon]))[0]
    for one, other in ((1.0, -1.0), (-1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        true = np.sum(np.maximum(density(one) - math.exp(epsilon) * density(other), 0)) * (x[1] - x[0])
        assert true <= bound + 1e-9
    tight = np.sum(np.maximum(density(1.0) - math.exp(epsilon) * density(-1.0), 0)) * (x[1] - x[0])
    assert bound < 1.2 * tight


def test_the_grid_is_nested_and_never_finer_after_a_step() -> None:
    one = (Mechanism(sampler="poisson", rate=0.01), 6.0, 100)
    sizes = [interval([one], replace=False, size=s) for s in (1e-3, 0.1, 0.9, 1.0, 3.0, 17.0, 400.0, 1e5)]
    assert sizes == sorted(sizes)
    assert all(math.log2(s / 1e-4) == round(math.log2(s / 1e-4)) for s in sizes)
    wide = (Mechanism(sampler="poisson", rate=0.01), 0.02, 1)
    assert interval([one, wide], replace=False, size=0.1) > interval([one], replace=False, size=0.1)


# --- equal but for their last bits --------------------------------------------------------------


@pytest.mark.parametrize("values", [np.linspace(3.0, 7.0, 41), 1 / np.sqrt(np.linspace(0.02, 0.2, 40))])
def test_rounding_noise_makes_no_multiplier_distinct(values: np.ndarray) -> None:
    noisy = [float(v * (1 + k * 2.0**-53)) for v in values for k in (-2, -1, 0, 1, 2)]
    found = cells(noisy)
    assert len(found) == len(values)
    for (z, count), value in zip(found, values, strict=True):
        assert count == 5
        assert value * (1 - 1e-10) < z < value * (1 - 2.0**-52)


def test_recorded_multipliers_cost_what_was_planned() -> None:
    """Groups make the planned and the recorded value differ in their last bits, and 40 values twice as many."""
    header, _ = make_run(taken=0, steps=400, groups=("a", "b", "c"))
    sigmas = [float(s) for s in np.linspace(3, 5, 40)] * 10
    releases = [make_release(header, t, sigma=s, clip=0.1 + 0.007 * t) for t, s in enumerate(sigmas)]
    assert len({r.multiplier for r in releases}) > 64
    planned = [1 / math.sqrt(3 / s**2) for s in sigmas]
    budget = proved_epsilon(header, releases).epsilon
    assert affordable_steps(header, [], planned, budget=budget * (1 + 1e-12)) == 400
    assert affordable_steps(header, [], planned, budget=budget * (1 - 1e-6)) < 400
    assert budget < proved_epsilon(*make_run(sigmas=[z * (1 - 1e-6) for z in planned])).epsilon


# --- fast ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigmas", "rate", "limit"),
    [
        (np.repeat(np.linspace(1.7, 0.9, 120), 5), 0.095, 10),
        (np.linspace(1.7, 0.9, 600), 0.1, 10),
        (np.geomspace(40, 0.3, 600), 0.1, 10),
        (np.geomspace(15, 4, 10_000), 0.01, 15),
        (np.geomspace(2, 0.6, 10_000), 0.01, 15),
    ],
    ids=["120 at .095", "600 at .1", "600 far apart at .1", "10000 at .01", "10000 small at .01"],
)
def test_a_statement_takes_seconds(sigmas: np.ndarray, rate: float, limit: float) -> None:
    header, releases = make_run(sigmas=sigmas.tolist(), sample_rate=rate)
    start = time.process_time()
    result = statement(header, releases)
    assert time.process_time() - start < limit
    assert 0 < result.proved.epsilon < result.proved_other.epsilon < math.inf
