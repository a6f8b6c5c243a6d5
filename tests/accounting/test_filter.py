"""The privacy filter: no policy overspends it, no stopping rule breaks it, and it costs at most 12 % of epsilon."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from accounting_records import make_header, make_release
from scipy.optimize import brentq
from scipy.special import ndtr

from gradveil.accounting import (
    FilterAccountant,
    RenyiFilter,
    Setting,
    Target,
    calibrate_sigma,
    choose_filters,
    planned_epsilon,
    proved_epsilon,
    reconstruction_bound,
    statement,
)
from gradveil.accounting._events import covers
from gradveil.accounting._ledger_lines import recovered_release
from gradveil.accounting.filter import NAME, budget_at, to_plan
from gradveil.errors import ConfigError
from gradveil.mechanism.records import Release, RunHeader

SETTING = Setting(sample_rate=0.01)


def filters(
    epsilon: float = 1.0, *, steps: int = 1_000, sigma: float = 1.5, rate: float = 0.01
) -> tuple[RenyiFilter, ...]:
    planned = Setting(sample_rate=rate).charges([sigma] * steps)
    return choose_filters(planned, delta=1e-5, epsilon=epsilon)


def header_with(found: tuple[RenyiFilter, ...], **changes: Any) -> RunHeader:
    header = make_header(**changes)
    return dataclasses.replace(header, plan={**header.plan, NAME: to_plan(found)})


# --- what is chosen, and what it is worth -------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 8.0])
def test_the_budget_is_what_the_conversion_makes_of_epsilon(epsilon: float) -> None:
    lead = filters(epsilon)[0]
    assert lead.neighbours == "add-remove"
    assert lead.epsilon(1e-5) == pytest.approx(epsilon, rel=1e-6)
    assert lead.epsilon(1e-5) <= epsilon
    assert lead.budget == pytest.approx(budget_at(lead.order, epsilon=epsilon, delta=1e-5), rel=1e-8)


def test_the_order_is_that_at_which_the_plan_just_fits() -> None:
    """Without an epsilon the filter affords the plan, and its epsilon is the RDP bound's, the best over all orders."""
    sigmas = [1.5] * 1_000
    lead = choose_filters(SETTING.charges(sigmas), delta=1e-5)[0]
    assert lead.epsilon(1e-5) == pytest.approx(planned_epsilon(sigmas, SETTING, accountant="RDP").epsilon, rel=1e-6)
    accountant = FilterAccountant(header_with((lead,)))
    assert sum(accountant.grant(1.5) for _ in range(1_010)) == 1_000


def test_costs_are_those_of_a_peer() -> None:
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import RdpAccountant

    for order in (2.0, 4.0, 17.0):
        mine = RenyiFilter(neighbours="add-remove", order=order, budget=1.0)
        for rate, z in ((0.01, 1.1), (0.2, 4.0), (1.0, 3.0)):
            event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
            theirs = RdpAccountant([order]).compose(event)._rdp[0]
            assert mine.cost(Setting(sample_rate=rate).mechanism, z) == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize(("rate", "steps"), [(0.01, 10_000), (0.04, 1_200), (0.1, 600), (1.0, 50)])
def test_the_price_against_the_pld_is_at_most_12_percent(epsilon: float, rate: float, steps: int) -> None:
    setting = Setting(sample_rate=rate)
    sigma = calibrate_sigma(Target(epsilon=epsilon, delta=1e-5), setting, steps=steps).sigma
    pld = planned_epsilon([sigma] * steps, setting).epsilon
    price = choose_filters(setting.charges([sigma] * steps), delta=1e-5)[0].epsilon(1e-5) / pld - 1
    assert 0 < price <= 0.12


def test_what_cannot_be_filtered_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to grant"):
        filters(1e-5)
    with pytest.raises(ConfigError, match="Poisson"):
        choose_filters(Setting(sample_rate=0.01, sampling="without-replacement").charges([2.0]), delta=1e-5)
    for wrong in ({"order": 1.0}, {"order": math.nan}, {"budget": 0.0}, {"budget": math.inf}):
        with pytest.raises(ValueError):
            RenyiFilter(**{"neighbours": "add-remove", "order": 2.0, "budget": 1.0} | wrong)


# --- no policy overspends -----------------------------------------------------------------------

_NOISES = np.round(np.geomspace(0.7, 30.0, 48), 3)


def at_random(rng: np.random.Generator, accountant: FilterAccountant, turn: int) -> float:
    return float(rng.choice(_NOISES))


def by_what_is_left(rng: np.random.Generator, accountant: FilterAccountant, turn: int) -> float:
    """More noise as the budget runs out, up to the least noise that is refused."""
    return float(_NOISES[min(47, int((1 - accountant.left) * 48))])


def greedy(rng: np.random.Generator, accountant: FilterAccountant, turn: int) -> float:
    """The least noise that is still granted, found by asking, which costs nothing."""
    return next((float(z) for z in _NOISES if accountant.grants(float(z))), float(_NOISES[-1]))


