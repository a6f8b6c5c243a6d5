"""Orderings on random schedules: what must never lower an epsilon does not, and parts compose to the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
from accounting_records import make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.accounting import (
    Setting,
    Target,
    calibrate_sigma,
    paper_curve,
    planned_epsilon,
    proved_epsilon,
    spent_by,
)
from gradveil.accounting._compose import parts_of, renyi_steps
from gradveil.accounting._events import release_charges
from gradveil.accounting._pld_fft import _composed, _epsilon_at, interval
from gradveil.accounting._rdp import tight_epsilon

SLACK = 1 + 1e-6

schedules = st.one_of(
    st.lists(st.floats(0.8, 15), min_size=1, max_size=6).map(lambda s: [x for x in s for _ in range(80)]),
    st.tuples(st.floats(2, 15), st.floats(0.4, 1.0), st.integers(2, 150)).map(
        lambda p: np.geomspace(p[0], p[0] * p[1], p[2]).tolist()
    ),
)
rates = st.floats(0.002, 0.08)
views = st.sampled_from(
    [(s, n) for s in ("poisson", "without-replacement", "with-replacement") for n in ("add-remove", "replace-one")]
).filter(lambda v: v[0] == "poisson" or v[1] == "replace-one")


def epsilon(sigmas, q, view, *, delta=1e-5, accountant="PLD", layers=1) -> float:
    sampling, neighbours = view
    setting = Setting(sample_rate=q, sampling=sampling, layers=layers)
    return planned_epsilon(sigmas, setting, delta=delta, neighbours=neighbours, accountant=accountant).epsilon


@settings(max_examples=6)
@given(sigmas=schedules, q=rates, neighbours=st.sampled_from(["add-remove", "replace-one"]))
def test_pld_is_never_above_rdp(sigmas: list[float], q: float, neighbours: str) -> None:
    view = ("poisson", neighbours)
    # The grid of losses costs the PLD a little where epsilon is tiny; the RDP has no such grid.
    assert epsilon(sigmas, q, view) <= epsilon(sigmas, q, view, accountant="RDP") * 1.005 + 1e-4


@settings(max_examples=6)
@given(sigmas=schedules, q=rates, view=views, more=st.floats(1.02, 1.6), data=st.data())
def test_nothing_that_costs_more_lowers_epsilon(sigmas, q, view, more, data) -> None:
    kinds = ["PLD"] if view[0] != "poisson" else ["PLD", "RDP"]
    for accountant in kinds:
        least = epsilon(sigmas, q, view, accountant=accountant) - 1e-9
        extra = data.draw(st.floats(0.8, 15))
        # A rate of fixed-size batches is rounded up to a whole batch of a very large population.
        for costlier in (
            epsilon([*sigmas, extra], q, view, accountant=accountant),
            epsilon(sigmas, q * more, view, accountant=accountant),
            epsilon([s / more for s in sigmas], q, view, accountant=accountant),
            epsilon(sigmas, q, view, delta=1e-5 / more, accountant=accountant),
            epsilon(sigmas, q, view, accountant=accountant, layers=2),
        ):
            assert least <= costlier * SLACK


@settings(max_examples=6)
@given(sigmas=schedules, q=rates, more=st.floats(1.02, 1.6))
def test_nothing_that_costs_more_lowers_a_published_epsilon(sigmas: list[float], q: float, more: float) -> None:
    def last(sigmas=sigmas, q=q, delta=1e-5):
        return {m: c[-1] for m, c in paper_curve(sigmas, q, delta).items()}

    least = last()
    for costlier in (
        last([*sigmas, 5.0]),
        last(q=q * more),
        last([s / more for s in sigmas]),
        last(delta=1e-5 / more),
    ):
        assert all(least[m] <= costlier[m] * SLACK + 1e-12 for m in least)


@settings(max_examples=4)
@given(sigmas=schedules.filter(lambda s: len(s) > 1), q=rates, share=st.floats(0.1, 0.9))
@pytest.mark.parametrize("replace", [False, True])
def test_a_ledger_split_in_two_composes_to_the_whole(replace: bool, sigmas, q, share) -> None:
    """Each part's loss distribution by itself, then the two convolved, against the run's own epsilon."""
    header, releases = make_run(sigmas=sigmas, sample_rate=q)
    cut = max(1, min(len(releases) - 1, int(share * len(releases))))
    neighbours = "replace-one" if replace else "add-remove"
    whole = proved_epsilon(header, releases, neighbours=neighbours)
    parts = [parts_of(release_charges(header, some)) for some in (releases[:cut], releases[cut:])]
    h = interval(parts_of(release_charges(header, releases)), replace=replace, size=whole.epsilon)
    found = []
    for direction in (0, 1):
        (low_a, a, lost_a), (low_b, b, lost_b) = (_composed(p, replace, h, direction) for p in parts)
        size = a.size + b.size - 1
        joined = np.fft.irfft(np.fft.rfft(a, size) * np.fft.rfft(b, size), size)
        pmf = (low_a + low_b, np.maximum(joined, 0.0), lost_a + lost_b)
        found.append(_epsilon_at(pmf, h, 1e-5 - 1e-15 * len(releases)))
    # The whole may have its 64 exact multipliers grouped where a part has not.
    assert max(found) == pytest.approx(whole.epsilon, rel=6e-3, abs=1e-5)
    orders, rdp_of, _ = renyi_steps([parts[0][0][0]], neighbours)
    total = sum(count * rdp_of(mechanism, z) for part in parts for mechanism, z, count in part)
    rdp = proved_epsilon(header, releases, neighbours=neighbours, accountant="RDP").epsilon
    assert tight_epsilon(orders, total, 1e-5) == pytest.approx(rdp, rel=6e-3, abs=1e-9)


@settings(max_examples=10)
@given(
    target=st.floats(0.05, 20),
    q=rates,
    steps=st.integers(1, 2_000),
    decay=st.sampled_from([None, None, "linear", "exponential", "step"]),
    ratio=st.floats(0.2, 0.95),
    accountant=st.sampled_from(["PLD", "RDP", "BaseC", "AdvC", "OptC", "zCDP"]),
    layers=st.integers(1, 5),
)
def test_calibration_meets_the_target_within_one_percent(target, q, steps, decay, ratio, accountant, layers) -> None:
    wanted, setting = Target(epsilon=target, accountant=accountant), Setting(sample_rate=q, layers=layers)
    steps = min(steps, 120) if decay else steps
    found = calibrate_sigma(wanted, setting, steps=steps, decay=decay, ratio=ratio if decay else None)
    again = spent_by([found.schedule(t) for t in range(steps)], setting, wanted)
    assert 0.99 * target <= again <= target
    assert math.isclose(again, found.epsilon)