def nagging(rng: np.random.Generator, accountant: FilterAccountant, turn: int) -> float:
    """Asks for too much, again and again, with tiny steps in between."""
    return float(_NOISES[0] if turn % 3 else _NOISES[-1])


def after_the_outputs(rng: np.random.Generator, accountant: FilterAccountant, turn: int) -> float:
    """Follows the noise itself: little after a large draw, much after a small one."""
    return float(_NOISES[4] if rng.normal() > 1.0 else _NOISES[30])


@pytest.mark.parametrize("policy", [at_random, by_what_is_left, greedy, nagging, after_the_outputs])
def test_no_policy_spends_more_than_the_budget(policy: Callable[..., float]) -> None:
    """2 000 runs for each of five policies. What was granted is added up exactly, apart from the accountant."""
    rng = np.random.default_rng(20261118)
    refused = 0
    for run in range(2_000):
        rate = (0.01, 0.1, 1.0)[run % 3]
        found = _FOUND[rate]
        accountant = FilterAccountant(header_with(found, sample_rate=rate))
        mechanism, granted = Setting(sample_rate=rate).mechanism, []
        for turn in range(int(rng.integers(2, 24))):
            z = policy(rng, accountant, turn)
            if accountant.grant(z):
                granted.append(z)
            else:
                refused += 1
        for one, counted in zip(found, accountant.granted, strict=True):
            exact = math.fsum(one.cost(mechanism, z) for z in granted)
            assert exact <= one.budget
            assert counted == pytest.approx(exact, rel=1e-9, abs=1e-300)
    assert refused > 100  # the budget was reached


_FOUND = {rate: filters(1.0, steps=8, sigma=2.0, rate=rate) for rate in (0.01, 0.1, 1.0)}


# --- no stopping rule breaks it: what is released at the end, by Monte Carlo ---------------------


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Exact, of one Gaussian release of sensitivity mu at noise 1."""
    return float(brentq(lambda e: ndtr(-e / mu + mu / 2) - math.exp(e) * ndtr(-e / mu - mu / 2) - delta, 0, 200))


def test_a_stopping_rule_breaks_the_steps_taken_and_not_the_filter() -> None:
    """q = 1, 200 steps at z = 10, delta = .01: stop as soon as the privacy loss is above what the steps taken claim.

    The chance of a loss beyond epsilon, E (1 - exp(epsilon - loss))+, is to be at most delta. By the epsilon of the
    steps taken it is four times that; by the filter's it is not, here or under a rule that also moves the noise.
    """
    rng, runs, steps, mu, delta = np.random.default_rng(7), 40_000, 200, 0.1, 0.01
    planned = Setting(sample_rate=1.0).charges([1 / mu] * steps)
    lead = choose_filters(planned, delta=delta)[0]
    budget = lead.epsilon(delta)
    claimed = [gaussian_epsilon(math.sqrt(t) * mu, delta) for t in range(1, steps + 1)]
    loss, alive = np.zeros(runs), np.ones(runs, dtype=bool)
    broken = np.zeros(runs)
    for t in range(steps):
        loss[alive] += rng.normal(mu * mu / 2, mu, int(alive.sum()))
        stops = alive & (loss > claimed[t] + 0.3 * mu * math.sqrt(t + 1))
        broken[stops] = 1 - np.exp(claimed[t] - loss[stops])
        alive &= ~stops
    assert broken.mean() > 3 * delta  # charged by the steps taken: not a bound
    assert np.maximum(0, 1 - np.exp(budget - loss)).mean() <= delta  # the same runs, charged the filter's budget


@pytest.mark.parametrize("gamble", [0.0, 0.5, 2.0])
def test_noise_that_follows_the_privacy_loss_stays_within_the_filter(gamble: float) -> None:
    """An adversary who sees the loss: stops when it is high, and lowers the noise when it is behind."""
    rng, runs, delta = np.random.default_rng(11), 40_000, 0.01
    lead = choose_filters(Setting(sample_rate=1.0).charges([10.0] * 100), delta=delta)[0]
    epsilon, order = lead.epsilon(delta), lead.order
    loss, granted, alive = np.zeros(runs), np.zeros(runs), np.ones(runs, dtype=bool)
    for _ in range(400):
        mu = np.where(loss < epsilon * 0.6, 0.1 * (1 + gamble), 0.05)
        alive &= (granted + order * mu**2 / 2 <= lead.budget) & (loss < epsilon * 1.15)
        granted[alive] += (order * mu**2 / 2)[alive]
        loss += np.where(alive, rng.normal(mu**2 / 2, mu), 0.0)
    assert granted.max() <= lead.budget
    assert np.quantile(granted, 0.9) > 0.9 * lead.budget  # it was used
    failures = np.maximum(0, 1 - np.exp(epsilon - loss))
    assert failures.mean() + 3 * failures.std() / math.sqrt(runs) <= delta


# --- a run's records ----------------------------------------------------------------------------


def filtered_run(taken: int = 30, *, steps: int = 100, sigma: float = 1.5) -> tuple[RunHeader, list[Release]]:
    header = header_with(choose_filters(SETTING.charges([sigma] * steps), delta=1e-5), steps=steps)
    return header, [make_release(header, t, sigma=sigma) for t in range(taken)]


def test_a_run_is_charged_its_filters_budget_wherever_it_stops() -> None:
    ends = [proved_epsilon(*filtered_run(taken)) for taken in (1, 30, 99)]
    assert len({end.epsilon for end in ends}) == 1
    lead = ends[0].filter
    assert lead is not None
    assert ends[0].epsilon == RenyiFilter(neighbours="add-remove", order=lead["order"], budget=lead["budget"]).epsilon(
        1e-5
    )
    assert [end.steps_charged for end in ends] == [1, 30, 99]
    assert ends[0].accountant == f"Renyi filter of order {lead['order']:g}"
    assert proved_epsilon(*filtered_run(0)).epsilon == 0
    taken = proved_epsilon(*filtered_run(30), charge="taken")
    assert (taken.filter, taken.accountant) == (None, "PLD")
    assert taken.epsilon < ends[0].epsilon


def test_other_views_of_a_filtered_run() -> None:
    header, releases = filtered_run()
    assert proved_epsilon(header, releases, delta=1e-7).epsilon > proved_epsilon(header, releases).epsilon
    other = proved_epsilon(header, releases, neighbours="replace-one")
    exact = proved_epsilon(*filtered_run(100), neighbours="replace-one", accountant="RDP", charge="taken")
    assert exact.epsilon < other.epsilon < 1.3 * exact.epsilon
    alone = dataclasses.replace(header, plan={**header.plan, NAME: header.plan[NAME][:1]})
    refused = proved_epsilon(alone, releases, neighbours="replace-one")
    assert refused.epsilon == math.inf
    assert "was not set for replace-one" in (refused.reason or "")


def test_a_run_that_released_more_than_its_filter_grants_has_no_bound() -> None:
    header, releases = filtered_run(100)
    over = [*releases, *(make_release(header, t, sigma=1.5) for t in range(3))]
    got = proved_epsilon(header, over)
    assert got.epsilon == math.inf
    assert "released more than its privacy filter grants" in (got.reason or "")
    assert reconstruction_bound(header, over, kappa=0.1).whole_run is None


@pytest.mark.parametrize(
    "wrong", [[], "much", [{"order": 2.0}], [{"neighbours": "add-remove", "order": 1, "budget": 1}]]
)
def test_a_filter_that_cannot_be_read_is_no_bound(wrong: Any) -> None:
    header, releases = filtered_run()
    got = proved_epsilon(dataclasses.replace(header, plan={**header.plan, NAME: wrong}), releases)
    assert got.epsilon == math.inf
    assert "cannot be read" in (got.reason or "")


def test_a_line_cut_in_half_costs_at_most_what_was_left() -> None:
    header, releases = filtered_run(100)
    lost = recovered_release(header, releases)
    got = FilterAccountant(header).observe([*releases, lost])
    assert all(granted <= one.budget for granted, one in zip(got.granted, got.filters, strict=True))
    assert math.isfinite(proved_epsilon(header, [*releases, lost]).epsilon)


def test_only_the_same_filter_covers_a_filtered_run() -> None:
    header, releases = filtered_run()
    plain = dataclasses.replace(header, plan={k: v for k, v in header.plan.items() if k != NAME})
    assert covers(header, header, releases)
    assert not covers(plain, header, releases)
    assert not covers(header, plain, releases)


def test_the_reconstruction_bound_of_a_filtered_run() -> None:
    """From the filter's order by Hoelder's inequality: above the PLD's of the whole plan, below certainty."""
    header, releases = filtered_run(30)
    plain = dataclasses.replace(header, plan={k: v for k, v in header.plan.items() if k != NAME})
    got, pld = (reconstruction_bound(h, releases, kappa=0.1) for h in (header, plain))
    assert got.whole_run is not None and pld.whole_run is not None
    assert pld.whole_run < got.whole_run < 1
    assert got.one_step == pld.one_step


def test_the_statement_names_theorem_order_and_price() -> None:
    header, releases = filtered_run(60)
    found = statement(header, releases)
    words = " ".join(str(found).split())
    assert "Feldman & Zrnic 2021" in words and "Renyi filter of order" in words
    fixed = found.proved_if_fixed
    assert fixed is not None and fixed.accountant == "PLD"
    assert "Had the same 60 steps been fixed in advance: epsilon = " in words
    assert "% of its budget was granted" in words
    data = json.loads(json.dumps(found.to_dict()))
    assert data["proved"]["filter"]["order"] == header.plan[NAME][0]["order"]
